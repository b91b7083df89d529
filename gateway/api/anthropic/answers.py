"""From our outputs to Anthropic's messages, and to the events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, assert_never

import msgspec

from ....bus.public import Completion, CompletionChunk, CompletionSample, GenerateRequest, Usage
from ....text.messages import ToolCall
from ...serving.blocks import Addition, Blocks
from ...serving.message_parts import MessageParts
from ...serving.samples import session_usage
from ...serving.times import time_usage
from ...serving.tokenizer import Tokenizer, matched_stop
from .signatures import signature_of

Answer = dict[str, Any]


class ContentBlocks(Blocks[Answer]):
    """The assistant's thinking, text and calls."""

    def __init__(self, parts: MessageParts, tenant: str, *, shows_thinking: bool) -> None:
        """`tenant`: the caller's; `shows_thinking`: whether blocks of thinking have a text."""
        super().__init__(parts)
        self._tenant = tenant
        self._shows_thinking = shows_thinking

    def begun(self) -> list[Answer]:
        empty = {"type": "text", "text": ""}
        if self.kind == "reasoning":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        return [self._event("start", content_block=empty)]

    def grown(self, part: Addition) -> list[Answer]:
        self.texts.append(part.text)
        if self._hides:
            return []
        name = "text" if part.kind == "text" else "thinking"
        return [self._delta(f"{name}_delta", name, part.text)]

    def closed(self, status: str) -> list[Answer]:
        block, events = self._block(), []
        if self.kind == "reasoning":
            # Clients wait for it.
            events = [self._delta("signature_delta", "signature", block["signature"])]
        events.append(self._event("stop"))
        self.blocks.append(block)
        return events

    def called(self, call: ToolCall) -> list[Answer]:
        block: Answer = {"type": "tool_use", "id": call.id, "name": call.name}
        events = [
            self._event("start", content_block=block | {"input": {}}),
            self._delta("input_json_delta", "partial_json", call.arguments),
            self._event("stop"),
        ]
        # Verbatim, as in a stream, with numbers of any size.
        self.blocks.append(block | {"input": msgspec.Raw(call.arguments.encode())})
        return events

    @property
    def _hides(self) -> bool:
        return self.kind == "reasoning" and not self._shows_thinking

    def _block(self) -> Answer:
        text = "".join(self.texts)
        if self.kind == "text":
            return {"type": "text", "text": text}
        shown = "" if self._hides else text
        signature = signature_of(text, self._tenant, omitted=self._hides)
        return {"type": "thinking", "thinking": shown, "signature": signature}

    def _delta(self, kind: str, name: str, text: str) -> Answer:
        return self._event("delta", delta={"type": kind, name: text})

    def _event(self, what: str, **fields: Any) -> Answer:
        return {"type": f"content_block_{what}", "index": len(self.blocks), **fields}


@dataclass(eq=False)
class MessageWriter:
    """Writes the answer to a request: as a whole, or event by event.

    Attributes:
        parts: The reader of the sample.
        counts_thinking: Whether the usage has the number of thinking tokens.
        more: More fields of the message.
        shows_thinking: Whether thinking is shown.
    """

    request: GenerateRequest
    model: str
    tokenizer: Tokenizer
    parts: MessageParts
    counts_thinking: bool
    shows_thinking: InitVar[bool]
    more: Answer = field(default_factory=dict)
    _begun: bool = False
    _pinged: bool = False

    def __post_init__(self, shows_thinking: bool) -> None:
        self._content = ContentBlocks(
            self.parts, self.request.tenant, shows_thinking=shows_thinking
        )

    def whole(self, completion: Completion) -> Answer:
        """Return the whole message."""
        self._content.end(next(iter(completion.samples), None))
        usage = self._usage(completion)
        ended = self._stop(completion) | self.more
        return self._message(self._content.blocks, usage) | ended

    # --- events of a stream -------------------------------------------------------------------

    def add(self, chunks: Sequence[CompletionChunk]) -> list[Answer]:
        """Add chunks of a stream; return its events."""
        return self._events(self._content.add(chunks))

    def end(self, completion: Completion) -> list[Answer]:
        """Add the end, with what did not come in chunks; return the last events."""
        events = self._events(self._content.end(next(iter(completion.samples), None)))
        usage = self._usage(completion)
        delta = {"type": "message_delta", "delta": self._stop(completion), "usage": usage}
        return [*events, delta | self.more, {"type": "message_stop"}]

    def _events(self, of_content: list[Answer]) -> list[Answer]:
        """Return events after the beginning; Anthropic's streams have a ping early on."""
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
        prompt = len(self.request.prompt_token_ids or ())
        message = self._message([], _usage(Usage(prompt_tokens=prompt)))
        return {"type": "message_start", "message": message}

    # --- pieces -------------------------------------------------------------------------------

    def _message(self, content: list[Answer], usage: Answer) -> Answer:
        return {
            "id": self.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _usage(self, completion: Completion) -> Answer:
        usage = _usage(completion.usage) | session_usage(completion) | time_usage([completion])
        details = {"output_tokens_details": {"thinking_tokens": self.parts.reasoning_tokens}}
        return usage | (details if self.counts_thinking else {})

    def _stop(self, completion: Completion) -> Answer:
        sample = completion.samples[0] if completion.samples else None
        reason, sequence = self._reason(sample) if sample else ("pause_turn", None)
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _reason(self, sample: CompletionSample) -> tuple[str, str | None]:
        match sample.finish_reason:
            case "stop":
                matched = matched_stop(sample, self.request.sampling, self.tokenizer)
                if isinstance(matched, str):
                    return "stop_sequence", matched
                return ("tool_use" if self.parts.calls else "end_turn"), None
            case "length":
                # Admission lowers the limit of a request to what the model's length leaves.
                whole = len(sample.token_ids) < self.request.sampling.max_tokens
                return ("model_context_window_exceeded" if whole else "max_tokens"), None
            case "abort":
                # Aborted; clients may send it back to be continued.
                return "pause_turn", None
            case "content_filter":
                return "refusal", None
            case unknown:
                assert_never(unknown)


def _usage(usage: Usage) -> Answer:
    """Each token of the prompt counts once: as cached, or as input."""
    written = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.cached_completion_tokens:
        written["cached_output_tokens"] = usage.cached_completion_tokens
    return written
