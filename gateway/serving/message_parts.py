"""Incremental reading of one sample's message: deltas, and the tokens with their texts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...bus.public import CompletionChunk, CompletionSample, FinishReason, TokenLogprob
from ...config import SamplingParams
from ...text.messages import Delta, MessageFormat, MessageReader, Reading
from ..server.measures import Measures
from .samples import rest_of
from .tokenizer import Tokenizer, is_stop_token


class TokenRecord(NamedTuple):
    """A token at its place; the first token of a prompt has no logprob.

    Attributes:
        top: The likeliest tokens at its place; empty if they were not requested.
        version: The version of the weights that sampled it.
        text: The text that it adds; "" for a special token.
        support: Log S at its place; None without limits of the choice.
        mask: Its sampling mask; None if it was not requested.
        rank: Its place among all tokens, from 1; None if unknown.
    """

    token_id: int
    logprob: float | None
    top: Sequence[TokenLogprob]
    version: int = 0
    text: str = ""
    support: float | None = None
    mask: bytes | None = None
    rank: int | None = None


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


class MessageParts:
    """Reads one sample. Without a format all of it is content.

    The deltas are the same however the sample is cut into chunks: the reader is fed token by token,
    once each token's text is certain. Special tokens are fed by name, since some formats consist of
    them; a name that is no mark is removed again, unless a malformed call is shown as written. (If
    ordinary tokens spell the same name elsewhere, that is removed as well.) The stop token that
    ends a sample is no part of the message.

    Attributes:
        reads: Whether the message is parsed; otherwise all of it is text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: SamplingParams,
        form: MessageFormat | None,
        reading: Reading | None,
        seed: str,
        *,
        by_tokens: bool = True,
        measures: Measures | None = None,
    ) -> None:
        """Args:
        tokenizer: None if the tokens' texts are not needed.
        seed: As for a `MessageReader`.
        form, reading: None: all is content.
        by_tokens: Whether each token's text is needed. If not, and without a reader, content is the
            chunks' text, and the records have no texts.
        measures: Counts the message's calls and reasoning at its end.
        """
        reader = None if form is None or reading is None else MessageReader(form, reading, seed)
        self._reader = reader
        self.reads = reader is not None
        self._tokens: _Tokens | None = None
        if by_tokens or reader is not None:
            assert tokenizer is not None, "texts of tokens take the tokenizer"
            self._tokens = _Tokens(tokenizer, sampling)
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
        new = NewParts([], [], [])
        if self._reason is None:
            self._take(chunk, new)
        return new

    def end(self, sample: CompletionSample) -> NewParts:
        """Take the rest of an ended sample, after its chunks."""
        new = NewParts([], [], [])
        for chunk in rest_of(sample, self._taken, self._text_chars):
            if self._reason is None:
                self._take(chunk, new)
        return new

    def _take(self, chunk: CompletionChunk, new: NewParts) -> None:
        """Add the parts that are certain with a chunk."""
        self._reason = chunk.finish_reason
        self._taken += len(chunk.token_ids)
        self._text_chars += len(chunk.text)
        records = records_of(
            chunk.token_ids, chunk.logprobs, chunk.top_logprobs, chunk.weight_version
        )
        if (supports := chunk.support_logprobs) is not None:
            pairs = zip(records, supports, strict=True)
            records = [record._replace(support=each) for record, each in pairs]
        if (masks := chunk.sampling_masks) is not None:
            records = [r._replace(mask=mask) for r, mask in zip(records, masks, strict=True)]
        if self._tokens is None:
            new.records.extend(records)
            if chunk.text:
                new.deltas.append(Delta(content=chunk.text))
                new.places.append(self._taken - bool(records))
            return
        self._tokens.push(records, chunk)
        for record, fed in self._tokens.certain(ended=self._reason is not None):
            if fed is not None:
                new.add(self._read(fed, record.text, 1), self._told)
            new.records.append(record)
            self._told += 1
        if self._reason is not None:
            new.add(self._last(self._tokens.rest), self._told)

    def _last(self, rest: str) -> Delta:
        """Return the delta of the end. `rest`: certain text without a token."""
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

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = tokenizer.detokenizer(skip_special=True)
        self._waiting: deque[_Token] = deque()
        # The number of last tokens that belong to an incomplete character.
        self._incomplete = 0
        self.rest = ""

    def push(self, records: Sequence[TokenRecord], chunk: CompletionChunk) -> None:
        """Add the tokens of a chunk, as records without texts, and its text."""
        self.rest += chunk.text
        for record in records:
            token_id = record.token_id
            is_last = chunk.finish_reason == "stop" and record is records[-1]
            if is_last and is_stop_token(token_id, self._sampling, self._tokenizer):
                self._waiting.append(_Token(record, "", stops=True))
                return
            text, name = self._detokenizer.push((token_id,)), self._tokenizer.special_name(token_id)
            # With new text, the character before it is complete, or never will be.
            self._incomplete = 0 if text else self._incomplete
            self._incomplete += self._detokenizer.incomplete
            self._waiting.append(_Token(record._replace(text=text), name, stops=False))

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


def records_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[Sequence[TokenLogprob]] | None,
    version: int = 0,
) -> list[TokenRecord]:
    """Zip tokens with their logprobs and alternatives, `[k]` each; None for no alternatives."""
    tops = top_logprobs or ((),) * len(token_ids)
    return [
        TokenRecord(token_id, logprob, top, version)
        for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True)
    ]
