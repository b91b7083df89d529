"""A message as blocks: reasoning, text and tool calls, in the order in which they were written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ...bus.public import CompletionChunk, CompletionSample
from ...text.messages import ToolCall
from .message_parts import MessageParts, NewParts, TokenRecord

E = TypeVar("E")

Kind = Literal["reasoning", "text"]
Answer = dict[str, Any]


class Addition(NamedTuple):
    """An addition to a block of reasoning or text.

    Attributes:
        tokens: The tokens of a text, where they are wanted.
    """

    kind: Kind
    text: str
    tokens: tuple[TokenRecord, ...] = ()


class Blocks(ABC, Generic[E]):
    """Walks a sample block by block; a subclass writes the events, and the blocks, of a format.

    Streamed and whole answers come from this one walk: the whole one has `blocks` at its end.

    Attributes:
        parts: The reader of the sample.
        blocks: The complete blocks, as a whole answer has them.
        kind: Kind of the open block; None between two of them.
        texts: Texts of the open block.
    """

    def __init__(self, parts: MessageParts) -> None:
        self.parts = parts
        self.blocks: list[Answer] = []
        self.kind: Kind | None = None
        self.texts: list[str] = []

    def add(self, chunks: Iterable[CompletionChunk]) -> list[E]:
        """Add the next chunks; return their events. Adjacent additions to one block are one."""
        return self._walk(part for chunk in chunks for part in self.found(self.parts.add(chunk)))

    def end(self, sample: CompletionSample | None) -> list[E]:
        """Add what did not come in chunks; an empty message has one empty text.

        Args:
            sample: The ended sample; None for one that never began.
        """
        events = [] if sample is None else self._walk(self.found(self.parts.end(sample)))
        if self.kind is None and self.is_empty:
            events += self._open("text")
        if self.kind == "text":
            events += self.last()
        stopped = sample is not None and sample.finish_reason == "stop"
        return [*events, *self._close("completed" if stopped else "incomplete")]

    @property
    def is_empty(self) -> bool:
        """Whether the message has no block so far."""
        return not self.blocks

    # --- of a format --------------------------------------------------------------------------

    def tokens_of(self, text: str, place: int) -> tuple[TokenRecord, ...]:
        """Return the tokens of a text, where they are wanted; `place` as in `NewParts`."""
        return ()

    def last(self) -> Iterable[E]:
        """Return the events before the end of a message's last block, of text."""
        return ()

    @abstractmethod
    def begun(self) -> Iterable[E]:
        """Return the events of the block that begins."""

    @abstractmethod
    def grown(self, part: Addition) -> Iterable[E]:
        """Return the events of an addition to the open block, and keep its text."""

    @abstractmethod
    def closed(self, status: str) -> Iterable[E]:
        """Return the events of the end of the open block, and keep the block."""

    @abstractmethod
    def called(self, call: ToolCall) -> Iterable[E]:
        """Return the events of a whole call, and keep its block."""

    # --- the walk -----------------------------------------------------------------------------

    def found(self, new: NewParts) -> Iterator[Addition | ToolCall]:
        """Yield the additions and calls of new parts."""
        for delta, place in zip(new.deltas, new.places, strict=True):
            tokens = self.tokens_of(delta.content, place)
            if delta.reasoning:
                yield Addition("reasoning", delta.reasoning)
            if delta.content:
                yield Addition("text", delta.content, tokens)
            yield from delta.calls

    def _walk(self, parts: Iterable[Addition | ToolCall]) -> list[E]:
        events: list[E] = []
        for part in _joined(parts):
            if isinstance(part, ToolCall):
                events += [*self._close("completed"), *self.called(part)]
                continue
            if part.kind != self.kind:
                events += [*self._close("completed"), *self._open(part.kind)]
            events += self.grown(part)
        return events

    def _open(self, kind: Kind) -> Iterable[E]:
        self.kind, self.texts = kind, []
        return self.begun()

    def _close(self, status: str) -> Iterable[E]:
        events = [] if self.kind is None else [*self.closed(status)]
        self.kind = None
        return events


def _joined(parts: Iterable[Addition | ToolCall]) -> list[Addition | ToolCall]:
    """Join adjacent additions to the same block."""
    found: list[Addition | ToolCall] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Addition) and isinstance(last, Addition) and last.kind == part.kind:
            found[-1] = Addition(part.kind, last.text + part.text, last.tokens + part.tokens)
        else:
            found.append(part)
    return found
