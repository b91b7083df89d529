"""From our outputs to a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, assert_never

from ....bus import KeptCall
from ....bus.public import Completion, CompletionSample, Output
from ....config import NanoInferenceError
from ...http import EngineError
from ...words import Words
from ..errors import as_openai
from ..logprobs import Scored, TokenNames, chat_logprobs, scored
from .records import Record

Answer = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

UNENDED: tuple[Status, ...] = ("queued", "in_progress")
"""The statuses behind which another one comes."""


class Answers:
    """Writes the answer to a call.

    All of it follows from what is kept and from the outputs, so that it is the same whenever and
    wherever it is written.
    """

    def __init__(self, record: Record, words: Words | None) -> None:
        """`words`: the tokenizer, where logprobs are shown."""
        self.record = record
        self.call = record.call
        self._names = None if words is None else TokenNames(words, as_ids=False)

    def begun(self, status: Status) -> Answer:
        """A response of which nothing is known yet."""
        return self._response(status)

    def failed(self, error: NanoInferenceError) -> Answer:
        """One that the engine did not make."""
        told = as_openai(error, "responses")
        return self._response("failed") | {"error": {"code": told.code, "message": told.message}}

    def known(self, kept: KeptCall, last: Output | None) -> Answer:
        """What there is of one now.

        Args:
            last: What has come last of its request.
        """
        if isinstance(last, Completion):
            error = last.error
            if error is not None and last.status != "cancelled":
                return self.failed(EngineError(error.message, code=error.code))
            return self.ended(last)
        if last is not None:
            return self.begun("in_progress")
        if self.record.failure is not None:
            return self.failed(self.record.failure.error())
        ended = "cancelled" in kept.marks and not kept.entries.get(self.record.id)
        return self.begun("cancelled" if ended else "queued")

    def ended(self, completion: Completion) -> Answer:
        """One that has ended."""
        sample = completion.samples[0] if completion.samples else None
        status = _status(sample)
        answer = self._response(status)
        usage = completion.usage
        answer |= {
            "completed_at": completion.timings.finished_ns / 1e9 if status == "completed" else None,
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
        assert self._names is not None, "logprobs take the tokenizer"
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
            "background": fields.background,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata,
            "model": self.call.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": fields.store,
            "temperature": fields.temperature,
            "text": {"format": fields.text.get("format") or {"type": "text"}},
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
