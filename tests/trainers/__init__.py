"""Trainers of others, as their registries have them, against a server of the bundled model."""
