"""Parses a growing message: reasoning, text, tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

import msgspec
from transformers.utils.chat_parsing import parse_response
from xxhash import xxh3_64_hexdigest

from .message_format import MessageFormat
from .regions import (
    CALLS,
    CONTENT,
    MARKS,
    REASONING,
    UNOPENED,
    MessageRegions,
    RegionPiece,
    region_template,
)
from .thoughts import Thought
from .tools import Tool
from .typed import typed

# Errors of invalid JSON and templates.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


_MOST_ID_CHARS = 256
"""Characters of a call's id that the model wrote."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a message's reader, beside the format. The bus keeps them with the call, so
    that every gateway reads it alike.

    Attributes:
        opening: The part of the assistant's turn in the prompt: its template may have opened, or
            closed, the reasoning.
        tools: The tools in the prompt. Without tools no calls are parsed.
        separates_reasoning: Whether the reasoning is separated from the text.
    """

    opening: str = ""
    tools: tuple[Tool, ...] = ()
    separates_reasoning: bool = True


class ToolCall(NamedTuple):
    """A complete call.

    Attributes:
        place: Among the calls of the message.
        id: The model's own, if its format has ids; else the same whenever and wherever the message
            is read.
        arguments: JSON.
    """

    place: int
    id: str
    name: str
    arguments: str


class _Function(NamedTuple):
    """A call as it is read: its arguments are JSON, and its id is "" if it has none."""

    name: str
    arguments: str
    id: str


class Delta(NamedTuple):
    """An addition to a message. Within one delta reasoning stands before text, and text before
    calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class MessageReader:
    """Reads one growing message.

    Pieces may be cut anywhere: all deltas together are the same message. The same cuts, such as
    token by token, give the same deltas.

    An invalid call is content, as the model wrote it, with its marks: without valid JSON, without
    the name of a tool in the prompt, with arguments that are no object, or with text that belongs
    to no argument. Of several calls between two marks all are valid, or none. A mark within a value
    of a call is part of the value. Calls in reasoning are part of it, unless the message ends with
    them and the reasoning is still open. A closing mark of reasoning is dropped where none is open,
    as after a budget that closed it.

    Attributes:
        calls: The number of calls so far.
        malformed: The number of invalid calls that were not cut off.
        as_text: The number of calls that became text: malformed ones, and any that was cut off.
        reasoning_tokens: The number of reasoning tokens, marks included, if tokens are fed one by
            one.
    """

    def __init__(self, form: MessageFormat, reading: Reading, seed: str) -> None:
        """`seed`: the source of the calls' ids, such as the message's own id."""
        self.calls = 0
        self.malformed = 0
        self.as_text = 0
        self.reasoning_tokens = 0
        self._seed = seed
        self._separates_reasoning = reading.separates_reasoning
        self._tools: list[Any] = [tool.as_templates_read() for tool in reading.tools]
        self._schemas = {tool.name: tool.parameters for tool in reading.tools}
        self._ids = set[str]()
        # Marks around all calls, and whether a call that is none was the last before such a mark.
        self._around = form.marks_around_calls
        self._after_calls = False
        # Whether some text was not white space.
        self._has_text = False
        self._template = region_template(form.response_template, with_calls=bool(reading.tools))
        self._regions = MessageRegions(self._template, reading.opening)
        # The pieces of the open call; the prompt may have begun it.
        self._call: list[RegionPiece] = []
        for piece in self._regions.opening:
            if piece.field == CALLS:
                self._call = [piece] if piece.kind == "open" else [*self._call, piece]
        # The open reasoning, in which calls are looked for.
        self._response_template = form.response_template
        self._thought: Thought[_Function] | None = None
        if self._regions.field in REASONING:
            self._think()
        # Tokens whose text may be part of a mark.
        self._held_tokens = 0
        # Deltas after a call, in the same piece.
        self._untold: list[Delta] = []

    def feed(self, text: str, tokens: int = 1) -> Delta:
        """Add the next text, of so many tokens, with special tokens by their names."""
        pieces = self._regions.feed(text)
        self._count(pieces, tokens)
        if len(pieces) < 2 and not self._untold:
            return self._read(pieces[0], cut_off=False) if pieces else Delta()
        untold = self._untold + self._deltas(pieces, cut_off=False)
        self._untold = []
        new = Delta()
        for place, delta in enumerate(untold):
            if new.calls and not delta.calls:
                # Within one delta it would stand before the call.
                self._untold = untold[place:]
                break
            new = _joined(new, delta)
        return new

    def finish(self, *, cut_off: bool = False) -> Delta:
        """End the message. An open call becomes text, unless its JSON is complete: some formats
        have no closing mark, and models may omit it.

        Args:
            cut_off: Whether the model was cut off. A call that is cut off is not malformed.
        """
        pieces = self._regions.finish()
        self._count(pieces, 0)
        return reduce(_joined, self._untold + self._deltas(pieces, cut_off), Delta())

    def _count(self, pieces: list[RegionPiece], tokens: int) -> None:
        held = self._regions.held
        closed = bool(pieces) and pieces[-1].field in REASONING
        if self._regions.field in REASONING or (closed and not held):
            self.reasoning_tokens += self._held_tokens + tokens
            self._held_tokens = 0
        elif held:
            self._held_tokens = tokens if pieces else self._held_tokens + tokens
        else:
            self._held_tokens = 0

    def _deltas(self, pieces: list[RegionPiece], cut_off: bool) -> list[Delta]:
        deltas = [self._read(piece, cut_off) for piece in pieces]
        return [delta for delta in deltas if any(delta)]

    def _read(self, piece: RegionPiece, cut_off: bool) -> Delta:
        if piece.field == CONTENT and piece.kind == "text":
            if not piece.own.isspace():
                self._has_text, self._after_calls = True, False
            return Delta(content=piece.own)
        if piece.field == MARKS and piece.text.strip() in self._around:
            # Of a malformed call all marks are shown.
            shown, self._after_calls = not self._after_calls, False
            return Delta(content=piece.own if shown else "")
        if piece.field == UNOPENED and self._separates_reasoning:
            return Delta(content=self._space_of(piece))
        if piece.field in (*REASONING, UNOPENED):
            return self._read_reasoning(piece, cut_off)
        if piece.field != CALLS:
            return Delta()
        if piece.kind == "open":
            self._call = []
        self._call.append(piece)
        if piece.kind not in ("close", "end"):
            return Delta()
        text = "".join(each.own for each in self._call)
        if not text.strip():
            # A call in the prompt does not belong to the message.
            return Delta()
        calls = self._calls(cut_off=cut_off and piece.kind == "end")
        self._has_text, self._after_calls = self._has_text or not calls, bool(calls)
        return Delta("", "" if calls else text, tuple(calls))

    def _space_of(self, piece: RegionPiece) -> str:
        """Return the white space between the texts around a mark that closes nothing."""
        mark = piece.text.rstrip()
        space = piece.text[len(mark) :] if self._has_text else ""
        return space[-len(piece.own) :] if piece.own else ""

    def _read_reasoning(self, piece: RegionPiece, cut_off: bool) -> Delta:
        if piece.kind == "open" and piece.field != UNOPENED:
            self._think()
        text, calls, thought = piece.own, list[ToolCall](), self._thought
        if thought is not None and piece.kind == "text":
            text = thought.add(text)
        elif thought is not None and piece.kind in ("close", "end"):
            rest, found = thought.end(closed=cut_off or piece.kind == "close")
            calls, self._thought = [self._numbered(*function) for function in found], None
            if self._separates_reasoning:
                return Delta(rest, "", tuple(calls))
            text = rest + text
        if not self._separates_reasoning:
            return Delta("", text, tuple(calls))
        return Delta(reasoning=text if piece.kind == "text" else "")

    def _think(self) -> None:
        if self._template.calls is not None:
            self._thought = Thought(self._response_template, self._schemas, self._valid)

    def _calls(self, *, cut_off: bool) -> list[ToolCall]:
        """Return the calls of the closed region; none if it is malformed."""
        functions = self._valid(self._call)
        self.malformed += not functions and not cut_off
        self.as_text += not functions
        return [self._numbered(*function) for function in functions]

    def _valid(self, call: list[RegionPiece]) -> list[_Function]:
        """Return the functions of a complete call, of several ones between its marks; none if one
        of them is malformed."""
        text = "".join(piece.text for piece in call[:-1])
        try:
            if call[-1].kind == "end" and not self._template.ends_itself:
                raise ValueError("it may lack its end")
            body = "".join(piece.text for piece in call[1:-1])
            self._template.check_all_is_read(body)
            assert self._template.calls is not None
            tools = None if self._template.has_texts else self._tools
            message = parse_response(text, self._template.calls, prefix="", tools=tools)
            texts = self._template.texts_in(body)
            found = self._template.calls_in(message[CALLS])
            return [self._function(each, texts) for each in _flat(found)]
        except _MALFORMED:
            return []

    def _function(self, call: dict[str, Any], texts: Mapping[str, bool]) -> _Function:
        """Raises one of `_MALFORMED`."""
        function = call.get("function", call)
        name = function["name"]
        if name not in self._schemas:
            raise ValueError("no tool has that name")
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = self._template.arguments_in(arguments, self._schemas[name])
        if not isinstance(arguments, dict):
            raise TypeError("the arguments are no object")
        if self._template.has_texts:
            arguments = typed(arguments, self._schemas[name], texts)
        # In the form that models write, so that the history has the same tokens.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # A lone surrogate is valid in JSON, and in no encoding.
        text.encode()
        given = call.get("id")
        return _Function(name, text, given if isinstance(given, str) else "")

    def _numbered(self, name: str, arguments: str, given: str) -> ToolCall:
        if not 0 < len(given) <= _MOST_ID_CHARS or given in self._ids:
            given = f"call_{xxh3_64_hexdigest(f'{self._seed}/{self.calls}'.encode())}"
        self._ids.add(given)
        self.calls += 1
        return ToolCall(self.calls - 1, given, name, arguments)


def _joined(before: Delta, after: Delta) -> Delta:
    return Delta(
        before.reasoning + after.reasoning,
        before.content + after.content,
        before.calls + after.calls,
    )


def _flat(value: Any) -> Iterator[Any]:
    """Yield the calls of a field: one, a list, or, if it repeats, a list of lists."""
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value
