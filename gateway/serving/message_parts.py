"""One sample of a conversation, read as it comes: what is new of its message, and which tokens that
took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from ...bus.public import CompletionChunk, CompletionSample, FinishReason, TokenLogprob
from ...config import SamplingParams
from ...text.messages import Delta, MessageFormat, MessageReader, Reading
from .measures import Measures
from .words import Words, is_stop_token


class ReadToken(NamedTuple):
    """A token with what is known of it.

    Attributes:
        top: The likeliest tokens at its place; empty where they were not asked for.
        version: Of the weights that made it.
        text: What it adds to the text; special tokens nothing.
    """

    token_id: int
    logprob: float | None
    top: Sequence[TokenLogprob]
    version: int
    text: str


class NewParts(NamedTuple):
    """What is new.

    Attributes:
        deltas: Of the message, in order; none of them is empty.
        records: The tokens whose text is certain by now, in order.
        places: For each delta, which token of the sample brought it; for what only the end brings,
            the number of all tokens. So who was told of so many tokens has had the deltas of all
            lower places.
    """

    deltas: list[Delta]
    records: list[ReadToken]
    places: list[int]

    def add(self, delta: Delta, place: int) -> None:
        """One more, if it says anything."""
        if any(delta):
            self.deltas.append(delta)
            self.places.append(place)


class MessageParts:
    """Reads one sample. Without a format all of it is content.

    What it gives is the same, delta by delta, however the sample is cut into chunks: the reader is
    fed token by token, each when its text is certain. It is fed special tokens by their names, of
    which some formats are made. Where it does not take them for marks they are shown no more than
    in a sample's text; but what began as a call and is none is shown as the model wrote it. (In a
    text with a special token and its name spelled out elsewhere by ordinary ones, both are left
    out.) The stop token that ends a sample is no part of the message.
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
        records: Whether anybody takes them. Without them and without a reader nothing is made of
            tokens, and content is what the chunks bring.
        measures: What is told at the end what the message had; None: nothing is.
        """
        reader = None if form is None or reading is None else MessageReader(form, reading, seed)
        self._reader = reader
        self._by_tokens = reader is not None or records
        self._words = words
        self._sampling = sampling
        self._tokens = _Tokens(words)
        self._measures = measures
        self._names: set[str] = set()
        self._text_chars = 0
        self._taken = 0
        self._told = 0
        self._reason: FinishReason | None = None

    @property
    def calls(self) -> int:
        """How many calls there were so far."""
        return self._reader.calls if self._reader else 0

    @property
    def malformed(self) -> int:
        """How many were none, and became text."""
        return self._reader.malformed if self._reader else 0

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens the reasoning has so far."""
        return self._reader.reasoning_tokens if self._reader else 0

    def add(self, chunk: CompletionChunk) -> NewParts:
        """Takes the next tokens."""
        if self._reason is not None:
            return NewParts([], [], [])
        self._reason = chunk.finish_reason
        self._taken += len(chunk.token_ids)
        if not self._by_tokens:
            return self._plain(chunk.text)
        versions = repeat(chunk.weight_version, len(chunk.token_ids))
        self._push(chunk, 0, versions)
        return self._certain(chunk.text)

    def end(self, sample: CompletionSample) -> NewParts:
        """Takes what was not told in chunks, of a sample that has ended; all of it, where there
        were none."""
        if self._reason is not None:
            return NewParts([], [], [])
        self._reason = sample.finish_reason
        first, self._taken = self._taken, len(sample.token_ids)
        text = sample.text[self._text_chars :]
        if not self._by_tokens:
            return self._plain(text)
        self._push(sample, first, _versions(sample)[first:])
        return self._certain(text)

    def _plain(self, text: str) -> NewParts:
        self._text_chars += len(text)
        new = NewParts([], [], [])
        new.add(Delta(content=text), self._taken)
        return new

    def _push(
        self, of: CompletionChunk | CompletionSample, first: int, versions: Iterable[int]
    ) -> None:
        """The tokens from the given one on."""
        token_ids = of.token_ids[first:]
        tops = ((),) * len(token_ids) if of.top_logprobs is None else of.top_logprobs[first:]
        ends = of.finish_reason == "stop" and bool(token_ids)
        stops = ends and is_stop_token(token_ids[-1], self._sampling, self._words)
        last = len(token_ids) - 1
        known = zip(token_ids, of.logprobs[first:], tops, versions, strict=True)
        for place, each in enumerate(known):
            self._tokens.push(*each, stops=stops and place == last)

    def _certain(self, text: str) -> NewParts:
        """What is certain by this text."""
        self._text_chars += len(text)
        self._tokens.add_text(text)
        new = NewParts([], [], [])
        ended = self._reason is not None
        for record, fed in self._tokens.certain(ended=ended):
            if fed is not None:
                new.add(self._read(fed, record.text, 1), self._told)
            new.records.append(record)
            self._told += 1
        if ended:
            new.add(self._last(), self._told)
        return new

    def _last(self) -> Delta:
        """What the end brings."""
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
        """Args: what the reader is fed, and what of it is text."""
        if self._reader is None:
            return Delta(content=shown)
        if fed != shown:
            self._names.add(fed)
        as_text = self._reader.as_text
        delta = self._reader.feed(fed, tokens)
        # A call that is none is shown as the model wrote it.
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
    """A token that waits until its text is certain.

    Attributes:
        record: With the text that it adds, if nothing cuts that.
        name: A special token's; "" of all others.
        stops: It ends the sample, and is no part of it.
    """

    record: ReadToken
    name: str
    stops: bool = False


class _Tokens:
    """Tokens, and the text that they have to make certain.

    Which of the text is a token's is counted: the text of all tokens together is that of the
    sample, of which stop strings, and guardrails, cut off the end.

    Attributes:
        rest: Certain text of which no token was told. At the end it is no token's: guardrails that
            cut within a token leave its text before the cut, without it.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._detokenizer = words.detokenizer(skip_special=True)
        self._waiting: deque[_Token] = deque()
        # How many of them, the last ones, belong to a character that is not complete.
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
        """The next token. `stops`: it ends the sample, and is no part of its text."""
        if stops:
            self._waiting.append(_Token(ReadToken(token_id, logprob, top, version, ""), "", stops))
            return
        text = self._detokenizer.push((token_id,))
        # Where there is text, the character before it is complete, or never will be.
        self._incomplete = 0 if text else self._incomplete
        self._incomplete += self._detokenizer.incomplete
        record = ReadToken(token_id, logprob, top, version, text)
        self._waiting.append(_Token(record, self._words.special_name(token_id)))

    def add_text(self, text: str) -> None:
        """More of the sample's text is certain."""
        self.rest += text

    def certain(self, *, ended: bool) -> list[tuple[ReadToken, str | None]]:
        """The tokens whose text is certain by now, and what a reader is fed of each: None of those
        that are no part of the message."""
        if ended:
            self._finish()
        found: list[tuple[ReadToken, str | None]] = []
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
        """A character that is incomplete at the end is that of the last token with a part of it."""
        rest = self._detokenizer.finish()
        for place in reversed(range(len(self._waiting) if rest else 0)):
            token = self._waiting[place]
            if not token.name and not token.stops:
                record = token.record._replace(text=token.record.text + rest)
                self._waiting[place] = token._replace(record=record)
                break


def _versions(sample: CompletionSample) -> list[int]:
    """Of the weights that made each token."""
    spans = sample.weight_versions or ((sample.weight_version, 0),)
    ends = [*(begin for _, begin in spans), len(sample.token_ids)][1:]
    return [
        version
        for (version, begin), end in zip(spans, ends, strict=True)
        for _ in range(begin, end)
    ]
