"""The block list: literals and patterns, matched against normalised text as it grows."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import re2

from ...config import RequestError, shown

LONGEST_SEGMENT = 64
"""Most characters that are composed together. Unicode's stream-safe text has at most 30 marks after
a letter; ordering a very long sequence takes quadratic time."""

# Characters of a long text that are normalised at once.
_NORMALISED_PIECE = 4096

# Default_Ignorable_Code_Point, assigned or not: invisible characters don't separate letters.
_IGNORABLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_SURROGATES = range(0xD800, 0xE000)

# RE2 keeps its automaton within this; beyond it, it goes on without, more slowly.
_MAX_MEMORY_BYTES = 64 << 20

# Characters that are scanned at once, so that a pattern with very long matches takes no quadratic
# time.
_PIECE = 256

_ESCAPES = re.compile(r"\\(?:x\{[0-9A-Fa-f]*\}|[pP]\{[^}]*\}|.)", re.DOTALL)
_UNBOUNDED = re.compile(r"[*+]|\{[0-9]+,\}")
_REPEATED = re.compile(r"(.)\{(?:[0-9]+,)?([0-9]+)\}", re.DOTALL)


class _NormalisedCharacter(NamedTuple):
    """A normalised character. `joins`: whether it may combine with the character before it."""

    text: str
    joins: bool


class Normaliser:
    """Normalises a text that grows: compatibility forms, composition and case (Unicode's
    NFKC_Casefold, section 3.13), without invisible characters: "Bad", in wide letters or with a
    soft hyphen, becomes "bad".

    The result depends on the text alone, not on how it is cut into pushes. It lags behind by the
    last character, which a mark may still follow.

    Attributes:
        taken: Characters of the text so far.
    """

    def __init__(self) -> None:
        self.taken = 0
        # The last character with the marks after it, and where it begins.
        self._begin = 0
        self._segment = ""

    def push(self, text: str) -> tuple[str, list[int]]:
        """Take the next text.

        Returns:
            The normalised text that is certain by now, and for each of its characters the place of
            its source in the text, `[length]`.
        """
        normalised: list[str] = []
        origins: list[int] = []
        if text and text.isascii():
            # Fast path: each character is a segment of its own.
            self._end_segment(normalised, origins)
            normalised.append(text[:-1].lower())
            origins += range(self.taken, self.taken + len(text) - 1)
            self.taken += len(text)
            self._begin, self._segment = self.taken - 1, text[-1]
        else:
            for character in text:
                joins = _normalise_character(character).joins
                if not joins or len(self._segment) == LONGEST_SEGMENT:
                    self._end_segment(normalised, origins)
                self._segment += character
                self.taken += 1
        return "".join(normalised), origins

    def finish(self) -> tuple[str, list[int]]:
        """End the text. Returns as `push`."""
        normalised: list[str] = []
        origins: list[int] = []
        self._end_segment(normalised, origins)
        return "".join(normalised), origins

    def _end_segment(self, normalised: list[str], origins: list[int]) -> None:
        became = _normalise_segment(self._segment)
        normalised.append(became)
        origins += [self._begin] * len(became)
        self._begin, self._segment = self.taken, ""


def normalise(text: str) -> str:
    """Normalise a whole text."""
    normaliser = Normaliser()
    starts = range(0, len(text), _NORMALISED_PIECE)
    pieces = [normaliser.push(text[start : start + _NORMALISED_PIECE])[0] for start in starts]
    return "".join(pieces) + normaliser.finish()[0]


def _normalise_segment(segment: str) -> str:
    if len(segment) < 2:
        return _normalise_character(segment).text if segment else ""
    # Marks are ordered before they are normalised.
    parts = unicodedata.normalize("NFKD", segment)
    return unicodedata.normalize("NFC", "".join(_normalise_character(part).text for part in parts))


@cache
def _normalise_character(character: str) -> _NormalisedCharacter:
    if ord(character) in _SURROGATES:
        return _NormalisedCharacter("\ufffd", joins=False)  # UTF-8 can't encode it
    before, normalised = "", character
    while normalised != before:
        before = normalised
        visible = _IGNORABLE.sub("", normalised)
        cased = unicodedata.normalize("NFKC", visible).casefold()
        normalised = unicodedata.normalize("NFKC", cased)
    joins = not normalised or _begins_joining(character) or _begins_joining(normalised)
    return _NormalisedCharacter(normalised, joins)


def _begins_joining(text: str) -> bool:
    """Return whether a text's first character may be composed with those before it: a mark, or a
    vowel or final consonant of Hangul."""
    character = unicodedata.normalize("NFD", text)[0]
    hangul = "\u1160" <= character <= "\u11ff" or "\ud7b0" <= character <= "\ud7ff"
    return hangul or unicodedata.category(character)[0] == "M"


class BlockList:
    """Literals and patterns (RE2's syntax), matched against normalised text, without case.

    A literal also matches within a word. A pattern's anchors refer to the text before any cut.

    Attributes:
        max_match: Most characters of normalised text in one match.
    """

    def __init__(self, literals: Sequence[str], patterns: Sequence[str], max_match: int) -> None:
        """`max_match`: cuts the matches of patterns; literals match whole.

        Raises:
            RequestError: invalid_guardrails: one is empty, matches the empty text, or is malformed.
        """
        normalised = [_normalised_literal(literal) for literal in literals]
        widths = [len(literal) for literal in normalised]
        readable = [_readable_pattern(pattern) for pattern in patterns]
        widths += [int(min(max_match, _longest_match(pattern))) for pattern in readable]
        self.max_match = max(widths, default=0)
        each = [*map(re2.escape, normalised), *readable]
        self._expression = _compiled("|".join(f"(?:{one})" for one in each)) if each else None

    def __bool__(self) -> bool:
        return self._expression is not None

    def blocks(self, text: str) -> bool:
        """Return whether anything matches in a whole text, at any length."""
        return self._expression is not None and self._expression.search(normalise(text)) is not None

    def find(self, text: str, begin: int, end: int) -> int | None:
        """Return where the first match of at most `max_match` characters begins, among those that
        begin from `begin` to before `end`.

        Args:
            text: Normalised, with up to `max_match` characters and one more after `end`.
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
    """Scans one text that grows, for matches of at most `max_match` characters.

    The result depends on the text alone, not on how it is cut into pushes.

    Attributes:
        taken: Characters of the text so far.
        safe: Characters that can't be part of a match any more.
        blocked_at: Start of the first match; None until it is known.
    """

    def __init__(self, block_list: BlockList, before: str = "") -> None:
        """`before`: text before the scanned one, in which a match may begin; `context_chars` of it
        suffice."""
        self.taken = 0
        self.safe = 0
        self.blocked_at: int | None = None
        self._block_list = block_list
        self._normaliser = Normaliser()
        self._before = len(before)
        # The end of the normalised text. Matches that begin before `_next` were searched.
        self._text, self._origins = self._normaliser.push(before)
        self._next = max(0, len(self._text) - block_list.max_match)

    def push(self, text: str) -> None:
        """Take the next text."""
        self.taken += len(text)
        for start in range(0, len(text), _PIECE):
            if self.blocked_at is not None:
                return
            self._look(*self._normaliser.push(text[start : start + _PIECE]), ended=False)

    def finish(self) -> None:
        """End the text, which decides what was held back."""
        if self.blocked_at is None:
            self._look(*self._normaliser.finish(), ended=True)

    def _look(self, normalised: str, origins: list[int], *, ended: bool) -> None:
        self._text += normalised
        self._origins += origins
        # An anchor at the end of a match needs the character after it.
        size = len(self._text)
        end = size if ended else size - self._block_list.max_match
        # Not at each character: a scan takes time in proportion to the held text.
        if end > self._next + (0 if ended else self._block_list.max_match // 8):
            found = self._block_list.find(self._text, self._next, end)
            if found is not None:
                self.blocked_at = self.safe = self._place(found)
                return
            # An anchor at the beginning of a match needs the character before it.
            dropped = max(0, end - 1)
            self._text, self._origins = self._text[dropped:], self._origins[dropped:]
            self._next = end - dropped
        if ended:
            self.safe = self.taken
        elif self._next < len(self._origins):
            self.safe = self._place(self._next)

    def _place(self, index: int) -> int:
        """Return the place in the text of a normalised character's source."""
        return max(0, self._origins[index] - self._before)


def context_chars(block_list: BlockList) -> int:
    """Return how many characters before a text can be part of a match in it."""
    return 2 * block_list.max_match + LONGEST_SEGMENT


def _compiled(expression: str) -> Any:
    """Raises `re2.error`."""
    options = re2.Options()
    options.case_sensitive = False
    options.never_capture = True
    options.log_errors = False
    options.max_mem = _MAX_MEMORY_BYTES
    return re2.compile(expression, options)


def _normalised_literal(literal: str) -> str:
    normalised = normalise(literal)
    if not normalised:
        raise _invalid(f"the literal {shown(literal)} has no visible character")
    return normalised


def _readable_pattern(pattern: str) -> str:
    """Return a pattern with its characters normalised."""
    if r"\C" in _ESCAPES.findall(pattern):
        raise _invalid(f"the pattern {shown(pattern)} has \\C, a byte; text has no bytes")
    normalised = unicodedata.normalize("NFC", "".join(map(_readable, pattern)))
    try:
        compiled = _compiled(normalised)
    except re2.error as error:
        (reason,) = error.args
        told = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise _invalid(f"the pattern {shown(pattern)} can't be read: {shown(told)}") from None
    if compiled.search("") is not None:
        raise _invalid(f"the pattern {shown(pattern)} matches where there is nothing")
    return normalised


def _readable(character: str) -> str:
    """Normalise a pattern's character. ASCII may be syntax, and is compared without case."""
    if character.isascii():
        return character
    normalised = normalise(character)
    if len(normalised) != 1 or (normalised.isascii() and not normalised.isalnum()):
        raise _invalid(
            f"a pattern has {shown(character)}, which is compared as {shown(normalised)}; write "
            "that"
        )
    return normalised


def _longest_match(pattern: str) -> float:
    """Return an upper bound for the length of a match: each character of a pattern matches one
    character, or its count; a group its count times its content."""
    syntax = _ESCAPES.sub("x", pattern)
    if _UNBOUNDED.search(syntax):
        return math.inf
    repeated = [(before, int(most)) for before, most in _REPEATED.findall(syntax)]
    characters = len(pattern) + sum(most for before, most in repeated if before != ")")
    return characters * math.prod(most or 1 for before, most in repeated if before == ")")


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_guardrails")
