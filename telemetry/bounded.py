"""Lines of a log that stay short, whatever is logged."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, MutableMapping
from itertools import chain
from typing import Any

import structlog

from ..config import cut_middle, shown

MOST_LOG_BYTES = 16 << 10
"""Size of a line, in UTF-8; with its traceback, when that is text of many lines."""

# Characters of each value, one after the other, until the line fits. Some become twelve bytes.
_MOST_OF_A_VALUE = (2000, 500, 100, 20)
# A traceback says more than other values do.
_TRACEBACK_SHARE = 4

_ALWAYS = ("event", "level", "timestamp")

# A level of nesting counts as so many characters, so that few of them are gone into.
_NESTING = 20


class Bounded:
    """A renderer whose lines have at most `MOST_LOG_BYTES`: what is longer has shorter values."""

    def __init__(self, renderer: structlog.types.Processor) -> None:
        self._renderer = renderer

    def __call__(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        for most in _MOST_OF_A_VALUE:
            line = self._render(logger, method, event, most)
            if len(line) <= MOST_LOG_BYTES:
                return line.decode()
        few = {key: event[key] for key in _ALWAYS if key in event}
        return self._render(logger, method, few, most).decode()

    def _render(
        self, logger: Any, method: str, event: MutableMapping[str, Any], most: int
    ) -> bytes:
        shares = {"exception": _TRACEBACK_SHARE}
        short = {key: _short(value, most * shares.get(key, 1)) for key, value in event.items()}
        line = self._renderer(logger, method, short)
        assert isinstance(line, str)
        # A stream may not take lone surrogates, and its error would come out of the logging call.
        return line.encode(errors="backslashreplace")


def _short(value: Any, most: int) -> Any:
    """The value itself when it is plain and short, else a text of at most so many characters."""
    if isinstance(value, str):
        return cut_middle(value, most)
    if isinstance(value, int) and value.bit_length() > 64:
        return shown(value)
    if value is None or _room(value, most) >= 0:
        return value
    try:
        return cut_middle(reprlib.repr(value), most)
    except ValueError:  # of integers that Python does not write out
        return f"<{type(value).__name__}>"


def _room(value: Any, room: int) -> int:
    """How much of `room` characters a value leaves; negative when it does not fit, or has a
    rendering of its own that may have any size."""
    if isinstance(value, str):
        return room - len(value)
    if value is None or isinstance(value, bool | float):
        return room - _NESTING
    if isinstance(value, int):
        return room - _NESTING if value.bit_length() <= 64 else -1
    parts: Iterable[Any]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        parts = chain(value, value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = value
    else:
        return -1
    room -= _NESTING
    for part in parts:
        if room < 0:
            break
        room = _room(part, room)
    return room
