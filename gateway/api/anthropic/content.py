"""The content of a message while it grows, block by block, and the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from ....text.messages import Delta, ToolCall

Answer = dict[str, Any]
Kind = Literal["thinking", "text"]


class _Growth(NamedTuple):
    """What a block gains."""

    kind: Kind
    text: str


class ContentBlocks:
    """What the assistant thinks, says and calls, in the order in which it was written.

    Attributes:
        blocks: Those that are complete, as a whole message has them.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        """`shows_thinking`: whether its blocks have a text."""
        self.blocks: list[Answer] = []
        self._shows_thinking = shows_thinking
        # The block that grows, and what it has.
        self._kind: Kind | None = None
        self._texts: list[str] = []

    def add(self, deltas: Iterable[Delta]) -> list[Answer]:
        """Takes what is new; what follows each other in one block is one event."""
        events: list[Answer] = []
        for new in _joined(deltas):
            if isinstance(new, _Growth):
                self._grow(new, events)
            else:
                self._call(new, events)
        return events

    def end(self) -> list[Answer]:
        """There is nothing more. A message that says nothing has one block, of no text."""
        events: list[Answer] = []
        if self._kind is None and not self.blocks:
            self._begin("text", events)
        self._close(events)
        return events

    def _grow(self, new: _Growth, events: list[Answer]) -> None:
        if new.kind != self._kind:
            self._close(events)
            self._begin(new.kind, events)
        if new.kind == "text":
            self._texts.append(new.text)
            events.append(self._delta({"type": "text_delta", "text": new.text}))
        elif self._shows_thinking:
            self._texts.append(new.text)
            events.append(self._delta({"type": "thinking_delta", "thinking": new.text}))

    def _begin(self, kind: Kind, events: list[Answer]) -> None:
        self._kind, self._texts = kind, []
        events.append(self._start(_block(kind, "")))

    def _close(self, events: list[Answer]) -> None:
        """The block that grows is complete."""
        if self._kind is None:
            return
        if self._kind == "thinking":
            # There is nobody who would check one, and clients wait for it.
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        events.append(self._stop())
        self.blocks.append(_block(self._kind, "".join(self._texts)))
        self._kind = None

    def _call(self, call: ToolCall, events: list[Answer]) -> None:
        """Calls come whole."""
        self._close(events)
        block: Answer = {"type": "tool_use", "id": call.id, "name": call.name}
        events += (
            self._start(block | {"input": {}}),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            self._stop(),
        )
        # As it is told in a stream, whatever numbers it holds.
        self.blocks.append(block | {"input": msgspec.Raw(call.arguments.encode())})

    def _start(self, block: Answer) -> Answer:
        told = {"index": len(self.blocks), "content_block": block}
        return {"type": "content_block_start"} | told

    def _delta(self, delta: Answer) -> Answer:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}

    def _stop(self) -> Answer:
        return {"type": "content_block_stop", "index": len(self.blocks)}


def _joined(deltas: Iterable[Delta]) -> list[_Growth | ToolCall]:
    """What is new, one after the other; what one block gains is in one piece."""
    found: list[_Growth | ToolCall] = []

    def grow(kind: Kind, text: str) -> None:
        last = found[-1] if found else None
        if isinstance(last, _Growth) and last.kind == kind:
            found[-1] = _Growth(kind, last.text + text)
        else:
            found.append(_Growth(kind, text))

    for delta in deltas:
        if delta.reasoning:
            grow("thinking", delta.reasoning)
        if delta.content:
            grow("text", delta.content)
        found += delta.calls
    return found


def _block(kind: Kind, text: str) -> Answer:
    if kind == "text":
        return {"type": "text", "text": text}
    return {"type": "thinking", "thinking": text, "signature": ""}
