"""The items of a response's output while they grow, and the events that tell of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from .....bus.public import CompletionChunk, CompletionSample
from .....text.messages import ToolCall
from ....serving.logprobs import Scored, TokenNames
from ....serving.message_parts import MessageParts, NewParts, TokenRecord
from ..logprobs import chat_logprobs

Answer = dict[str, Any]
Kind = Literal["reasoning", "message", "function_call"]

_PREFIXES: dict[Kind, str] = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


class ItemEvent(NamedTuple):
    """An event, but for its number."""

    type: str
    told: Answer


class _Growth(NamedTuple):
    """What an item gains: text, and the tokens of it whose logprobs are shown, or a call."""

    kind: Kind
    text: str = ""
    tokens: tuple[TokenRecord, ...] = ()
    call: ToolCall | None = None


class OutputItems:
    """Reads the one sample of a response.

    Reasoning, text and each call are items, in the order in which they were written. What is
    read, and how it is told, follows from the outputs alone: their ids and events are the same
    whenever and wherever they are made.

    Attributes:
        items: Those that are complete.
    """

    def __init__(
        self, name: str, parts: MessageParts, names: TokenNames | None, *, reads: bool
    ) -> None:
        """Args: `name`, which the items' ids are made of; `names`, where logprobs are shown;
        whether the message is taken apart, or all of it text."""
        self.items: list[Answer] = []
        self._name = name
        self._parts = parts
        self._names = names
        self._reads = reads
        # Tokens that no item has got yet, and how many came before.
        self._unshown: list[TokenRecord] = []
        self._num_tokens = 0
        # The item that grows: what it is, how many of its kind there were, and what it has.
        self._kind: Kind | None = None
        self._number: Counter[Kind] = Counter()
        self._texts: list[str] = []
        self._shown: list[TokenRecord] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._parts.reasoning_tokens

    def add(self, chunk: CompletionChunk) -> list[ItemEvent]:
        """Takes the next tokens."""
        return self._grow(self._parts.add(chunk))

    def end(self, sample: CompletionSample) -> list[ItemEvent]:
        """Takes what was not told in chunks, of a sample that has ended; all of it, where there
        were none."""
        events = self._grow(self._parts.end(sample))
        if self._kind is None and not self.items:
            # There is an answer, if an empty one.
            events += self._begin("message")
        if self._unshown and self._kind == "message":
            # Of a stop token, or a stop string, which has no text.
            events.append(self._text_delta("", self._unshown))
        return events + self._close("completed" if sample.finish_reason == "stop" else "incomplete")

    # --- reading ------------------------------------------------------------------------------

    def _growths(self, new: NewParts) -> Iterator[_Growth]:
        if self._names is not None:
            self._unshown += new.records
        for delta, place in zip(new.deltas, new.places, strict=True):
            tokens = self._tokens_to(place)
            if delta.reasoning:
                yield _Growth("reasoning", delta.reasoning)
            if delta.content:
                yield _Growth("message", delta.content, self._tokens_of(delta.content, tokens))
            for call in delta.calls:
                yield _Growth("function_call", call=call)

    def _tokens_to(self, place: int) -> list[TokenRecord]:
        """Those that no item has got yet, up to one of the sample's."""
        number = place + 1 - self._num_tokens
        tokens, self._unshown = self._unshown[:number], self._unshown[number:]
        self._num_tokens += len(tokens)
        return tokens

    def _tokens_of(self, text: str, tokens: list[TokenRecord]) -> tuple[TokenRecord, ...]:
        """The last of them that have this text. Those before are marks, and white space."""
        if not self._reads:
            return tuple(tokens)
        first, chars = len(tokens), 0
        while first and chars < len(text):
            first -= 1
            chars += len(tokens[first].text)
        return tuple(tokens[first:])

    # --- telling ------------------------------------------------------------------------------

    def _grow(self, new: NewParts) -> list[ItemEvent]:
        """The same outputs are the same events, so what they bring of an item at once is one."""
        grown: list[_Growth] = []
        for each in self._growths(new):
            last = grown[-1] if grown else None
            if last is not None and last.kind == each.kind and each.call is None:
                grown[-1] = _Growth(each.kind, last.text + each.text, last.tokens + each.tokens)
            else:
                grown.append(each)
        events: list[ItemEvent] = []
        for each in grown:
            if each.call is not None:
                events += self._close("completed") + self._whole_call(each.call)
                continue
            if each.kind != self._kind:
                events += self._close("completed") + self._begin(each.kind)
            if each.kind == "message":
                events.append(self._text_delta(each.text, each.tokens))
            else:
                self._texts.append(each.text)
                told = self._place() | {"delta": each.text}
                events.append(ItemEvent("response.reasoning_text.delta", told))
        return events

    def _begin(self, kind: Kind) -> list[ItemEvent]:
        self._kind = kind
        self._number[kind] += 1
        self._texts, self._shown = [], []
        return [
            self._item_event("added", self._item("in_progress", [])),
            ItemEvent("response.content_part.added", self._place() | {"part": self._part()}),
        ]

    def _text_delta(self, text: str, tokens: Sequence[TokenRecord]) -> ItemEvent:
        self._texts.append(text)
        self._shown += tokens
        told = self._place() | {"delta": text, "logprobs": self._logprobs(tokens)}
        return ItemEvent("response.output_text.delta", told)

    def _close(self, status: str) -> list[ItemEvent]:
        """The item that grows is complete, or ends where it is."""
        if self._kind is None:
            return []
        part = self._part()
        done: Answer = {"text": part["text"]}
        kind = "response.reasoning_text.done"
        if self._kind == "message":
            done["logprobs"] = part["logprobs"]
            kind = "response.output_text.done"
        item = self._item(status, [part])
        events = [
            ItemEvent(kind, self._place() | done),
            ItemEvent("response.content_part.done", self._place() | {"part": part}),
            self._item_event("done", item),
        ]
        self.items.append(item)
        self._kind = None
        return events

    def _whole_call(self, call: ToolCall) -> list[ItemEvent]:
        self._number["function_call"] += 1
        item: Answer = {
            "id": self._id("function_call"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        place = {"item_id": item["id"], "output_index": len(self.items)}
        delta = place | {"delta": call.arguments}
        done = place | {"name": call.name, "arguments": call.arguments}
        events = [
            self._item_event("added", item | {"status": "in_progress", "arguments": ""}),
            ItemEvent("response.function_call_arguments.delta", delta),
            ItemEvent("response.function_call_arguments.done", done),
            self._item_event("done", item),
        ]
        self.items.append(item)
        return events

    def _item_event(self, what: str, item: Answer) -> ItemEvent:
        told = {"output_index": len(self.items), "item": item}
        return ItemEvent(f"response.output_item.{what}", told)

    def _place(self) -> Answer:
        """Of the item that grows, and the one part that it has."""
        assert self._kind is not None, "an item grows"
        item_id = self._id(self._kind)
        return {"item_id": item_id, "output_index": len(self.items), "content_index": 0}

    def _id(self, kind: Kind) -> str:
        number = self._number[kind]
        return f"{_PREFIXES[kind]}{self._name}" + (f"_{number - 1}" if number > 1 else "")

    def _item(self, status: str, content: list[Answer]) -> Answer:
        if self._kind == "reasoning":
            item: Answer = {"id": self._id("reasoning"), "type": "reasoning", "status": status}
            return item | {"summary": [], "content": content}
        item = {"id": self._id("message"), "type": "message", "role": "assistant"}
        return item | {"status": status, "content": content}

    def _part(self) -> Answer:
        text = "".join(self._texts)
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs(self._shown)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> list[Answer]:
        if self._names is None:
            return []
        scored = [Scored(token.token_id, token.logprob, token.top) for token in tokens]
        entries: list[Answer] = chat_logprobs(scored, self._names)["content"]
        return entries
