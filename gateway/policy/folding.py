"""Text as a block list compares it: however it is written, what reads alike is alike."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

LONGEST_SEGMENT = 64
"""Characters that are composed together at most. Unicode's stream-safe text has 30 marks behind a
letter; putting very many in order would take the square of their number."""

# Characters of a long text that are folded at once.
_PIECE = 4096

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
    pieces = range(0, len(text), _PIECE)
    folded = [folding.push(text[start : start + _PIECE])[0] for start in pieces]
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
