"""Advice for model paths that don't exist."""

from __future__ import annotations

import re

from .engine import BUNDLED_MODEL

# A hub name, by the hub library's rule.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


def missing_model(path: object) -> str:
    """Return the end of a sentence about a missing model path.

    Nothing is downloaded for a path, so a name on the hub needs `pull` first.
    """
    if _HUB_NAME.fullmatch(str(path)):
        return f"fetch it with `nano-inference pull {path}`, which prints the folder to give"
    return (
        f"give a folder in Transformers' format, a GGUF file, or {BUNDLED_MODEL!r} for the bundled "
        "model"
    )
