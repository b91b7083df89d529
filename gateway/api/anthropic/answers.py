"""From our outputs to Anthropic's messages, and to the events of a stream of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ....bus.public import Completion, CompletionChunk, CompletionSample, GenerateRequest, Usage
from ...serving.message_parts import MessageParts
from ...serving.words import Words, matched_stop
from .content import Answer, ContentBlocks


class MessageWriter:
    """Writes the answer to a request: whole, or event by event."""

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
        parts: Reads the sample.
        counts_thinking: Whether the usage says how many tokens were thought.
        shows_thinking: Whether it is told what was.
        """
        self._request = request
        self._model = model
        self._words = words
        self._parts = parts
        self._counts_thinking = counts_thinking
        self._content = ContentBlocks(shows_thinking=shows_thinking)
        self._begun = self._pinged = False

    def whole(self, completion: Completion) -> Answer:
        """The message in one piece."""
        self._rest(completion)
        usage = self._usage(completion.usage)
        return self._message(self._content.blocks, usage) | self._stop(completion)

    # --- events of a stream -------------------------------------------------------------------

    def add(self, chunks: Sequence[CompletionChunk]) -> list[Answer]:
        """Takes what has come."""
        deltas = [delta for chunk in chunks for delta in self._parts.add(chunk).deltas]
        return self._events(self._content.add(deltas))

    def end(self, completion: Completion) -> list[Answer]:
        """Takes the end, and what was not told before."""
        events = self._events(self._rest(completion))
        usage = self._usage(completion.usage)
        delta = {"type": "message_delta", "delta": self._stop(completion), "usage": usage}
        return [*events, delta, {"type": "message_stop"}]

    def _events(self, of_content: list[Answer]) -> list[Answer]:
        """These, behind the beginning; Anthropic's streams have a ping early on."""
        if self._pinged:
            return of_content
        events = [] if self._begun else [self._start()]
        self._begun = True
        if of_content:
            self._pinged = True
            of_content.insert(1, {"type": "ping"})
        return events + of_content

    def _start(self) -> Answer:
        """How many tokens of the prompt were cached, nobody knows yet."""
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
                # Somebody ended it; what it has may be sent back to be continued.
                return "pause_turn", None
            case "content_filter":
                return "refusal", None
            case unknown:
                assert_never(unknown)


def _usage(usage: Usage) -> Answer:
    """Each token of the prompt counts once: as read from the cache, or as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
