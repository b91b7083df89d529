"""Speculation: drafted tokens, verified in the same step as the next tokens."""
