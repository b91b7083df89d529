"""Line editing of questions: history over sessions, and completion."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..config.temporary import cache_folder

_MOST_LINES = 1000


@contextmanager
def line_editing(names: Callable[[], list[str]], *, history: bool) -> Iterator[bool]:
    """Give `input` line editing; yield whether there is any.

    Args:
        names: Returns words to complete at the start of a line.
        history: Whether to read and write the file of earlier lines, which only this user reads.
    """
    try:
        import readline
    except ImportError:
        yield False
        return
    folder = cache_folder() if history else None
    path = None if folder is None else folder / "chat_history"
    if path is not None:
        with suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(_MOST_LINES)
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, state: _completion(names(), text, state))
    readline.parse_and_bind("tab: complete")
    try:
        yield True
    finally:
        readline.set_completer(None)
        if path is not None:
            with suppress(OSError):
                _write(readline, path)


@contextmanager
def without_echo() -> Iterator[None]:
    """Keep keys that are typed meanwhile, Ctrl-C's `^C` too, out of what is drawn on a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    quiet = termios.tcgetattr(file)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(file, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(file, termios.TCSANOW, before)


def _completion(names: list[str], text: str, state: int) -> str | None:
    fitting = [name for name in names if text and name.startswith(text)]
    return f"{fitting[state]} " if state < len(fitting) else None


def _write(readline: Any, path: Path) -> None:
    """Write the history to a new file of mode 600, and put it in place of the old one."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600))
    readline.write_history_file(new)
    os.replace(new, path)
