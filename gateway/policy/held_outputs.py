"""What of a request's answer may leave: outputs are held back until nothing blocked is in them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ...bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    GenerateRequest,
    Output,
    TokenLogprob,
)
from ..serving.words import Words
from .block_list import BlockList, Scanner, context_chars

_LEVELS = 2
"""How often JSON is looked for in a text of JSON; arguments may be such a text."""

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]')

# The same, or at the end what more text may make an escape, or the second half of a pair.
_GROWING = re.compile(
    r"(?P<begun>\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?"
    rf"\Z)|{_ESCAPE.pattern}"
)

_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class EscapedScanner:
    """Looks through one text that grows as a `Scanner` does, with its escapes replaced.

    It costs nothing until there is one. Of a match that begins before the first escape it is known
    that it ends behind that: its place is that of the escape.

    Attributes:
        taken, safe, blocked_at: As a `Scanner` has them, in the text as it was written.
    """

    __slots__ = (
        "_before",
        "_block_list",
        "_held",
        "_levels",
        "_made",
        "_scanners",
        "_starts",
        "blocked_at",
        "safe",
        "taken",
    )

    def __init__(self, block_list: BlockList, before: str = "", levels: int = _LEVELS) -> None:
        """`before`: as for a `Scanner`."""
        self.taken = 0
        self.safe = 0
        self.blocked_at: int | None = None
        self._block_list = block_list
        self._before = before
        self._levels = levels
        # From the first escape on.
        self._scanners: tuple[Scanner | EscapedScanner, ...] = ()
        # Text that may be the beginning of an escape, and how much was made of all before it.
        self._held = ""
        self._made = 0
        # Where text of one piece begins: (in what was made of it, as it was written).
        self._starts: list[tuple[int, int]] = []

    def push(self, text: str) -> None:
        """Takes the next text."""
        self.taken += len(text)
        if not self._scanners:
            at = text.find("\\")
            context = self._before + (text if at < 0 else text[:at])
            self._before = context[-context_chars(self._block_list) :]
            if at < 0:
                self.safe = self.taken
                return
            self._scanners = (Scanner(self._block_list, self._before),)
            if self._levels > 1:
                inner = EscapedScanner(self._block_list, self._before, self._levels - 1)
                self._scanners += (inner,)
            text = text[at:]
        self._take(self._held + text, ended=False)

    def finish(self) -> None:
        """The text has ended."""
        if not self._scanners:
            return
        self._take(self._held, ended=True)
        for scanner in self._scanners:
            scanner.finish()
        self._look()

    def _take(self, text: str, *, ended: bool) -> None:
        written, end = self.taken - len(text), len(text)
        pieces, at = [], 0
        for found in (_ESCAPE if ended else _GROWING).finditer(text):
            if not ended and found["begun"]:
                end = found.start()
                break
            pieces += [(text[at : found.start()], at), (_meant(found[0]), found.start())]
            at = found.end()
        pieces.append((text[at:end], at))
        for piece, place in pieces:
            if piece:
                self._starts.append((self._made, written + place))
                self._made += len(piece)
        self._held = text[end:]
        made = "".join(piece for piece, _ in pieces)
        for scanner in self._scanners:
            scanner.push(made)
        self._look()

    def _look(self) -> None:
        found = [each.blocked_at for each in self._scanners if each.blocked_at is not None]
        safe = min(scanner.safe for scanner in self._scanners)
        # What one of them has found may stand behind what another has yet to find.
        if found and min(found) <= safe:
            self.blocked_at = self._written(min(found))
        self.safe = self.taken - len(self._held) if safe == self._made else self._written(safe)

    def _written(self, place: int) -> int:
        """Where that stands as it was written."""
        made, written = self._starts[bisect_right(self._starts, place, key=_made) - 1]
        return written + place - made


def _made(start: tuple[int, int]) -> int:
    return start[0]


def _meant(escape: str) -> str:
    if escape[1] != "u":
        return _SHORT.get(escape[1], escape[1])
    units = b"".join(bytes.fromhex(unit) for unit in escape.split("\\u")[1:])
    # Half of a pair is no character.
    return units.decode("utf-16-be", "replace")


T = TypeVar("T")

Tops = tuple[tuple[TokenLogprob, ...], ...] | None
"""The likeliest tokens at some places; None where they were not asked for."""


class HeldOutputs:
    """The outputs of one request on their way to its client.

    They leave whole and, for each sample, in order, as soon as nothing that could be a part of a
    match is in them. A sample in which there is one ends before it, text and tokens, with the
    finish reason "content_filter". Where that is, follows from the answer alone: whoever reads it
    again, however it is cut into chunks, is given the same.

    Attributes:
        blocked: How many samples were ended so.
    """

    def __init__(
        self, request: GenerateRequest, block_list: BlockList, words: Words, before: str = ""
    ) -> None:
        """Args: `before` is shown before each sample; a match may begin there."""
        self.blocked = 0
        self._request = request
        self._blocked_tokens: dict[int, bool] = {}
        self._block_list = block_list
        self._words = words
        self._before = before[-context_chars(block_list) :]
        self._samples: dict[int, _HeldSample] = {}

    @property
    def complete(self) -> bool:
        """Whether no sample has anything more to say, though the engine goes on with some."""
        samples = self._samples.values()
        ended = sum(sample.ended for sample in samples)
        return ended == self._request.n and any(sample.running for sample in samples)

    def put(self, output: Output) -> list[Output]:
        """Takes the next one, and gives what may leave now."""
        output = self._without_blocked_tokens(output)
        if isinstance(output, CompletionChunk):
            return [*self._count(self._sample(output.sample_index), output)]
        released: list[Output] = []
        samples: list[CompletionSample] = []
        for sample in output.samples:
            held = self._sample(sample.sample_index)
            released += self._count(held, sample)
            samples.append(held.cut(sample))
        return [*released, self._without_blocked(output, samples) if self.blocked else output]

    def _sample(self, index: int) -> _HeldSample:
        if index not in self._samples:
            self._samples[index] = _HeldSample(
                Scanner(self._block_list),
                EscapedScanner(self._block_list),
                Scanner(self._block_list, self._before),
                self._words,
            )
        return self._samples[index]

    def _count(
        self, held: _HeldSample, new: CompletionChunk | CompletionSample
    ) -> list[CompletionChunk]:
        before = held.blocked
        released = held.add(new) if isinstance(new, CompletionChunk) else held.end(new)
        self.blocked += held.blocked and not before
        return released

    def _without_blocked_tokens(self, output: Output) -> Output:
        """Of the tokens that were likely too, those that alone are blocked are told to nobody."""
        if self._request.sampling.logprobs or self._request.sampling.prompt_logprobs:
            told = {"prompt_top_logprobs": self._allowed(output.prompt_top_logprobs)}
            if isinstance(output, CompletionChunk):
                tops = self._allowed(output.top_logprobs)
                return msgspec.structs.replace(output, top_logprobs=tops, **told)
            samples = [
                msgspec.structs.replace(each, top_logprobs=self._allowed(each.top_logprobs))
                for each in output.samples
            ]
            return msgspec.structs.replace(output, samples=tuple(samples), **told)
        return output

    def _allowed(self, tops: Tops) -> Tops:
        if tops is None:
            return None
        return tuple(tuple(each for each in top if not self._blocks(each.token_id)) for top in tops)

    def _blocks(self, token_id: int) -> bool:
        if token_id not in self._blocked_tokens:
            text = self._words.text((token_id,), skip_special=True)
            self._blocked_tokens[token_id] = self._block_list.blocks(text)
        return self._blocked_tokens[token_id]

    def _without_blocked(
        self, completion: Completion, samples: Sequence[CompletionSample]
    ) -> Completion:
        """The end of a request of which some samples were ended here. If the others have ended by
        themselves it is done, though the engine was told not to go on."""
        cut = msgspec.structs.replace(completion, samples=tuple(samples))
        ended = [sample for sample in samples if sample.finish_reason != "abort"]
        if len(ended) < self._request.n:
            return cut
        return msgspec.structs.replace(cut, status="done", error=None)


class _HeldSample:
    """One sample.

    Two texts are looked through, since both leave: the one that it has, and that of its tokens,
    which goes on behind what is shown before it, and in which a stop string still stands. The first
    is the beginning of the second, so that a place in one is the same in the other. What it has is
    looked through again for what escapes of JSON in it stand for: those of a call are told without.

    Attributes:
        running: The engine goes on with it, as far as it has told.
        ended: Nothing more of it is to leave.
        blocked: It was ended here.
    """

    __slots__ = (
        "_by_tokens",
        "_cut_at",
        "_detokenizer",
        "_ends",
        "_escaped",
        "_held",
        "_sent_chars",
        "_sent_tokens",
        "_text",
        "_with_text",
        "ended",
        "running",
    )

    def __init__(
        self, text: Scanner, escaped: EscapedScanner, by_tokens: Scanner, words: Words
    ) -> None:
        self.running = True
        self.ended = False
        self._text = text
        self._escaped = escaped
        self._by_tokens = by_tokens
        self._detokenizer = words.detokenizer(skip_special=True)
        # For each token, how long the text is with it, and how many tokens there are up to the
        # last that made it longer: a part of a character goes with the rest of it.
        self._ends: list[int] = []
        self._with_text: list[int] = []
        self._held: deque[CompletionChunk] = deque()
        self._sent_chars = self._sent_tokens = 0
        # Characters and tokens that it has, once something was found behind them.
        self._cut_at: tuple[int, int] | None = None

    @property
    def blocked(self) -> bool:
        return self._cut_at is not None

    def add(self, chunk: CompletionChunk) -> list[CompletionChunk]:
        """Takes the next chunk, and gives those that may leave."""
        if chunk.finish_reason is not None:
            self.running = False
        if self.ended:
            return []
        self._held.append(chunk)
        self._take(chunk.text, chunk.token_ids)
        if chunk.finish_reason is not None:
            self._finish()
        return self._released()

    def end(self, sample: CompletionSample) -> list[CompletionChunk]:
        """Takes the whole of it, of which chunks may have told; gives those that were held."""
        self.running = False
        if self.ended:
            return []
        self._take(sample.text[self._text.taken :], sample.token_ids[len(self._ends) :])
        self._finish()
        return self._released()

    def cut(self, sample: CompletionSample) -> CompletionSample:
        """The sample, without what is blocked of it."""
        if self._cut_at is None:
            return sample
        chars, tokens = self._cut_at
        spans = sample.weight_versions
        return msgspec.structs.replace(
            sample,
            text=sample.text[:chars],
            token_ids=sample.token_ids[:tokens],
            logprobs=sample.logprobs[:tokens],
            top_logprobs=_first(sample.top_logprobs, tokens),
            ref_logprobs=_first(sample.ref_logprobs, tokens),
            weight_versions=tuple(span for span in spans if span[1] < tokens),
            finish_reason="content_filter",
        )

    def _take(self, text: str, token_ids: Sequence[int]) -> None:
        self._text.push(text)
        self._escaped.push(text)
        end = self._ends[-1] if self._ends else 0
        pieces = []
        for token_id in token_ids:
            piece = self._detokenizer.push((token_id,))
            pieces.append(piece)
            end += len(piece)
            before = self._with_text[-1] if self._with_text else 0
            self._ends.append(end)
            self._with_text.append(len(self._ends) if piece else before)
        self._by_tokens.push("".join(pieces))
        self._block()

    def _finish(self) -> None:
        self.ended = True
        self._text.finish()
        self._escaped.finish()
        self._by_tokens.push(self._detokenizer.finish())
        self._by_tokens.finish()
        self._block()

    def _block(self) -> None:
        scanners = (self._text, self._escaped, self._by_tokens)
        found = [each.blocked_at for each in scanners if each.blocked_at is not None]
        # What one of them has found may stand behind what another has yet to find, until the end.
        if found and self._cut_at is None and (self.ended or min(found) <= self._safe):
            self.ended = True
            self._cut_at = min(found), self._tokens_within(min(found))

    @property
    def _safe(self) -> int:
        """How much of the text can leave, whatever comes."""
        return min(self._text.safe, self._escaped.safe, self._by_tokens.safe)

    def _tokens_within(self, chars: int) -> int:
        """How many tokens have said so much of the text, and no part of what follows."""
        count = bisect_right(self._ends, chars)
        return self._with_text[count - 1] if count else 0

    def _released(self) -> list[CompletionChunk]:
        if self._cut_at is not None:
            return self._rest(*self._cut_at)
        chars = self._safe
        tokens = self._tokens_within(chars)
        released = []
        while self._held:
            chunk = self._held[0]
            sent_chars = self._sent_chars + len(chunk.text)
            sent_tokens = self._sent_tokens + len(chunk.token_ids)
            if not self.ended and (sent_chars > chars or sent_tokens > tokens):
                break
            self._sent_chars, self._sent_tokens = sent_chars, sent_tokens
            released.append(self._held.popleft())
        return released

    def _rest(self, chars: int, tokens: int) -> list[CompletionChunk]:
        """What is held of those before the cut; the last says what it was."""
        rest: list[CompletionChunk] = []
        for number, chunk in enumerate(self._held):
            left_chars = max(0, chars - self._sent_chars)
            left_tokens = max(0, tokens - self._sent_tokens)
            self._sent_chars += len(chunk.text)
            self._sent_tokens += len(chunk.token_ids)
            if left_chars or left_tokens or not number:
                rest.append(_cut_chunk(chunk, left_chars, left_tokens))
        self._held.clear()
        if rest:
            rest[-1] = msgspec.structs.replace(rest[-1], finish_reason="content_filter")
        return rest


def _cut_chunk(chunk: CompletionChunk, chars: int, tokens: int) -> CompletionChunk:
    return msgspec.structs.replace(
        chunk,
        text=chunk.text[:chars],
        token_ids=chunk.token_ids[:tokens],
        logprobs=chunk.logprobs[:tokens],
        top_logprobs=_first(chunk.top_logprobs, tokens),
        finish_reason=None,
    )


def _first(of_tokens: tuple[T, ...] | None, number: int) -> tuple[T, ...] | None:
    return None if of_tokens is None else of_tokens[:number]
