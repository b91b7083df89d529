"""Speculation: drafted tokens, verified beside those that are computed in any case."""
