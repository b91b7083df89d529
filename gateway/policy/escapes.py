"""What the escapes of JSON stand for, looked through as text grows.

A model that writes `b\\u0061d` in the arguments of a call, or in an answer that is JSON, has said
"bad" to whoever reads that.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from .block_list import BlockList, Scanner, context_chars

_LEVELS = 2
"""How often JSON is looked for in a text of JSON; arguments may be such a text."""

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]')

# The same, or at the end what more text may make an escape, or the second half of a pair.
_GROWING = re.compile(
    r"(?P<begun>\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?"
    rf"\Z)|{_ESCAPE.pattern}"
)

_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class EscapedScanner:
    """Looks through one text that grows as a `Scanner` does, with its escapes replaced.

    It costs nothing until there is one. Of a match that begins before the first escape it is known
    that it ends behind that: its place is that of the escape.

    Attributes:
        taken, safe, blocked_at: As a `Scanner` has them, in the text as it was written.
    """

    __slots__ = (
        "_before",
        "_block_list",
        "_held",
        "_levels",
        "_made",
        "_scanners",
        "_starts",
        "blocked_at",
        "safe",
        "taken",
    )

    def __init__(self, block_list: BlockList, before: str = "", levels: int = _LEVELS) -> None:
        """`before`: as for a `Scanner`."""
        self.taken = 0
        self.safe = 0
        self.blocked_at: int | None = None
        self._block_list = block_list
        self._before = before
        self._levels = levels
        # From the first escape on.
        self._scanners: tuple[Scanner | EscapedScanner, ...] = ()
        # Text that may be the beginning of an escape, and how much was made of all before it.
        self._held = ""
        self._made = 0
        # Where text of one piece begins: (in what was made of it, as it was written).
        self._starts: list[tuple[int, int]] = []

    def push(self, text: str) -> None:
        """Takes the next text."""
        self.taken += len(text)
        if not self._scanners:
            at = text.find("\\")
            context = self._before + (text if at < 0 else text[:at])
            self._before = context[-context_chars(self._block_list) :]
            if at < 0:
                self.safe = self.taken
                return
            self._scanners = (Scanner(self._block_list, self._before),)
            if self._levels > 1:
                inner = EscapedScanner(self._block_list, self._before, self._levels - 1)
                self._scanners += (inner,)
            text = text[at:]
        self._take(self._held + text, ended=False)

    def finish(self) -> None:
        """The text has ended."""
        if not self._scanners:
            return
        self._take(self._held, ended=True)
        for scanner in self._scanners:
            scanner.finish()
        self._look()

    def _take(self, text: str, *, ended: bool) -> None:
        written, end = self.taken - len(text), len(text)
        pieces, at = [], 0
        for found in (_ESCAPE if ended else _GROWING).finditer(text):
            if not ended and found["begun"]:
                end = found.start()
                break
            pieces += [(text[at : found.start()], at), (_meant(found[0]), found.start())]
            at = found.end()
        pieces.append((text[at:end], at))
        for piece, place in pieces:
            if piece:
                self._starts.append((self._made, written + place))
                self._made += len(piece)
        self._held = text[end:]
        made = "".join(piece for piece, _ in pieces)
        for scanner in self._scanners:
            scanner.push(made)
        self._look()

    def _look(self) -> None:
        found = [each.blocked_at for each in self._scanners if each.blocked_at is not None]
        safe = min(scanner.safe for scanner in self._scanners)
        # What one of them has found may stand behind what another has yet to find.
        if found and min(found) <= safe:
            self.blocked_at = self._written(min(found))
        self.safe = self.taken - len(self._held) if safe == self._made else self._written(safe)

    def _written(self, place: int) -> int:
        """Where that stands as it was written."""
        made, written = self._starts[bisect_right(self._starts, place, key=_made) - 1]
        return written + place - made


def _made(start: tuple[int, int]) -> int:
    return start[0]


def _meant(escape: str) -> str:
    if escape[1] != "u":
        return _SHORT.get(escape[1], escape[1])
    units = b"".join(bytes.fromhex(unit) for unit in escape.split("\\u")[1:])
    # Half of a pair is no character.
    return units.decode("utf-16-be", "replace")
