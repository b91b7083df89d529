"""One folder per interface. No interface imports another."""
