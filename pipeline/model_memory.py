"""What models take of this machine's memory: measured, and guessed before they are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from ..config import Config

PROCESSES_BYTES = 300 << 20
"""What the processes of a lane take beside weights and KV, about: Python, and torch once."""

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_MOST_HEADER_BYTES = 100 << 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_of(pids: Iterable[int]) -> int:
    """What processes take of this machine's memory, in bytes; 0 where the system does not tell.

    What several share is counted in equal parts (Linux's PSS), so that all together make up what is
    taken.
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
    """About what a model's processes will take, in bytes.

    Args:
        config: The settings of its processes.
    """
    engine = config.engine
    draft = engine.draft_model_path if engine.speculation == "auto" else ""
    others = [Path(path).expanduser() for path in (engine.reference_model_path, draft) if path]
    weights = sum(weight_bytes(each, engine.dtype) for each in (engine.model_folder, *others))
    replica = weights + engine.kv_cache_bytes
    return PROCESSES_BYTES + replica * config.pipeline.replicas


def weight_bytes(model: Path, dtype: str) -> int:
    """What the weights in a folder, or in one file, take when they are loaded in a dtype; 0 where
    they can't be looked at."""
    try:
        if model.is_file():
            return model.stat().st_size
        files = next((found for each in _WEIGHT_FILES if (found := list(model.glob(each)))), [])
        return sum(_loaded_bytes(file, dtype) for file in files)
    except OSError:  # whoever loads it says why
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
            return _ITEM_BYTES[dtype] * sum(map(_number, shapes))
        except (ValueError, TypeError, KeyError, AttributeError):
            return size


def _number(shape: list[int]) -> int:
    number = 1
    for each in shape:
        number *= each
    return number
