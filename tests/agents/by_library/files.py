"""Tools that programs of Python offer."""

from __future__ import annotations

from pathlib import Path


def write_file(path: str, content: str) -> str:
    """Write a text into a file.

    Args:
        path: The file's path.
        content: The text.
    """
    Path(path).write_text(content)
    return "written"


def read_file(path: str) -> str:
    """Read a file's text.

    Args:
        path: The file's path.
    """
    return Path(path).read_text()
