"""From our outputs to Anthropic's messages, and to the events of a stream of one."""

from __future__ import annotations

from typing import Any, assert_never

from ...bus.public import Completion, CompletionSample, GenerateRequest, Usage
from ..stops import matched_stop
from ..words import Words

Answer = dict[str, Any]


class Answers:
    """Writes the answer to a request."""

    def __init__(self, request: GenerateRequest, model: str, words: Words) -> None:
        self._request = request
        self._model = model
        self._words = words

    def whole(self, completion: Completion) -> Answer:
        """The message in one piece."""
        text = completion.samples[0].text if completion.samples else ""
        message = self._message([{"type": "text", "text": text}], _usage(completion.usage))
        return message | self._stop(completion)

    # --- events of a stream, in order ---------------------------------------------------------

    def start(self) -> Answer:
        """How many tokens of the prompt were cached, nobody knows yet."""
        prompt = len(self._request.prompt_token_ids or ())
        usage = _usage(Usage(prompt_tokens=prompt))
        return {"type": "message_start", "message": self._message([], usage)}

    def block_start(self) -> Answer:
        block = {"type": "text", "text": ""}
        return {"type": "content_block_start", "index": 0, "content_block": block}

    def ping(self) -> Answer:
        return {"type": "ping"}

    def delta(self, text: str) -> Answer:
        delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": 0, "delta": delta}

    def block_stop(self) -> Answer:
        return {"type": "content_block_stop", "index": 0}

    def message_delta(self, completion: Completion) -> Answer:
        usage = _usage(completion.usage)
        return {"type": "message_delta", "delta": self._stop(completion), "usage": usage}

    def stop(self) -> Answer:
        return {"type": "message_stop"}

    # --- pieces -------------------------------------------------------------------------------

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

    def _stop(self, completion: Completion) -> Answer:
        sample = completion.samples[0] if completion.samples else None
        reason, sequence = self._reason(sample) if sample else ("pause_turn", None)
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _reason(self, sample: CompletionSample) -> tuple[str, str | None]:
        match sample.finish_reason:
            case "stop":
                matched = matched_stop(sample, self._request.sampling, self._words)
                stop = matched if isinstance(matched, str) else None
                return ("end_turn" if stop is None else "stop_sequence"), stop
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
