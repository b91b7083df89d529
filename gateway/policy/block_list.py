"""What may stand in no prompt and no answer: literals and patterns, looked for as text grows."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import re2

from ...config import RequestError, shown

LONGEST_SEGMENT = 64
"""Characters that are composed together at most. Unicode's stream-safe text has 30 marks behind a
letter; putting very many in order would take the square of their number."""

# Characters of a long text that are folded at once.
_FOLD_PIECE = 4096

# Default_Ignorable_Code_Point, assigned or not: what is invisible comes between no two letters.
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_SURROGATES = range(0xD800, 0xE000)
_REPLACEMENT = "\ufffd"


class _Folded(NamedTuple):
    """What a character becomes, and whether it may act on what stands before it."""

    text: str
    joins: bool


class _Foldings(dict[str, _Folded]):
    """Of each character; filled as they are asked for."""

    def __missing__(self, character: str) -> _Folded:
        folded = self[character] = _fold_character(character)
        return folded


class Folding:
    """Folds a text that grows: compatibility forms, composition and case (Unicode's NFKC_Casefold,
    section 3.13), with what is invisible left out: "Bad", in wide letters or with a soft hyphen, is
    "bad".

    What it has given out depends on the text alone, not on how the text is cut into pushes. It lags
    behind by the last character, which a mark may still follow.

    Attributes:
        taken: Characters of the text so far.
    """

    __slots__ = ("_begin", "_segment", "taken")

    def __init__(self) -> None:
        self.taken = 0
        # The last character with the marks behind it, and where it begins.
        self._begin = 0
        self._segment = ""

    def push(self, text: str) -> tuple[str, list[int]]:
        """Takes the next text.

        Returns:
            The folded text that is now certain, and `[its length]`, for each of its characters
            where that which it was made of begins in the text.
        """
        if text.isascii() and text:
            return self._push_ascii(text)
        folded: list[str] = []
        origins: list[int] = []
        for character in text:
            if not _FOLDINGS[character].joins or len(self._segment) == LONGEST_SEGMENT:
                self._end_segment(folded, origins)
            self._segment += character
            self.taken += 1
        return "".join(folded), origins

    def finish(self) -> tuple[str, list[int]]:
        """The text has ended. Returns as `push`."""
        folded: list[str] = []
        origins: list[int] = []
        self._end_segment(folded, origins)
        return "".join(folded), origins

    def _push_ascii(self, text: str) -> tuple[str, list[int]]:
        """The same, quickly: each character is a segment of its own."""
        folded: list[str] = []
        origins: list[int] = []
        self._end_segment(folded, origins)
        folded.append(text[:-1].lower())
        origins += range(self.taken, self.taken + len(text) - 1)
        self.taken += len(text)
        self._begin, self._segment = self.taken - 1, text[-1]
        return "".join(folded), origins

    def _end_segment(self, folded: list[str], origins: list[int]) -> None:
        became = _fold_segment(self._segment)
        folded.append(became)
        origins += [self._begin] * len(became)
        self._begin, self._segment = self.taken, ""


def fold(text: str) -> str:
    """A whole text."""
    folding = Folding()
    pieces = range(0, len(text), _FOLD_PIECE)
    folded = [folding.push(text[start : start + _FOLD_PIECE])[0] for start in pieces]
    return "".join(folded) + folding.finish()[0]


def _fold_segment(segment: str) -> str:
    if len(segment) < 2:
        return _FOLDINGS[segment].text if segment else ""
    # Marks are in order before they become something else.
    parts = unicodedata.normalize("NFKD", segment)
    return unicodedata.normalize("NFC", "".join(_FOLDINGS[part].text for part in parts))


def _fold_character(character: str) -> _Folded:
    if ord(character) in _SURROGATES:
        return _Folded(_REPLACEMENT, joins=False)  # no text; UTF-8 has nothing for it
    before, folded = "", character
    while folded != before:
        before = folded
        visible = _IGNORABLE.sub("", folded)
        cased = unicodedata.normalize("NFKC", visible).casefold()
        folded = unicodedata.normalize("NFKC", cased)
    joins = not folded or _begins_joining(character) or _begins_joining(folded)
    return _Folded(folded, joins)


def _begins_joining(text: str) -> bool:
    return _joins(unicodedata.normalize("NFD", text)[0])


def _joins(character: str) -> bool:
    """Whether a character may be composed or put in order with those before it: a mark, or a vowel
    or final consonant of Hangul."""
    hangul = "\u1160" <= character <= "\u11ff" or "\ud7b0" <= character <= "\ud7ff"
    return hangul or unicodedata.category(character)[0] == "M"


_FOLDINGS = _Foldings()


# RE2 keeps its automaton within this; beyond it, it goes on without, more slowly.
_MAX_MEMORY_BYTES = 64 << 20

# Text is looked through in pieces, so that a pattern that matches far too much costs no square.
_PIECE = 256

_ESCAPES = re.compile(r"\\(?:x\{[0-9A-Fa-f]*\}|[pP]\{[^}]*\}|.)", re.DOTALL)
_UNBOUNDED = re.compile(r"[*+]|\{[0-9]+,\}")
_REPEATED = re.compile(r"(.)\{(?:[0-9]+,)?([0-9]+)\}", re.DOTALL)


class BlockList:
    """Literals and patterns (RE2's syntax), compared with the folded text and without case.

    A literal matches wherever it stands, also within a word. What a pattern says of the beginning
    and end of the text or of a word is told by the text as it was written, before anything is cut.

    Attributes:
        max_match: The most characters of folded text that anything here matches.
    """

    def __init__(self, literals: Sequence[str], patterns: Sequence[str], max_match: int) -> None:
        """Args: `max_match` is for patterns that could match more; literals are as long as they
        are.

        Raises:
            RequestError: invalid_guardrails: one of them is nothing, matches nothing or can't be
                read.
        """
        folded = [_folded_literal(literal) for literal in literals]
        widths = [len(literal) for literal in folded]
        readable = [_readable_pattern(pattern) for pattern in patterns]
        widths += [int(min(max_match, _longest_match(pattern))) for pattern in readable]
        self.max_match = max(widths, default=0)
        each = [*map(re2.escape, folded), *readable]
        self._expression = _compiled("|".join(f"(?:{one})" for one in each)) if each else None

    def __bool__(self) -> bool:
        return self._expression is not None

    def blocks(self, text: str) -> bool:
        """Whether anything matches anywhere in a whole text, however much of it."""
        return self._expression is not None and self._expression.search(fold(text)) is not None

    def find(self, text: str, begin: int, end: int) -> int | None:
        """Where the first match of at most `max_match` characters begins, of those that begin from
        `begin` to before `end`.

        Args:
            text: Folded; up to `max_match` characters and one behind `end`, unless it ends before.
        """
        expression, longest = self._expression, self.max_match
        while expression is not None and begin < end:
            found = expression.search(text, begin, min(end - 1 + longest, len(text)))
            if found is None or found.start() >= end:
                return None
            start: int = found.start()
            if found.end() - start <= longest:
                return start
            if expression.match(text, start, min(start + longest, len(text))):
                return start
            begin = start + 1
        return None


class Scanner:
    """Looks through one text that grows, for matches of at most `max_match` characters.

    The outcome depends on the text alone, not on how it is cut into pushes.

    Attributes:
        taken: Characters of the text so far.
        safe: So many of them can't be part of a match any more, whatever comes.
        blocked_at: Where the first match begins, once it is known; nothing behind matters then.
    """

    __slots__ = (
        "_before",
        "_block_list",
        "_folded",
        "_folding",
        "_next",
        "_origins",
        "blocked_at",
        "safe",
        "taken",
    )

    def __init__(self, block_list: BlockList, before: str = "") -> None:
        """Args: `before` stands before the text and is no part of it, but a match may begin there;
        `context_chars` of it are enough."""
        self.taken = 0
        self.safe = 0
        self.blocked_at: int | None = None
        self._block_list = block_list
        self._folding = Folding()
        self._before = len(before)
        # The end of the folded text. From `_next` on no beginning of a match was looked for.
        self._folded, self._origins = self._folding.push(before)
        self._next = max(0, len(self._folded) - block_list.max_match)

    def push(self, text: str) -> None:
        """Takes the next text."""
        self.taken += len(text)
        for start in range(0, len(text), _PIECE):
            if self.blocked_at is not None:
                return
            self._look(*self._folding.push(text[start : start + _PIECE]), ended=False)

    def finish(self) -> None:
        """The text has ended: what was held back because of what might come is decided."""
        if self.blocked_at is None:
            self._look(*self._folding.finish(), ended=True)

    def _look(self, folded: str, origins: list[int], *, ended: bool) -> None:
        self._folded += folded
        self._origins += origins
        # What a match says of its end takes the character behind it.
        size = len(self._folded)
        end = size if ended else size - self._block_list.max_match
        # Not at each character: a look costs as much as what is held back is long.
        if end > self._next + (0 if ended else self._block_list.max_match // 8):
            found = self._block_list.find(self._folded, self._next, end)
            if found is not None:
                self.blocked_at = self.safe = self._place(found)
                return
            # What one says of its beginning takes the character before.
            dropped = max(0, end - 1)
            self._folded, self._origins = self._folded[dropped:], self._origins[dropped:]
            self._next = end - dropped
        if ended:
            self.safe = self.taken
        elif self._next < len(self._origins):
            self.safe = self._place(self._next)

    def _place(self, index: int) -> int:
        """Where a folded character's origin is in the text."""
        return max(0, self._origins[index] - self._before)


def context_chars(block_list: BlockList) -> int:
    """How much before a text a match that ends in it may reach back, and what that leans on."""
    return 2 * block_list.max_match + LONGEST_SEGMENT


def _compiled(expression: str) -> Any:
    """Raises `re2.error`."""
    options = re2.Options()
    options.case_sensitive = False
    options.never_capture = True
    options.log_errors = False
    options.max_mem = _MAX_MEMORY_BYTES
    return re2.compile(expression, options)


def _folded_literal(literal: str) -> str:
    folded = fold(literal)
    if not folded:
        raise _invalid(f"the literal {shown(literal)} has no visible character")
    return folded


def _readable_pattern(pattern: str) -> str:
    """A pattern as it is compared with folded text, whose characters are folded too."""
    if r"\C" in _ESCAPES.findall(pattern):
        raise _invalid(f"the pattern {shown(pattern)} has \\C, a byte; text has no bytes")
    folded = unicodedata.normalize("NFC", "".join(map(_readable, pattern)))
    try:
        compiled = _compiled(folded)
    except re2.error as error:
        (reason,) = error.args
        told = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise _invalid(f"the pattern {shown(pattern)} can't be read: {shown(told)}") from None
    if compiled.search("") is not None:
        raise _invalid(f"the pattern {shown(pattern)} matches where there is nothing")
    return folded


def _readable(character: str) -> str:
    """A pattern's character. Letters of ASCII are compared without case, and may be syntax."""
    if character.isascii():
        return character
    folded = fold(character)
    if len(folded) != 1 or (folded.isascii() and not folded.isalnum()):
        raise _invalid(
            f"a pattern has {shown(character)}, which is compared as {shown(folded)}; write that"
        )
    return folded


def _longest_match(pattern: str) -> float:
    """No match is longer. Each character of a pattern matches at most one, unless it is repeated:
    then as many as its count says, or of a group so many times what is within."""
    syntax = _ESCAPES.sub("x", pattern)
    if _UNBOUNDED.search(syntax):
        return math.inf
    repeated = [(before, int(most)) for before, most in _REPEATED.findall(syntax)]
    characters = len(pattern) + sum(most for before, most in repeated if before != ")")
    return characters * math.prod(most or 1 for before, most in repeated if before == ")")


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_guardrails")
