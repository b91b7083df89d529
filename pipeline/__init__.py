"""Placement of stages, links between them, their supervision, and the interface for callers."""
