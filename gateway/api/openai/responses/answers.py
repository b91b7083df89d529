"""From our outputs to a response."""

from __future__ import annotations

from typing import Literal, assert_never

from .....bus.public import Completion, CompletionSample, Output
from .....config import NanoInferenceError, SamplingParams
from .....store.calls import DurableCall
from .....text.messages import MessageFormat
from ....server.http import EngineError
from ....serving.logprobs import TokenNames
from ....serving.measures import Measures
from ....serving.message_parts import MessageParts
from ....serving.words import Words
from ..bodies import ReasoningOptions
from ..errors import as_openai
from .output_items import Answer, OutputItems
from .records import Record
from .requests import ID_PREFIX

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

UNENDED: tuple[Status, ...] = ("queued", "in_progress")
"""The statuses behind which another one comes."""


class Answers:
    """Writes the answer to a call.

    All of it follows from what is kept and from the outputs, so that it is the same whenever and
    wherever it is written.
    """

    def __init__(
        self,
        record: Record,
        words: Words,
        form: MessageFormat | None,
        sampling: SamplingParams,
        measures: Measures | None = None,
    ) -> None:
        """Args: the tokenizer, how the model writes messages, how it was sampled, and what is told
        of a message when it is read."""
        self.record = record
        self.call = record.call
        self._words = words
        self._form = form
        self._sampling = sampling
        self._measures = measures

    def output_items(self) -> OutputItems:
        """What reads its output."""
        words, form, reading = self._words, self._form, self.record.reading
        shows = self.call.logprobs
        parts = MessageParts(
            words,
            self._sampling,
            form,
            reading,
            f"{self.record.id}/0",
            records=shows,
            measures=self._measures,
        )
        return OutputItems(
            self.record.id.removeprefix(ID_PREFIX),
            parts,
            TokenNames(words, as_ids=False) if shows else None,
            reads=form is not None and reading is not None,
        )

    def begun(self, status: Status) -> Answer:
        """A response of which nothing is known yet."""
        return self._response(status)

    def failed(self, error: NanoInferenceError) -> Answer:
        """One that the engine did not make."""
        told = as_openai(error, "responses")
        return self._response("failed") | {"error": {"code": told.code, "message": told.message}}

    def known(self, kept: DurableCall, last: Output | None) -> Answer:
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

    def ended(self, completion: Completion, items: OutputItems | None = None) -> Answer:
        """One that has ended.

        Args:
            items: What has read all of its output; None where nothing has.
        """
        sample = completion.samples[0] if completion.samples else None
        if items is None:
            items = self.output_items()
            if sample is not None:
                items.end(sample)
        status = _status(sample)
        answer = self._response(status)
        usage = completion.usage
        answer |= {
            "completed_at": completion.timings.finished_ns / 1e9 if status == "completed" else None,
            "output": [] if sample is None else items.items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": items.reasoning_tokens},
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

    def _response(self, status: Status) -> Answer:
        fields = self.call.fields
        reasoning = fields.reasoning or ReasoningOptions()
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
            "parallel_tool_calls": fields.parallel_tool_calls,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "service_tier": "default",
            "store": fields.store,
            "temperature": self.call.sampling.temperature,
            "text": {"format": fields.text.get("format") or {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": fields.tools,
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": self.call.sampling.top_p,
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
