"""Incremental reading of one sample's message: deltas, and the tokens with their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Literal, NamedTuple

from ...bus.public import CompletionChunk, CompletionSample, FinishReason, TokenLogprob
from ...config import SamplingParams
from ...text.messages import Delta, MessageFormat, MessageReader, Reading, ToolCall
from .measures import Measures
from .words import Words, is_stop_token


class TokenRecord(NamedTuple):
    """A generated token.

    Attributes:
        top: The likeliest tokens at its place; empty if they were not requested.
        version: The version of the weights that sampled it.
        text: The text that it adds; "" for a special token.
    """

    token_id: int
    logprob: float | None
    top: Sequence[TokenLogprob]
    version: int
    text: str


class NewParts(NamedTuple):
    """The new parts of a message.

    Attributes:
        deltas: In order, none of them empty.
        records: The tokens whose text is certain by now, in order.
        places: For each delta, the index of its token in the sample; for the deltas of the end, the
            number of tokens. A client with n tokens has the deltas of all lower places.
    """

    deltas: list[Delta]
    records: list[TokenRecord]
    places: list[int]

    def add(self, delta: Delta, place: int) -> None:
        """Add a delta, unless it is empty."""
        if any(delta):
            self.deltas.append(delta)
            self.places.append(place)


class Addition(NamedTuple):
    """An addition to one block of a message: a piece of reasoning or text, or a whole call.

    Attributes:
        tokens: The tokens of a text, where they are wanted.
    """

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    tokens: tuple[TokenRecord, ...] = ()
    call: ToolCall | None = None


def additions(delta: Delta, tokens: tuple[TokenRecord, ...] = ()) -> Iterator[Addition]:
    """Yield the additions of a delta. Args: `tokens` are those of its text."""
    if delta.reasoning:
        yield Addition("reasoning", delta.reasoning)
    if delta.content:
        yield Addition("text", delta.content, tokens)
    for call in delta.calls:
        yield Addition("call", call=call)


def joined(parts: Iterable[Addition]) -> list[Addition]:
    """Join adjacent additions to the same block."""
    found: list[Addition] = []
    for part in parts:
        if found and part.call is None and found[-1].kind == part.kind:
            last = found.pop()
            part = Addition(part.kind, last.text + part.text, last.tokens + part.tokens)
        found.append(part)
    return found


class MessageParts:
    """Reads one sample. Without a format all of it is content.

    The deltas are the same however the sample is cut into chunks: the reader is fed token by token,
    once each token's text is certain. Special tokens are fed by name, since some formats consist of
    them; a name that is no mark is removed again, unless a malformed call is shown as written. (If
    ordinary tokens spell the same name elsewhere, that is removed as well.) The stop token that
    ends a sample is no part of the message.
    """

    def __init__(
        self,
        words: Words,
        sampling: SamplingParams,
        form: MessageFormat | None,
        reading: Reading | None,
        seed: str,
        *,
        records: bool = True,
        measures: Measures | None = None,
    ) -> None:
        """Args:
        seed: As for a `MessageReader`.
        form, reading: None: all is content.
        records: Whether records are needed. Without records and reader, content is the chunks'
            text.
        measures: Counts the message's calls and reasoning at its end.
        """
        reader = None if form is None or reading is None else MessageReader(form, reading, seed)
        self._reader = reader
        self._by_tokens = reader is not None or records
        self._words = words
        self._sampling = sampling
        self._tokens = _Tokens(words)
        self._measures = measures
        self._names: set[str] = set()
        self._text_chars = self._taken = self._told = 0
        self._reason: FinishReason | None = None

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._reader.calls if self._reader else 0

    @property
    def malformed(self) -> int:
        """The number of malformed calls, which became text."""
        return self._reader.malformed if self._reader else 0

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens so far."""
        return self._reader.reasoning_tokens if self._reader else 0

    def add(self, chunk: CompletionChunk) -> NewParts:
        """Take the next tokens."""
        return self._take(chunk, 0, repeat(chunk.weight_version, len(chunk.token_ids)), chunk.text)

    def end(self, sample: CompletionSample) -> NewParts:
        """Take the rest of an ended sample, after its chunks."""
        first = self._taken
        return self._take(sample, first, _versions(sample, first), sample.text[self._text_chars :])

    def _take(
        self, of: CompletionChunk | CompletionSample, first: int, versions: Iterable[int], text: str
    ) -> NewParts:
        """Take the tokens from an index on; return the parts that are certain with this text."""
        new = NewParts([], [], [])
        if self._reason is not None:
            return new
        self._reason = of.finish_reason
        self._taken += len(of.token_ids) - first
        self._text_chars += len(text)
        if not self._by_tokens:
            new.add(Delta(content=text), self._taken)
            return new
        self._push(of, first, versions)
        self._tokens.rest += text
        ended = self._reason is not None
        for record, fed in self._tokens.certain(ended=ended):
            if fed is not None:
                new.add(self._read(fed, record.text, 1), self._told)
            new.records.append(record)
            self._told += 1
        if ended:
            new.add(self._last(), self._told)
        return new

    def _push(
        self, of: CompletionChunk | CompletionSample, first: int, versions: Iterable[int]
    ) -> None:
        """Push the tokens from an index on."""
        token_ids = of.token_ids[first:]
        tops = ((),) * len(token_ids) if of.top_logprobs is None else of.top_logprobs[first:]
        ends = of.finish_reason == "stop" and bool(token_ids)
        stops = ends and is_stop_token(token_ids[-1], self._sampling, self._words)
        last = len(token_ids) - 1
        known = zip(token_ids, of.logprobs[first:], tops, versions, strict=True)
        for place, each in enumerate(known):
            self._tokens.push(*each, stops=stops and place == last)

    def _last(self) -> Delta:
        """Return the delta of the end."""
        rest = self._tokens.rest
        if self._reader is None:
            return Delta(content=rest)
        within = self._read(rest, rest, 0) if rest else Delta()
        as_text = self._reader.as_text
        last = self._reader.finish(cut_off=self._reason != "stop")
        if self._reader.as_text == as_text:
            last = self._without_special(last)
        if self._measures is not None:
            self._measures.message_read(self.calls, self.malformed, self.reasoning_tokens)
        return Delta(
            within.reasoning + last.reasoning,
            within.content + last.content,
            within.calls + last.calls,
        )

    def _read(self, fed: str, shown: str, tokens: int) -> Delta:
        """Feed the reader; `shown` is the text of `fed`, "" for a special token."""
        if self._reader is None:
            return Delta(content=shown)
        if fed != shown:
            self._names.add(fed)
        as_text = self._reader.as_text
        delta = self._reader.feed(fed, tokens)
        # A malformed call is shown as the model wrote it.
        return delta if self._reader.as_text != as_text else self._without_special(delta)

    def _without_special(self, delta: Delta) -> Delta:
        if not self._names:
            return delta
        return delta._replace(
            reasoning=self._without_names(delta.reasoning),
            content=self._without_names(delta.content),
        )

    def _without_names(self, text: str) -> str:
        for name in self._names:
            text = text.replace(name, "")
        return text


class _Token(NamedTuple):
    """A token whose text is not certain yet.

    Attributes:
        record: With the text that it adds, unless that is cut.
        name: A special token's name; "" for any other.
        stops: It ends the sample, and is no part of the text.
    """

    record: TokenRecord
    name: str
    stops: bool


class _Tokens:
    """Tokens, matched with the certain text by counting characters: the tokens' texts together are
    the sample's text, of which stop strings and guardrails cut off the end.

    Attributes:
        rest: Certain text without a token, to which the sample's next certain text is added. At the
            end it is the beginning of a token's text that a guardrail has cut.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._detokenizer = words.detokenizer(skip_special=True)
        self._waiting: deque[_Token] = deque()
        # The number of last tokens that belong to an incomplete character.
        self._incomplete = 0
        self.rest = ""

    def push(
        self,
        token_id: int,
        logprob: float,
        top: Sequence[TokenLogprob],
        version: int,
        *,
        stops: bool,
    ) -> None:
        """Add the next token. `stops`: it ends the sample, and is no part of its text."""
        text = name = ""
        if not stops:
            text, name = self._detokenizer.push((token_id,)), self._words.special_name(token_id)
            # With new text, the character before it is complete, or never will be.
            self._incomplete = 0 if text else self._incomplete
            self._incomplete += self._detokenizer.incomplete
        record = TokenRecord(token_id, logprob, top, version, text)
        self._waiting.append(_Token(record, name, stops))

    def certain(self, *, ended: bool) -> list[tuple[TokenRecord, str | None]]:
        """Return the tokens whose text is certain, each with the text for the reader; None for a
        token that is no part of the message."""
        if ended:
            self._finish()
        found: list[tuple[TokenRecord, str | None]] = []
        text, at, cut = self.rest, 0, False
        while len(self._waiting) > (0 if ended else self._incomplete):
            token = self._waiting[0]
            record = token.record
            end = at + len(record.text)
            if end > len(text) and not ended:
                break
            cut = cut or end > len(text)
            part, at = text[at:end], min(end, len(text))
            without = token.stops or (cut and not part)
            fed = None if without else token.name or part
            found.append((record if part == record.text else record._replace(text=part), fed))
            self._waiting.popleft()
        self.rest = text[at:]
        return found

    def _finish(self) -> None:
        """Give a character that is incomplete at the end to the last token with a part of it."""
        rest = self._detokenizer.finish()
        for place in reversed(range(len(self._waiting) if rest else 0)):
            token = self._waiting[place]
            if not token.name and not token.stops:
                record = token.record._replace(text=token.record.text + rest)
                self._waiting[place] = token._replace(record=record)
                break


def _versions(sample: CompletionSample, first: int) -> Iterator[int]:
    """Yield the version of the weights of each token from an index on."""
    spans = sample.weight_versions or ((sample.weight_version, 0),)
    ends = [*(begin for _, begin in spans), len(sample.token_ids)][1:]
    for (version, begin), end in zip(spans, ends, strict=True):
        yield from repeat(version, end - max(begin, first))
