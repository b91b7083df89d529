"""The script that made the bundled vision model, and the pictures that it draws."""
