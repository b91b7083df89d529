"""The optional parts' sections of messages between stages, a file for each part."""
