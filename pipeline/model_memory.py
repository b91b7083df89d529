"""Memory of models on this machine: measured, and estimated before they are loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from ..config import Config

PROCESSES_BYTES = 300 << 20
"""Approximate memory of a lane's processes without weights and KV: Python, and torch once."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_MOST_HEADER_BYTES = 100 << 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_of(pids: Iterable[int]) -> int:
    """Return the memory of processes in bytes; 0 if unknown.

    Shared memory counts in equal parts (Linux's PSS), so that the sum over all processes is right.
    """
    return sum(map(_proportional_bytes, pids))


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended, or this is not Linux
        return 0
    line = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) << 10


def expected_memory(config: Config) -> int:
    """Return the approximate memory of a model's processes with these settings, in bytes."""
    engine = config.engine
    draft = engine.draft_model_path if engine.speculation == "auto" else ""
    others = [Path(path).expanduser() for path in (engine.reference_model_path, draft) if path]
    weights = sum(weight_bytes(each, engine.dtype) for each in (engine.model_folder, *others))
    replica = weights + engine.kv_cache_bytes
    return PROCESSES_BYTES + replica * config.pipeline.replicas


def weight_bytes(model: Path, dtype: str) -> int:
    """Return the size in `dtype` of the weights in a folder or file; 0 if they can't be read."""
    try:
        if model.is_file():
            return model.stat().st_size
        files = next((found for each in _WEIGHT_FILES if (found := list(model.glob(each)))), [])
        return sum(_loaded_bytes(file, dtype) for file in files)
    except OSError:  # the load reports it
        return 0


def _loaded_bytes(file: Path, dtype: str) -> int:
    size = file.stat().st_size
    if file.suffix != ".safetensors" or dtype not in _ITEM_BYTES:
        return size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size, _MOST_HEADER_BYTES):
            return size
        try:
            header = json.loads(opened.read(length))
            shapes = [each["shape"] for name, each in header.items() if name != "__metadata__"]
            return _ITEM_BYTES[dtype] * sum(map(math.prod, shapes))
        except (ValueError, TypeError, KeyError, AttributeError):
            return size
