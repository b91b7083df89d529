"""From our outputs to a response: its growing items, and the response as a whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, assert_never

from .....bus.public import Completion, CompletionSample, Output
from .....config import NanoInferenceError
from .....store.calls import DurableCall
from .....text.messages import MessageFormat, ToolCall
from ....server.http import EngineError
from ....server.measures import Measures
from ....serving.blocks import Addition, Blocks
from ....serving.logprobs import TokenNames, token_entries
from ....serving.message_parts import MessageParts, NewParts, TokenRecord
from ....serving.samples import session_usage
from ....serving.sealed import seal
from ....serving.times import time_usage
from ....serving.tokenizer import Tokenizer
from ..errors import as_openai
from ..response_bodies import ReasoningOptions
from .items import REASONING
from .requests import ENCRYPTED, ID_PREFIX, NeverBegun, ResponseCall, ResponseRecord
from .tools import Origin, as_called, origins_of, shown_tools

Answer = dict[str, Any]
_PREFIXES = {
    "reasoning": "rs_",
    "text": "msg_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
}
_CALL_EVENTS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
"""The events of a call, by the field that they carry."""

_ITEM_ID = re.compile(rf"(?:{'|'.join(_PREFIXES.values())})([0-9a-f]{{1,64}})(?:_[0-9]+)?")


def response_with(item_id: str) -> str:
    """Return the id of the response with an item in its output; "" for a client's own item."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"{ID_PREFIX}{found[1]}" if found else ""


class ItemEvent(NamedTuple):
    """An event, without its number."""

    type: str
    fields: Answer


class OutputItems(Blocks[ItemEvent]):
    """Reads the sample of a response, and makes its items and their events.

    Ids and events follow from the outputs alone, so that every gateway makes the same.
    """

    def __init__(
        self,
        name: str,
        parts: MessageParts,
        names: TokenNames | None,
        origins: Mapping[str, Origin],
        sealed: Callable[[str], str] | None,
    ) -> None:
        """Args:
        name: The items' ids are made of it.
        names: None where no logprobs are shown.
        origins: The tools, as `origins_of` returns them.
        sealed: Returns reasoning as clients hand it back; None if they don't want it.
        """
        super().__init__(parts)
        self._name, self._names, self._origins, self._sealed = name, names, origins, sealed
        # Tokens that belong to no item yet, and how many came before.
        self._unshown: list[TokenRecord] = []
        self._num_tokens = 0
        # How many items of each kind there were, and the tokens of the open one.
        self._number: Counter[str] = Counter()
        self._shown: list[TokenRecord] = []

    def found(self, new: NewParts) -> Iterator[Addition | ToolCall]:
        if self._names is not None:
            self._unshown += new.records
        return super().found(new)

    def tokens_of(self, text: str, place: int) -> tuple[TokenRecord, ...]:
        """Return the last tokens that have this text, without the marks and spaces before it."""
        # Tokens that belong to no item yet, up to the text's.
        number = place + 1 - self._num_tokens
        tokens, self._unshown = self._unshown[:number], self._unshown[number:]
        self._num_tokens += len(tokens)
        first, chars = len(tokens) if self.parts.reads else 0, 0
        while first and chars < len(text):
            first -= 1
            chars += len(tokens[first].text)
        return tuple(tokens[first:])

    def last(self) -> list[ItemEvent]:
        """Add the tokens of a stop, without a text."""
        return self.grown(Addition("text", "", tuple(self._unshown))) if self._unshown else []

    def begun(self) -> list[ItemEvent]:
        assert self.kind is not None
        self._number[self.kind] += 1
        self._shown = []
        return [
            self._item_event("added", self._item("in_progress", [])),
            self._part_event("content_part.added", part=self._part()),
        ]

    def grown(self, part: Addition) -> list[ItemEvent]:
        self.texts.append(part.text)
        if part.kind == "reasoning":
            return [self._part_event("reasoning_text.delta", delta=part.text)]
        self._shown += part.tokens
        logprobs = self._logprobs(part.tokens)
        return [self._part_event("output_text.delta", delta=part.text, logprobs=logprobs)]

    def closed(self, status: str) -> list[ItemEvent]:
        part = self._part()
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        item = self._item(status, [part])
        events = [
            self._part_event(f"{part['type']}.done", **done),
            self._part_event("content_part.done", part=part),
            self._item_event("done", item),
        ]
        self.blocks.append(item)
        return events

    def called(self, call: ToolCall) -> list[ItemEvent]:
        fields = as_called(self._origins, call.name, call.arguments)
        kind = fields["type"]
        self._number[kind] += 1
        item: Answer = {
            "id": self._id(kind),
            "type": kind,
            "status": "completed",
            "call_id": call.id,
            **fields,
        }
        (field,) = item.keys() & _CALL_EVENTS.keys()
        event, text = f"response.{_CALL_EVENTS[field]}", item[field]
        place = {"item_id": item["id"], "output_index": len(self.blocks)}
        named = {"name": item["name"]} if kind == "function_call" else {}
        events = [
            self._item_event("added", item | {"status": "in_progress", field: ""}),
            ItemEvent(f"{event}.delta", place | {"delta": text}),
            ItemEvent(f"{event}.done", place | named | {field: text}),
            self._item_event("done", item),
        ]
        self.blocks.append(item)
        return events

    def _item_event(self, what: str, item: Answer) -> ItemEvent:
        fields = {"output_index": len(self.blocks), "item": item}
        return ItemEvent(f"response.output_item.{what}", fields)

    def _part_event(self, what: str, **fields: Any) -> ItemEvent:
        """Return an event of the open item's only part."""
        assert self.kind is not None, "an item is open"
        place = {"item_id": self._id(self.kind), "output_index": len(self.blocks)}
        return ItemEvent(f"response.{what}", place | {"content_index": 0} | fields)

    def _id(self, kind: str) -> str:
        number = self._number[kind]
        return f"{_PREFIXES[kind]}{self._name}" + (f"_{number - 1}" if number > 1 else "")

    def _item(self, status: str, content: list[Answer]) -> Answer:
        if self.kind == "reasoning":
            item: Answer = {"id": self._id("reasoning"), "type": "reasoning", "status": status}
            if self._sealed is not None and content:
                item["encrypted_content"] = self._sealed(content[0]["text"])
            return item | {"summary": [], "content": content}
        item = {"id": self._id("text"), "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def _part(self) -> Answer:
        text = "".join(self.texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs(self._shown)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> list[Answer]:
        return [] if self._names is None else token_entries(tokens, self._names)


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
    tokenizer: Tokenizer
    form: MessageFormat | None
    measures: Measures | None
    items: ClassVar[type[OutputItems]] = OutputItems

    @property
    def call(self) -> ResponseCall:
        return self.record.call

    def output_items(self) -> OutputItems:
        """Return the reader of the output."""
        tokenizer, form, reading = self.tokenizer, self.form, self.record.reading
        shows = self.call.logprobs
        wants_sealed = ENCRYPTED in self.call.fields.include
        parts = MessageParts(
            tokenizer,
            self.record.sampling,
            form,
            reading,
            f"{self.record.id}/0",
            by_tokens=shows,
            measures=self.measures,
        )
        return self.items(
            self.record.id.removeprefix(ID_PREFIX),
            parts,
            TokenNames(tokenizer, as_ids=False) if shows else None,
            origins_of(self.call.fields.tools),
            partial(seal, REASONING, self.record.tenant) if wants_sealed else None,
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
            items.end(sample)
        status = _status(sample)
        answer = self.begun(status)
        usage = completion.usage
        details = {"reasoning_tokens": items.parts.reasoning_tokens}
        if usage.cached_completion_tokens:
            details["cached_tokens"] = usage.cached_completion_tokens
        answer |= {
            "completed_at": completion.timings.finished_ns // 10**9
            if status == "completed"
            else None,
            "output": [] if sample is None else items.blocks,
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
            "conversation": {"id": fields.conversation_id} if fields.conversation_id else None,
            "error": None,
            "incomplete_details": None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "max_tool_calls": None,
            "metadata": fields.metadata,
            "model": self.call.model,
            "output": [],
            "parallel_tool_calls": fields.parallel_tool_calls,
            "presence_penalty": self.call.sampling.presence_penalty,
            "frequency_penalty": self.call.sampling.frequency_penalty,
            "previous_response_id": fields.previous_response_id,
            "prompt_cache_key": None,
            "safety_identifier": None,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "service_tier": "default",
            "store": fields.store,
            "temperature": self.call.sampling.temperature,
            "text": {"format": fields.text.format or {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": shown_tools(fields.tools),
            "top_logprobs": fields.top_logprobs or 0,
            "top_p": self.call.sampling.top_p,
            "truncation": fields.truncation,
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
