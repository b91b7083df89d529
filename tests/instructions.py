"""Work in counts that are the same on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import nano_inference

ROOT = str(Path(nano_inference.__file__).parent)


def instructions(work: Callable[[], object], library: str = "") -> Counter[str]:
    """Bytecode instructions that our own files execute, and a library's if one is named, by file.

    Those of this thread alone.
    """
    with counted(library) as counts:
        work()
    return counts


@contextmanager
def counted(library: str = "") -> Iterator[Counter[str]]:
    """Count `instructions` of this block."""
    counts: Counter[str] = Counter()

    def in_frame(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            counts[frame.f_code.co_filename.removeprefix(ROOT)] += 1
        return in_frame

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        ours = name.startswith(ROOT) and "/site-packages/" not in name and "/tests/" not in name
        if not ours and not (library and f"/site-packages/{library}/" in name):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return in_frame

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield counts
    finally:
        sys.settrace(before)
