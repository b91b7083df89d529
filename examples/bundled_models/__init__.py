"""The scripts that made the models in `models/`."""
