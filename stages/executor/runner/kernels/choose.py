"""The choice among libraries that have the same functions for different processors."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_long, c_void_p

from .compile import TILES, KernelsUnavailable, Library, load_library

MOST_INSTRUCTIONS_VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's limit for PyTorch's own products. Here it decides whether AMX is used, and whether
AVX-512 is.
https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html"""

_TYPES = {"p": c_void_p, "l": c_long, "f": c_float}


def first_usable(
    candidates: Sequence[Library], signatures: Mapping[str, str], purpose: str = ""
) -> tuple[Library, ctypes.CDLL]:
    """Return the first library that this machine can use, with its functions declared.

    Args:
        candidates: The libraries, the best one first.
        signatures: The letters of `_TYPES` for the arguments of each function.
        purpose: The use, for the error without candidates.

    Raises:
        KernelsUnavailable: There is none, or none on this machine.
    """
    reason = f"there are none for {purpose}"
    for candidate in candidates:
        try:
            return candidate, _prepared(candidate, signatures)
        except KernelsUnavailable as error:
            # Only the text: a local error would form a cycle with this frame, and keep the objects
            # of all callers' frames, such as a model.
            reason = str(error)
    raise KernelsUnavailable(reason)


def _allowed(candidate: Library) -> bool:
    most = os.environ.get(MOST_INSTRUCTIONS_VARIABLE, "").upper()
    # oneDNN ignores unknown values.
    if "AMX" in most or not most.startswith(("SSE", "AVX")):
        return True
    if most.startswith(("AVX512", "AVX10")):
        return not _has_tiles(candidate)
    return candidate.instructions == "AVX2"


def _has_tiles(candidate: Library) -> bool:
    return candidate.processor == TILES.processor


def _prepared(candidate: Library, signatures: Mapping[str, str]) -> ctypes.CDLL:
    if not _allowed(candidate):
        raise KernelsUnavailable(f"{MOST_INSTRUCTIONS_VARIABLE} allows no {candidate.instructions}")
    loaded = load_library(candidate)
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = [_TYPES[each] for each in arguments], None
    if _has_tiles(candidate) and not loaded.allow_tiles():
        raise KernelsUnavailable(f"the system does not allow {candidate.instructions}")
    return loaded
