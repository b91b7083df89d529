"""Splits a growing text into regions, and classifies each character.

Transformers' parser returns the text of a region without its marks. Both are needed: an invalid
call is shown as the model wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    load_response_template,
)

from .call_body import CallBody, check_all_is_read, names_in, new_body, texts_in
from .elements import ELEMENTS, arguments_in
from .own_bodies import PARSERS, parsed

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning in response templates."""

CALLS = "tool_calls"
CONTENT = "content"

FIELDS = (*REASONING, CALLS, CONTENT)
"""The fields of a response template that are read here."""

UNOPENED = "unopened"
"""The region of closing marks of reasoning where no reasoning is open. Transformers prefers the
first name of several that open with the same mark."""

MARKS = "marks"
"""The region of closing marks of the text outside of all other regions."""

_OUTSIDE = "outside"

_MOST_CHARS = 4096
"""Characters after which a parser is replaced. It keeps all of its text, and copies it at each
feed: a text of n characters would take n² of them."""

_AT_ONCE_CHARS = 64
"""Characters that are parsed at a time: the rest after a mark within a string is parsed again."""

_LOOKED_AT_CHARS = 128
"""Characters of a region for marks that look ahead."""

# Patterns that look behind their place, or at the beginning of the text. A class that begins with ^
# does not.
_LOOKS_BACK = re.compile(r"(?<!\[)\^|\\[ABbGKmM]|\(\?<[=!]")

# Patterns that may match without taking any text.
_NO_WIDTH = re.compile(r"\(\?<?[=!]|\\[AbBzZ]|\$|(?<!\[)\^")


class RegionPiece(NamedTuple):
    """A piece of the text.

    Attributes:
        kind: The mark that opens a region, its text, the mark that closes it, or the end of the
            message, which closes it too.
        text: All of the text.
        own: The part that belongs to the message, and not to the prompt.
    """

    kind: Literal["open", "text", "close", "end"]
    field: str
    text: str
    own: str


class RegionTemplate(NamedTuple):
    """A compiled response template.

    Attributes:
        template: With plain texts, so that the parser never raises, and with reported marks.
        calls: For a region of calls, from its opening mark on.
        looks_back: Whether it depends on the text before a mark.
        ends_itself: Whether a call is complete without a closing mark.
        content: Transformers' parser of a call's body; "" without calls.
        content_args: Its arguments.
    """

    template: ResponseTemplate
    calls: ResponseTemplate | None
    looks_back: bool
    ends_itself: bool
    content: str
    content_args: dict[str, Any]

    def new_body(self) -> CallBody:
        """Return the body of a call without text."""
        return new_body(self.content, self.content_args)

    def calls_in(self, value: Any) -> Any:
        """Return the calls in a body's value. Raises ValueError: it is not made of calls."""
        kind = self.content_args.get("as")
        if kind is None or kind not in PARSERS:
            return value
        return [parsed(kind, each) for each in value]

    def arguments_in(self, text: str, schema: Mapping[str, Any]) -> Any:
        """Return the arguments that a text has. Raises ValueError."""
        if self.content_args.get("as") == ELEMENTS:
            return arguments_in(text, self.content_args["mark"], schema)
        return json.loads(text)

    @property
    def has_texts(self) -> bool:
        """Whether the values in a call's body are texts, whatever their types."""
        return self.content in ("xml-inline", "kv-lines")

    def check_all_is_read(self, body: str) -> None:
        """Raises ValueError: a part of a call's body would be ignored."""
        check_all_is_read(self.content, self.content_args, body)

    def names_in(self, body: str) -> list[str]:
        """Return the names of the values in a call's body, which are between tags."""
        return names_in(self.content_args, body)

    def texts_in(self, body: str) -> dict[str, bool]:
        """Return whether each value in a call's body is text, by its name, where the body says
        so."""
        return texts_in(self.content, self.content_args, body)


def region_template(response_template: dict[str, Any], *, with_calls: bool) -> RegionTemplate:
    """Raises ValueError, or any error that a template of wrong types may raise."""
    return _region_template(msgspec.json.encode(response_template), with_calls)


@lru_cache(maxsize=256)
def _region_template(encoded: bytes, with_calls: bool) -> RegionTemplate:
    given = msgspec.json.decode(encoded)
    anchor = {key: given[key] for key in given if key.startswith("start_anchor")}
    wanted = [name for name in given["fields"] if name in FIELDS and (with_calls or name != CALLS)]
    fields = {name: _as_text(given["fields"][name]) for name in wanted}
    implicit = next((name for name in wanted if not _has(fields[name], "open")), "")
    if implicit:
        fields |= {implicit: _as_text({})} | _marks(fields[implicit], MARKS)
    else:
        fields[_OUTSIDE if CONTENT in fields else CONTENT] = _as_text({})
    # A mark that closes nothing is no text; another field that opens with it goes first.
    for name in (name for name in REASONING if name != implicit and name in fields):
        fields |= _marks(fields[name], UNOPENED)
    calls, field = None, given["fields"].get(CALLS, {})
    if CALLS in wanted:
        without = {key: value for key, value in field.items() if not key.startswith("close")}
        calls = load_response_template(anchor | {"fields": {CALLS: without}})
    template = load_response_template(anchor | {"fields": fields})
    closes = template.fields[CALLS].close_re if CALLS in wanted else None
    made = calls.fields[CALLS] if calls is not None else None
    content, args = ("", {}) if made is None else (made.content, made.content_args)
    return RegionTemplate(
        template,
        calls,
        any(map(_looks_back, fields.values())),
        content == "json" or "as" in args or closes is None or closes.fullmatch("") is not None,
        content,
        args,
    )


def _has(field: dict[str, Any], mark: str) -> bool:
    return mark in field or f"{mark}_pattern" in field


def _as_text(field: dict[str, Any]) -> dict[str, Any]:
    marks = {key: field[key] for key in field if key.startswith(("open", "close"))}
    return marks | {
        "content": "text",
        "content_args": {"strip": False},
        # Without one, groups with names are refused.
        "transform": "{content}",
    }


def _marks(closed: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a region of the closing marks of another one. Without such a region they would be
    text, or not be reported."""
    opens = {key.replace("close", "open"): closed[key] for key in closed if "close" in key}
    # A match without width would be found again and again.
    if not opens or _NO_WIDTH.search(opens.get("open_pattern", "")):
        return {}
    field = _as_text(opens | {"close_pattern": ""})
    made = load_response_template({"start_anchor": "x", "fields": {name: field}})
    return {} if made.fields[name].open_re.fullmatch("") else {name: field}


def _looks_back(field: dict[str, Any]) -> bool:
    patterns = (field.get("open_pattern", ""), field.get("close_pattern", ""))
    return any(_LOOKS_BACK.search(pattern) for pattern in patterns)


class MessageRegions:
    """The regions of one text.

    Attributes:
        opening: The pieces of the text before.
        field: The open region's; a region without marks is open outside of all others.
    """

    def __init__(self, template: RegionTemplate, opening: str) -> None:
        """`opening`: the text before, which belongs to the prompt."""
        self._fields = template.template.fields
        self._template = template
        self._outside = template.template.implicit or ""
        self._parser = ResponseParser(template.template, prefix="")
        self._parsed_chars = 0
        self.field = self._outside
        # The opening mark of the region, and the text of its calls so far.
        self._mark = ""
        self._body = template.new_body()
        # The unreported text from `_at` on, and before it the text for marks that look back.
        self._text = ""
        self._at = 0
        self._own_from = len(opening)
        self.opening = self.feed(opening)

    @property
    def held(self) -> bool:
        """Whether some text may be part of a mark."""
        return self._at < len(self._text)

    def feed(self, text: str) -> list[RegionPiece]:
        """Add text; return the pieces that are certain."""
        if len(text) > _AT_ONCE_CHARS:
            places = range(0, len(text), _AT_ONCE_CHARS)
            return [piece for at in places for piece in self.feed(text[at : at + _AT_ONCE_CHARS])]
        self._text += text
        self._parsed_chars += len(text)
        pieces = self._told(self._parser.feed(text), ended=False)
        if not self._template.looks_back:
            self._text = self._text[self._at :]
            self._own_from = max(0, self._own_from - self._at)
            self._at = 0
            if self._parsed_chars > _MOST_CHARS:
                self._parsed_chars = 0
                self._parser = self._new_parser(self._text) or self._parser
        return pieces

    def finish(self) -> list[RegionPiece]:
        """End the text, and with it the open region."""
        return self._told(self._parser.finalize()[1], ended=True)

    def _told(self, events: list[dict[str, Any]], *, ended: bool) -> list[RegionPiece]:
        pieces: list[RegionPiece] = []
        while not self._tell(events, pieces, ended):
            events = self._parser.feed(self._text[self._at :])
            if ended:
                events += self._parser.finalize()[1]
        return pieces

    def _tell(self, events: list[dict[str, Any]], pieces: list[RegionPiece], ended: bool) -> bool:
        """Returns False if a new parser has to go on with the unreported text."""
        for event in events:
            field = event["field"]
            if event["type"] == "region_chunk":
                pieces.append(self._piece("text", field, self._at + len(event["text"])))
                if field == CALLS:
                    self._body.add(event["text"])
            elif field == self._outside:
                continue
            elif event["type"] == "region_open":
                found = self._fields[field].open_re.match(self._text, self._at)
                pieces.append(self._piece("open", field, found.end() if found else self._at))
                self.field, self._mark, self._body = (
                    field,
                    pieces[-1].text,
                    self._template.new_body(),
                )
            else:
                closes = self._fields[field].close_re
                found = closes and closes.match(self._text, self._at)
                end = found.end() if found else self._at
                if found and self._is_quoted():
                    # A mark without width would be found again.
                    pieces.append(self._piece("text", field, max(end, self._at + 1)))
                    self._body.add(pieces[-1].text)
                    return False
                by_end = ended and end == self._at == len(self._text)
                pieces.append(self._piece("end" if by_end else "close", field, end))
                self.field = self._outside
        return True

    def _piece(
        self, kind: Literal["open", "text", "close", "end"], field: str, end: int
    ) -> RegionPiece:
        text = self._text[self._at : end]
        own = text if self._own_from <= self._at else text[self._own_from - self._at :]
        self._at = end
        return RegionPiece(kind, field, text, own)

    def _is_quoted(self) -> bool:
        """Return whether the closing mark of a call stands in one of its values. The parser, which
        takes it for the end, is replaced."""
        quotes = self.field == CALLS and self._body.ends_in_value()
        parser = self._new_parser("") if quotes else None
        self._parser = parser or self._parser
        return parser is not None

    def _new_parser(self, held: str) -> ResponseParser | None:
        """Return a parser in the same state, with the same open region and held text; None if that
        is impossible."""
        parser = ResponseParser(self._template.template, prefix="")
        if self.field == self._outside:
            return None if parser.feed(held) else parser
        if self._template.looks_back:
            return None
        opened = {"type": "region_open", "field": self.field}
        # Some opening marks need more text after them, in which no closing mark may begin.
        head = self._body.head(_LOOKED_AT_CHARS)
        closes = self._fields[self.field].close_re
        for partial in (False, True):
            if closes is not None and (found := closes.search(head, partial=partial)) is not None:
                head = head[: found.start()]
        for filler in ("x", head):
            events = parser.feed(f"{self._mark}{filler}{held}")
            after = events[events.index(opened) + 1 :] if opened in events else []
            if filler and "".join(event.get("text", "/") for event in after) == filler:
                return parser
            parser = ResponseParser(self._template.template, prefix="")
        return None
