"""Calls at the end of a thought that the model did not close.

Some models write a call, and end their message, without the mark that closes their reasoning. Calls
in a thought that goes on, or is closed, are part of it, as those that a model only considers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from functools import lru_cache
from typing import Any, Generic, TypeVar

from .regions import CALLS, CONTENT, MARKS, MessageRegions, RegionPiece, region_template

Functions = TypeVar("Functions")

_OTHER = "\u4e00"
"""A character that begins no mark, unless any may."""

_AT_ONCE_CHARS = 64
"""Characters that are read at a time: the rest after a mark that begins no call is read again."""


class Thought(Generic[Functions]):
    """A growing thought. Its text is held from the beginning of a call on, until other text shows
    that the thought goes on."""

    def __init__(
        self,
        response_template: dict[str, Any],
        names: Container[str],
        functions: Callable[[list[RegionPiece]], list[Functions]],
    ) -> None:
        """
        Args:
            names: Those of the tools.
            functions: Returns the functions of a complete call; none if it is no call.
        """
        fields = response_template["fields"]
        inner = {CALLS: fields[CALLS], CONTENT: fields.get(CONTENT, {})}
        self._template = region_template(response_template | {"fields": inner}, with_calls=True)
        self._regions = MessageRegions(self._template, "")
        self._opens = self._template.template.fields[CALLS].open_re
        self._begins = _begins_of(self._opens, self._template.looks_back)
        self._names = names
        self._functions = functions
        self._held: list[str] = []
        self._found: list[Functions] = []
        self._call: list[RegionPiece] = []
        # Whether the open call may be one as far as its beginning shows.
        self._begun = False

    def add(self, text: str) -> str:
        """Add text; return what is certainly part of the thought."""
        if not (self._held or self._call or self._regions.held or self._begins.search(text)):
            return text
        places = range(0, len(text), _AT_ONCE_CHARS)
        return "".join(self._added(text[at : at + _AT_ONCE_CHARS]) for at in places)

    def end(self, *, closed: bool) -> tuple[str, list[Functions]]:
        """Return the rest of the thought, and the calls at its end.

        Args:
            closed: Whether the thought was closed, or cut off, so that it has no calls.
        """
        text = "".join(map(self._told, self._regions.finish()))
        if closed or self._call or not self._found:
            return text + self._released(), []
        return text, self._found

    def _added(self, text: str) -> str:
        told = ""
        while text:
            pieces = self._regions.feed(text)
            text = ""
            for place, piece in enumerate(pieces):
                told += self._told(piece)
                if self._is_open_for_nothing():
                    # What stands after the mark is read again.
                    body = "".join(each.text for each in self._call[1:])
                    held = self._released()
                    told += held[: len(held) - len(body)]
                    rest = [*pieces[place + 1 :], *self._regions.finish()]
                    text = body + "".join(each.text for each in rest)
                    self._regions = MessageRegions(self._template, "")
                    break
        return told

    def _told(self, piece: RegionPiece) -> str:
        if piece.field == CALLS:
            return self._told_of_call(piece)
        if self._held and (piece.field == MARKS or piece.text.isspace()):
            self._held.append(piece.text)
            return ""
        return self._released() + piece.text

    def _told_of_call(self, piece: RegionPiece) -> str:
        if piece.kind == "open":
            self._call, self._begun = [], False
        self._held.append(piece.text)
        self._call.append(piece)
        if piece.kind not in ("close", "end"):
            return ""
        found = self._functions(self._call)
        self._call = []
        self._found += found
        return "" if found else self._released()

    def _is_open_for_nothing(self) -> bool:
        """Return whether the open call is none: its name is no tool's, or its JSON no object."""
        if self._begun or not self._call:
            return False
        found = self._opens.match(self._call[0].text)
        name = None if found is None else found.groupdict().get("name")
        body = "".join(piece.text for piece in self._call[1:]).lstrip()
        if name is not None:
            self._begun = name in self._names
        else:
            self._begun = body[:1] in ("{", "[")
        return not self._begun and (name is not None or body != "")

    def _released(self) -> str:
        held, self._held, self._found, self._call = "".join(self._held), [], [], []
        return held


@lru_cache(64)
def _begins_of(opens: Any, looks_back: bool) -> re.Pattern[str]:
    """Return a pattern of what may begin a call's mark: one of its first characters, or the white
    space before it at the end of a text. Other text needs no parser."""
    marks = {*map(chr, range(33, 127)), *filter(str.isprintable, opens.pattern), _OTHER}
    firsts = {mark for mark in marks if opens.fullmatch(mark, partial=True)} - {" "}
    if looks_back or _OTHER in firsts:
        return re.compile("")
    return re.compile("|".join([*map(re.escape, sorted(firsts)), r"\s\Z"]))
