"""The whole engine in one thread, in simulated time, from one seed. docs/simulation.md."""
