"""What the commands share in writing to terminals and pipes."""

from __future__ import annotations

import sys
from contextlib import suppress

from rich.console import Console
from rich.text import Text

PROGRAM = "nano-inference"

_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def stdout() -> Console:
    """Standard output as it is now; prompts and answers in it are never read as markup."""
    return Console(highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """The same for standard error."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def complain(sentence: str) -> None:
    """One sentence on standard error, on one line however long it is; the exit status says the same
    where standard error can't be written."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.write(f"{PROGRAM}: {' '.join(sentence.split())}\n")
        sys.stderr.flush()


def milliseconds(nanoseconds: int) -> str:
    """Two decimals below a second, else none are worth reading: "4.10", "12,345"."""
    value = nanoseconds / 1e6
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def harmless(text: str) -> str:
    """The text without what a terminal would obey: a model may write escape sequences too."""
    return text.translate(_CONTROL)


def one_line(text: str) -> str:
    """The text with its line ends made visible, and harmless."""
    shown = text.strip().replace("\r\n", "\n").replace("\n", " ↵ ")
    return harmless(shown.replace("\t", " "))


def cut(text: str, cells: int) -> str:
    """The beginning of a text, at most so many columns wide, with "…" where it was cut."""
    line = Text(text, no_wrap=True)
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def cut_left(text: str, cells: int) -> str:
    """The end of a text, at most so many columns wide, with "…" where it was cut."""
    line = Text(text)
    if line.cell_len <= cells:
        return text
    start = len(text)
    width = 1
    while start > 0 and (width := width + Text(text[start - 1]).cell_len) <= cells:
        start -= 1
    return f"…{text[start:]}"
