"""Models that come with the package: where they lie on disk."""

from pathlib import Path

TINY: Path = Path(__file__).resolve().parent / "tiny"
"""Folder of the bundled tiny model, in the ordinary Transformers layout."""
