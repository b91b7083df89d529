"""New weights for the model: transports, checks, and the write in place."""
