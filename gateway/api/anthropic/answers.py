"""From our outputs to Anthropic's messages, and to the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, assert_never

import msgspec

from ....bus.public import Completion, CompletionChunk, CompletionSample, GenerateRequest, Usage
from ....text.messages import Delta, ToolCall
from ...serving.message_parts import MessageParts
from ...serving.words import Words, matched_stop

Answer = dict[str, Any]
Kind = Literal["thinking", "text"]


class _Growth(NamedTuple):
    """An addition to a block."""

    kind: Kind
    text: str


class ContentBlocks:
    """The assistant's thinking, text and calls, in the order in which they were written.

    Attributes:
        blocks: The complete ones, as a whole message has them.
    """

    def __init__(self, *, shows_thinking: bool) -> None:
        """`shows_thinking`: whether blocks of thinking have a text."""
        self.blocks: list[Answer] = []
        self._shows_thinking = shows_thinking
        # The open block, and its texts.
        self._kind: Kind | None = None
        self._texts: list[str] = []

    def add(self, deltas: Iterable[Delta]) -> list[Answer]:
        """Add deltas. Adjacent additions to one block are one event."""
        events: list[Answer] = []
        for new in _joined(deltas):
            if isinstance(new, _Growth):
                self._grow(new, events)
            else:
                self._call(new, events)
        return events

    def end(self) -> list[Answer]:
        """End the message. An empty message has one empty block of text."""
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
        """Close the open block."""
        if self._kind is None:
            return
        if self._kind == "thinking":
            # Clients wait for a signature; none is checked here.
            events.append(self._delta({"type": "signature_delta", "signature": ""}))
        events.append(self._stop())
        self.blocks.append(_block(self._kind, "".join(self._texts)))
        self._kind = None

    def _call(self, call: ToolCall, events: list[Answer]) -> None:
        """Add a complete call."""
        self._close(events)
        block: Answer = {"type": "tool_use", "id": call.id, "name": call.name}
        events += (
            self._start(block | {"input": {}}),
            self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
            self._stop(),
        )
        # Verbatim, as in a stream, with numbers of any size.
        self.blocks.append(block | {"input": msgspec.Raw(call.arguments.encode())})

    def _start(self, block: Answer) -> Answer:
        told = {"index": len(self.blocks), "content_block": block}
        return {"type": "content_block_start"} | told

    def _delta(self, delta: Answer) -> Answer:
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}

    def _stop(self) -> Answer:
        return {"type": "content_block_stop", "index": len(self.blocks)}


def _joined(deltas: Iterable[Delta]) -> list[_Growth | ToolCall]:
    """Return the additions in order; adjacent ones to one block are joined."""
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


class MessageWriter:
    """Writes the answer to a request: as a whole, or event by event."""

    def __init__(
        self,
        request: GenerateRequest,
        model: str,
        words: Words,
        parts: MessageParts,
        *,
        counts_thinking: bool,
        shows_thinking: bool,
    ) -> None:
        """Args:
        parts: The reader of the sample.
        counts_thinking: Whether the usage has the number of thinking tokens.
        shows_thinking: Whether thinking is shown.
        """
        self._request = request
        self._model = model
        self._words = words
        self._parts = parts
        self._counts_thinking = counts_thinking
        self._content = ContentBlocks(shows_thinking=shows_thinking)
        self._begun = self._pinged = False

    def whole(self, completion: Completion) -> Answer:
        """Return the whole message."""
        self._rest(completion)
        usage = self._usage(completion.usage)
        return self._message(self._content.blocks, usage) | self._stop(completion)

    # --- events of a stream -------------------------------------------------------------------

    def add(self, chunks: Sequence[CompletionChunk]) -> list[Answer]:
        """Add chunks of a stream; return its events."""
        deltas = [delta for chunk in chunks for delta in self._parts.add(chunk).deltas]
        return self._events(self._content.add(deltas))

    def end(self, completion: Completion) -> list[Answer]:
        """Add the end, with what did not come in chunks; return the last events."""
        events = self._events(self._rest(completion))
        usage = self._usage(completion.usage)
        delta = {"type": "message_delta", "delta": self._stop(completion), "usage": usage}
        return [*events, delta, {"type": "message_stop"}]

    def _events(self, of_content: list[Answer]) -> list[Answer]:
        """Return events behind the beginning; Anthropic's streams have a ping early on."""
        if self._pinged:
            return of_content
        events = [] if self._begun else [self._start()]
        self._begun = True
        if of_content:
            self._pinged = True
            of_content.insert(1, {"type": "ping"})
        return events + of_content

    def _start(self) -> Answer:
        """The number of cached tokens is not known yet."""
        prompt = len(self._request.prompt_token_ids or ())
        message = self._message([], _usage(Usage(prompt_tokens=prompt)))
        return {"type": "message_start", "message": message}

    # --- pieces -------------------------------------------------------------------------------

    def _rest(self, completion: Completion) -> list[Answer]:
        samples = completion.samples[:1]
        deltas = [delta for sample in samples for delta in self._parts.end(sample).deltas]
        return [*self._content.add(deltas), *self._content.end()]

    def _message(self, content: list[Answer], usage: Answer) -> Answer:
        return {
            "id": self._request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> Answer:
        details = {"output_tokens_details": {"thinking_tokens": self._parts.reasoning_tokens}}
        return _usage(usage) | (details if self._counts_thinking else {})

    def _stop(self, completion: Completion) -> Answer:
        sample = completion.samples[0] if completion.samples else None
        reason, sequence = self._reason(sample) if sample else ("pause_turn", None)
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _reason(self, sample: CompletionSample) -> tuple[str, str | None]:
        match sample.finish_reason:
            case "stop":
                matched = matched_stop(sample, self._request.sampling, self._words)
                if isinstance(matched, str):
                    return "stop_sequence", matched
                return ("tool_use" if self._parts.calls else "end_turn"), None
            case "length":
                return "max_tokens", None
            case "abort":
                # Aborted; clients may send it back to be continued.
                return "pause_turn", None
            case "content_filter":
                return "refusal", None
            case unknown:
                assert_never(unknown)


def _usage(usage: Usage) -> Answer:
    """Each token of the prompt counts once: as cached, or as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
