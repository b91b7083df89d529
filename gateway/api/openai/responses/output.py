"""From our outputs to a response: its growing items, and the response as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, assert_never

from .....bus.public import Completion, CompletionChunk, CompletionSample, Output
from .....config import NanoInferenceError
from .....store.calls import DurableCall
from .....text.messages import MessageFormat, ToolCall
from ....server.http import EngineError
from ....server.measures import Measures
from ....serving.logprobs import TokenNames, token_entries
from ....serving.message_parts import (
    Addition,
    MessageParts,
    NewParts,
    TokenRecord,
    additions,
    joined,
)
from ....serving.samples import session_usage
from ....serving.times import time_usage
from ....serving.words import Words
from ..bodies import ReasoningOptions
from ..errors import as_openai
from .requests import ID_PREFIX, NeverBegun, ResponseCall, ResponseRecord

Answer = dict[str, Any]
Kind = Literal["reasoning", "text", "call"]

_PREFIXES: dict[Kind, str] = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_TEXTS = {"reasoning": "reasoning_text", "text": "output_text"}


class ItemEvent(NamedTuple):
    """An event, without its number."""

    type: str
    fields: Answer


@dataclass(eq=False)
class OutputItems:
    """Reads the sample of a response, and makes its items and their events.

    Reasoning, text and each call are items, in the order in which they were written. Ids and
    events follow from the outputs alone, so that every gateway makes the same.

    Attributes:
        name: The items' ids are made of it.
        names: None where no logprobs are shown.
        items: The complete ones.
    """

    name: str
    parts: MessageParts
    names: TokenNames | None
    items: list[Answer] = field(default_factory=list)
    # Tokens that belong to no item yet, and how many came before.
    _unshown: list[TokenRecord] = field(default_factory=list)
    _num_tokens: int = 0
    # The open item: its kind, how many of each kind there were, its texts and tokens.
    _kind: Kind | None = None
    _number: Counter[Kind] = field(default_factory=Counter)
    _texts: list[str] = field(default_factory=list)
    _shown: list[TokenRecord] = field(default_factory=list)

    @property
    def reasoning_tokens(self) -> int:
        return self.parts.reasoning_tokens

    def add(self, chunk: CompletionChunk) -> list[ItemEvent]:
        """Add the next tokens."""
        return list(self._events(self.parts.add(chunk)))

    def end(self, sample: CompletionSample) -> list[ItemEvent]:
        """Add what did not come in chunks, of a sample that has ended."""
        events = list(self._events(self.parts.end(sample)))
        if self._kind is None and not self.items:
            # An empty answer has one message.
            events += self._begin("text")
        if self._unshown and self._kind == "text":
            # Tokens of a stop, without a text.
            events.append(self._text_delta("", self._unshown))
        status = "completed" if sample.finish_reason == "stop" else "incomplete"
        return [*events, *self._close(status)]

    # --- reading ------------------------------------------------------------------------------

    def _additions(self, new: NewParts) -> Iterator[Addition]:
        if self.names is not None:
            self._unshown += new.records
        for delta, place in zip(new.deltas, new.places, strict=True):
            # Tokens that belong to no item yet, up to the delta's.
            number = place + 1 - self._num_tokens
            tokens, self._unshown = self._unshown[:number], self._unshown[number:]
            self._num_tokens += len(tokens)
            yield from additions(delta, self._tokens_of(delta.content, tokens))

    def _tokens_of(self, text: str, tokens: list[TokenRecord]) -> tuple[TokenRecord, ...]:
        """Return the last tokens that have this text, without the marks and spaces before it."""
        if not self.parts.reads:
            return tuple(tokens)
        first, chars = len(tokens), 0
        while first and chars < len(text):
            first -= 1
            chars += len(tokens[first].text)
        return tuple(tokens[first:])

    # --- events -------------------------------------------------------------------------------

    def _events(self, new: NewParts) -> Iterator[ItemEvent]:
        """The additions of one output to one item are one event."""
        for kind, text, tokens, call in joined(self._additions(new)):
            if kind != self._kind or call is not None:
                yield from self._close("completed")
                if call is None:
                    yield from self._begin(kind)
            if call is not None:
                yield from self._whole_call(call)
            elif kind == "text":
                yield self._text_delta(text, tokens)
            else:
                self._texts.append(text)
                yield self._part_event("reasoning_text.delta", delta=text)

    def _begin(self, kind: Kind) -> Iterator[ItemEvent]:
        self._kind = kind
        self._number[kind] += 1
        self._texts, self._shown = [], []
        yield self._item_event("added", self._item("in_progress", []))
        yield self._part_event("content_part.added", part=self._part())

    def _text_delta(self, text: str, tokens: Sequence[TokenRecord]) -> ItemEvent:
        self._texts.append(text)
        self._shown += tokens
        return self._part_event("output_text.delta", delta=text, logprobs=self._logprobs(tokens))

    def _close(self, status: str) -> Iterator[ItemEvent]:
        """Close the open item."""
        if self._kind is None:
            return
        part = self._part()
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        item = self._item(status, [part])
        yield self._part_event(f"{_TEXTS[self._kind]}.done", **done)
        yield self._part_event("content_part.done", part=part)
        yield self._item_event("done", item)
        self.items.append(item)
        self._kind = None

    def _whole_call(self, call: ToolCall) -> Iterator[ItemEvent]:
        self._number["call"] += 1
        item: Answer = {
            "id": self._id("call"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        place = {"item_id": item["id"], "output_index": len(self.items)}
        done = {"name": call.name, "arguments": call.arguments}
        event = "response.function_call_arguments"
        yield self._item_event("added", item | {"status": "in_progress", "arguments": ""})
        yield ItemEvent(f"{event}.delta", place | {"delta": call.arguments})
        yield ItemEvent(f"{event}.done", place | done)
        yield self._item_event("done", item)
        self.items.append(item)

    def _item_event(self, what: str, item: Answer) -> ItemEvent:
        fields = {"output_index": len(self.items), "item": item}
        return ItemEvent(f"response.output_item.{what}", fields)

    def _part_event(self, what: str, **fields: Any) -> ItemEvent:
        """An event of the open item's only part."""
        assert self._kind is not None, "an item is open"
        item_id = self._id(self._kind)
        place = {"item_id": item_id, "output_index": len(self.items), "content_index": 0}
        return ItemEvent(f"response.{what}", place | fields)

    def _id(self, kind: Kind) -> str:
        number = self._number[kind]
        return f"{_PREFIXES[kind]}{self.name}" + (f"_{number - 1}" if number > 1 else "")

    def _item(self, status: str, content: list[Answer]) -> Answer:
        if self._kind == "reasoning":
            item: Answer = {"id": self._id("reasoning"), "type": "reasoning", "status": status}
            return item | {"summary": [], "content": content}
        item = {"id": self._id("text"), "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def _part(self) -> Answer:
        text = "".join(self._texts)
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs(self._shown)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> list[Answer]:
        return [] if self.names is None else token_entries(tokens, self.names)


Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

UNENDED: tuple[Status, ...] = ("queued", "in_progress")
"""The statuses of a response that has not ended."""


@dataclass(eq=False)
class ResponseWriter:
    """Writes the answer to a call.

    The answer follows from the record and the outputs alone, so that every gateway writes the same.

    Attributes:
        measures: Counts the message; None if another reader has counted it.
    """

    record: ResponseRecord
    words: Words
    form: MessageFormat | None
    measures: Measures | None

    @property
    def call(self) -> ResponseCall:
        return self.record.call

    def output_items(self) -> OutputItems:
        """Return the reader of the output."""
        words, form, reading = self.words, self.form, self.record.reading
        shows = self.call.logprobs
        parts = MessageParts(
            words,
            self.record.sampling,
            form,
            reading,
            f"{self.record.id}/0",
            by_tokens=shows,
            measures=self.measures,
        )
        return OutputItems(
            self.record.id.removeprefix(ID_PREFIX),
            parts,
            TokenNames(words, as_ids=False) if shows else None,
        )

    def failed(self, error: NanoInferenceError) -> Answer:
        """Return a response that ended with an error."""
        shown = as_openai(error, "responses")
        return self.begun("failed") | {"error": {"code": shown.code, "message": shown.message}}

    def known(self, kept: DurableCall, last: Output | None) -> Answer:
        """Return the present state.

        Args:
            last: The last output of its request.
        """
        if isinstance(last, Completion):
            error = last.error
            if error is not None and last.status != "cancelled":
                return self.failed(EngineError(error.message, code=error.code))
            return self.ended(last)
        if last is not None:
            return self.begun("in_progress")
        if (failure := self.record.failure) is not None:
            return self.failed(NeverBegun(failure.message, code=failure.code))
        ended = "cancelled" in kept.marks and not kept.entries.get(self.record.id)
        return self.begun("cancelled" if ended else "queued")

    def ended(self, completion: Completion, items: OutputItems | None = None) -> Answer:
        """Return a response that has ended.

        Args:
            items: The reader of all of its output; None if there was no reader.
        """
        sample = completion.samples[0] if completion.samples else None
        if items is None:
            items = self.output_items()
            if sample is not None:
                items.end(sample)
        status = _status(sample)
        answer = self.begun(status)
        usage = completion.usage
        details = {"reasoning_tokens": items.reasoning_tokens}
        if usage.cached_completion_tokens:
            details["cached_tokens"] = usage.cached_completion_tokens
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
                "output_tokens_details": details,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                **session_usage(completion),
                **time_usage([completion]),
            },
        }
        if sample is not None and status == "incomplete":
            blocked = sample.finish_reason == "content_filter"
            reason = "content_filter" if blocked else "max_output_tokens"
            answer["incomplete_details"] = {"reason": reason}
        if sample is not None and sample.token_ids:
            answer["system_fingerprint"] = f"weights-{sample.weight_version}"
        return answer

    def begun(self, status: Status) -> Answer:
        """Return a response without output."""
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
            "text": {"format": fields.text.format or {"type": "text"}},
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
