"""From our outputs to a response, and to the events of a stream of one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, assert_never

from ....bus.public import Completion, CompletionSample
from ....config import NanoInferenceError
from ...words import Words
from ..logprobs import Scored, TokenNames, chat_logprobs, scored
from .requests import ResponseCall

Answer = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class Answers:
    """Writes the answer to a call."""

    def __init__(self, call: ResponseCall, words: Words) -> None:
        self.call = call
        self._names = TokenNames(words, as_ids=False)

    def begun(self) -> Answer:
        """A response of which nothing is known yet."""
        return self._response("in_progress")

    def failed(self, error: NanoInferenceError) -> Answer:
        """One that the engine did not make."""
        told = {"code": error.code, "message": error.message}
        return self._response("failed") | {"error": told}

    def whole(self, completion: Completion) -> Answer:
        """One that has ended."""
        sample = completion.samples[0] if completion.samples else None
        status = _status(sample)
        answer = self._response(status)
        usage = completion.usage
        answer |= {
            "completed_at": time.time() if status == "completed" else None,
            "output": [] if sample is None else [self._item(sample)],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if sample is not None and status == "incomplete":
            blocked = sample.finish_reason == "content_filter"
            reason = "content_filter" if blocked else "max_output_tokens"
            answer["incomplete_details"] = {"reason": reason}
        if sample is not None and sample.token_ids:
            answer["system_fingerprint"] = f"weights-{sample.weight_version}"
        return answer

    def item(self, status: str, content: list[Answer]) -> Answer:
        """The one message of the response."""
        return {
            "id": self.call.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def part(self, text: str, tokens: Sequence[Scored]) -> Answer:
        """The one part of the message."""
        logprobs = self.logprobs(tokens)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[Scored]) -> list[Answer]:
        """Those of tokens; none when they were not asked for."""
        if not self.call.logprobs:
            return []
        entries: list[Answer] = chat_logprobs(tokens, self._names)["content"]
        return entries

    def _item(self, sample: CompletionSample) -> Answer:
        tokens = scored(sample.token_ids, sample.logprobs, sample.top_logprobs)
        status = "completed" if sample.finish_reason == "stop" else "incomplete"
        return self.item(status, [self.part(sample.text, tokens)])

    def _response(self, status: Status) -> Answer:
        fields = self.call.fields
        return {
            "id": self.call.id,
            "object": "response",
            "created_at": self.call.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "model": self.call.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": fields.store,
            "temperature": fields.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": fields.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            "system_fingerprint": None,
        }


def _status(sample: CompletionSample | None) -> Status:
    match sample.finish_reason if sample else "abort":
        case "stop":
            return "completed"
        case "length" | "content_filter":
            return "incomplete"
        case "abort":
            return "cancelled"
        case unknown:
            assert_never(unknown)
