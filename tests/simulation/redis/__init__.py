"""A Redis server in this process: its commands, its scripts, its failures, and clients of it."""
