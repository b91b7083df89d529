"""What codes gain a model, and a folder of them, before anything is loaded."""
