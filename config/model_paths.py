"""Advice for model paths where there is nothing."""

from __future__ import annotations

import re

from .engine import BUNDLED_MODEL

# As the hub's library has it: letters, digits, "-", "_" and "." on both sides of the slash.
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+", re.ASCII)


def missing_model(path: object) -> str:
    """What to do about a model path where there is nothing, as the end of a sentence.

    Nothing is ever downloaded for a path, so a name on the hub needs `pull` first.
    """
    if _HUB_NAME.fullmatch(str(path)):
        return f"fetch it with `nano-inference pull {path}`, which prints the folder to give"
    return (
        f"give a folder in Transformers' format, a GGUF file, or {BUNDLED_MODEL!r} for the bundled "
        "model"
    )
