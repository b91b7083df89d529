"""Programs of others that act by tools, against a gateway whose model follows a script."""
