"""Outputs held back until nothing blocked can be in them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import TypeVar

import msgspec

from ...bus.public import (
    CompletionChunk,
    CompletionSample,
    FinishReason,
    GenerateRequest,
    Output,
    TokenLogprob,
    mask_ids,
    token_columns,
)
from ..serving.tokenizer import Tokenizer
from .block_list import BlockList, Scanner, context_chars

T = TypeVar("T")
C = TypeVar("C", CompletionChunk, CompletionSample)

Tops = tuple[tuple[TokenLogprob, ...], ...] | None
"""The likeliest tokens at some places; None if they were not requested."""

_LEVELS = 2
"""Levels of JSON within JSON that are unescaped; a call's arguments are JSON in JSON."""

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rf'{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]')

# The same, or at the end the beginning of an escape or of the second half of a pair.
_GROWING = re.compile(
    r"(?P<begun>\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?"
    rf"\Z)|{_ESCAPE.pattern}"
)

_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class EscapedScanner:
    """Scans one text that grows with its JSON escapes replaced: `b\\u0061d` in the arguments of a
    call, or in an answer that is JSON, means "bad".

    It costs nothing until there is an escape. A match that begins before the first escape ends
    after it; its place is that of the escape.

    Attributes:
        taken, safe, blocked_at: As of a `Scanner`, in the text as written.
    """

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
        # Text that may begin an escape, and the length of the unescaped text before it.
        self._held = ""
        self._made = 0
        # Beginnings of pieces: (in the unescaped text, in the text as written).
        self._starts: list[tuple[int, int]] = []

    def push(self, text: str) -> None:
        """Take the next text."""
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
        """End the text."""
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
            pieces += [(text[at : found.start()], at), (_unescaped(found[0]), found.start())]
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
        safe, blocked_at = _first_blocked(self._scanners)
        if blocked_at is not None and blocked_at <= safe:
            self.blocked_at = self._written(blocked_at)
        self.safe = self.taken - len(self._held) if safe == self._made else self._written(safe)

    def _written(self, place: int) -> int:
        """Return a place of the unescaped text in the text as written."""
        made, written = self._starts[bisect_right(self._starts, place, key=itemgetter(0)) - 1]
        return written + place - made


def _first_blocked(scanners: Sequence[Scanner | EscapedScanner]) -> tuple[int, int | None]:
    """Return how much all scanners have found safe, and where the first match begins. A match after
    the safe text may not be the first: another scanner may still find an earlier one."""
    found = [each.blocked_at for each in scanners if each.blocked_at is not None]
    return min(each.safe for each in scanners), min(found, default=None)


def _unescaped(escape: str) -> str:
    if escape[1] != "u":
        return _SHORT.get(escape[1], escape[1])
    units = b"".join(bytes.fromhex(unit) for unit in escape.split("\\u")[1:])
    # Half of a pair is no character.
    return units.decode("utf-16-be", "replace")


class HeldOutputs:
    """The outputs of one request on their way to its client.

    They leave whole and, for each sample, in order, once they can't be part of a match. A sample
    with a match ends before it, text and tokens, with the finish reason "content_filter". The place
    depends on the answer alone, however the answer is cut into chunks.

    Attributes:
        blocked: Samples that were ended so.
    """

    def __init__(
        self,
        request: GenerateRequest,
        block_list: BlockList,
        tokenizer: Tokenizer,
        before: str = "",
    ) -> None:
        """`before`: text shown before each sample, in which a match may begin."""
        self.blocked = 0
        self._request = request
        self._blocked_tokens: dict[int, bool] = {}
        self._block_list = block_list
        self._tokenizer = tokenizer
        held = partial(_HeldSample, block_list, before[-context_chars(block_list) :], tokenizer)
        self._samples: defaultdict[int, _HeldSample] = defaultdict(held)

    @property
    def complete(self) -> bool:
        """Whether all samples have ended here, though the engine goes on with some."""
        samples = self._samples.values()
        ended = sum(sample.ended for sample in samples)
        return ended == self._request.n and any(sample.running for sample in samples)

    def put(self, output: Output) -> list[Output]:
        """Take the next output, and return those that may leave now."""
        output = self._without_blocked_tokens(output)
        if isinstance(output, CompletionChunk):
            return [*self._released(self._samples[output.sample_index], output)]
        released: list[Output] = []
        samples: list[CompletionSample] = []
        for sample in output.samples:
            held = self._samples[sample.sample_index]
            released += self._released(held, sample)
            samples.append(held.cut(sample))
        if self.blocked:
            output = msgspec.structs.replace(output, samples=tuple(samples))
            ended = [sample for sample in samples if sample.finish_reason != "abort"]
            if len(ended) == self._request.n:
                # Complete, though the engine was stopped.
                output = msgspec.structs.replace(output, status="done", error=None)
        return [*released, output]

    def _released(
        self, held: _HeldSample, new: CompletionChunk | CompletionSample
    ) -> list[CompletionChunk]:
        before = held.blocked
        released = held.add(new) if isinstance(new, CompletionChunk) else held.end(new)
        self.blocked += held.blocked and not before
        return released

    def _without_blocked_tokens(self, output: Output) -> Output:
        """Remove blocked tokens from the alternatives."""
        sampling = self._request.sampling
        if not (sampling.logprobs or sampling.prompt_logprobs or sampling.return_sampling_mask):
            return output
        prompt_tops = self._allowed(output.prompt_top_logprobs)
        if isinstance(output, CompletionChunk):
            tops = self._allowed(output.top_logprobs)
            return msgspec.structs.replace(
                output,
                top_logprobs=tops,
                prompt_top_logprobs=prompt_tops,
                sampling_masks=self._allowed_masks(output.sampling_masks),
            )
        samples = tuple(
            msgspec.structs.replace(
                each,
                top_logprobs=self._allowed(each.top_logprobs),
                sampling_masks=self._allowed_masks(each.sampling_masks),
            )
            for each in output.samples
        )
        return msgspec.structs.replace(output, samples=samples, prompt_top_logprobs=prompt_tops)

    def _allowed(self, tops: Tops) -> Tops:
        if tops is None:
            return None
        return tuple(tuple(each for each in top if not self._blocks(each.token_id)) for top in tops)

    def _allowed_masks(self, masks: tuple[bytes, ...] | None) -> tuple[bytes, ...] | None:
        """Empty the masks with a blocked token: without it a mask would be of another support."""
        if masks is None:
            return None
        return tuple(b"" if any(map(self._blocks, mask_ids(mask))) else mask for mask in masks)

    def _blocks(self, token_id: int) -> bool:
        if token_id not in self._blocked_tokens:
            text = self._tokenizer.text((token_id,), skip_special=True)
            self._blocked_tokens[token_id] = self._block_list.blocks(text)
        return self._blocked_tokens[token_id]


class _HeldSample:
    """One sample.

    Two texts are scanned, since both leave: the sample's text, and the text of its tokens, which
    continues the text shown before it and still contains a stop string. The first is the beginning
    of the second, so that a place in one is the same in the other. The sample's text is scanned
    again with its JSON escapes replaced, since a call's arguments leave without escapes.

    Attributes:
        running: The engine goes on with it.
        ended: Nothing more of it may leave.
    """

    def __init__(self, block_list: BlockList, before: str, tokenizer: Tokenizer) -> None:
        self.running = True
        self.ended = False
        self._text = Scanner(block_list)
        self._escaped = EscapedScanner(block_list)
        self._by_tokens = Scanner(block_list, before)
        self._detokenizer = tokenizer.detokenizer(skip_special=True)
        # For each token, the length of the text with it, and the number of tokens up to the last
        # one that added text: a part of a character belongs to the rest of it.
        self._ends: list[int] = []
        self._with_text: list[int] = []
        self._held: deque[CompletionChunk] = deque()
        self._sent_chars = self._sent_tokens = 0
        # Characters and tokens before a match, once one was found.
        self._cut_at: tuple[int, int] | None = None

    @property
    def blocked(self) -> bool:
        """Whether the sample was ended here."""
        return self._cut_at is not None

    def add(self, chunk: CompletionChunk) -> list[CompletionChunk]:
        """Take the next chunk, and return those that may leave."""
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
        """Take the whole sample, partly known from chunks; return the chunks that were held."""
        self.running = False
        if self.ended:
            return []
        self._take(sample.text[self._text.taken :], sample.token_ids[len(self._ends) :])
        self._finish()
        return self._released()

    def cut(self, sample: CompletionSample) -> CompletionSample:
        """Return the sample before its match."""
        if self._cut_at is None:
            return sample
        tokens = self._cut_at[1]
        return msgspec.structs.replace(
            _cut(sample, *self._cut_at, "content_filter"),
            ref_logprobs=_first(sample.ref_logprobs, tokens),
            weight_versions=tuple(span for span in sample.weight_versions if span[1] < tokens),
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
        self._safe, blocked_at = _first_blocked((self._text, self._escaped, self._by_tokens))
        if blocked_at is None or self._cut_at is not None:
            return
        if self.ended or blocked_at <= self._safe:
            self.ended = True
            self._cut_at = blocked_at, self._tokens_within(blocked_at)

    def _tokens_within(self, chars: int) -> int:
        """Return the number of tokens whose text is within so many characters."""
        count = bisect_right(self._ends, chars)
        return self._with_text[count - 1] if count else 0

    def _released(self) -> list[CompletionChunk]:
        if self._cut_at is not None:
            return self._rest(*self._cut_at)
        tokens = self._tokens_within(self._safe)
        released = []
        while self._held:
            chunk = self._held[0]
            sent_chars = self._sent_chars + len(chunk.text)
            sent_tokens = self._sent_tokens + len(chunk.token_ids)
            if not self.ended and (sent_chars > self._safe or sent_tokens > tokens):
                break
            self._sent_chars, self._sent_tokens = sent_chars, sent_tokens
            released.append(self._held.popleft())
        return released

    def _rest(self, chars: int, tokens: int) -> list[CompletionChunk]:
        """Return the held chunks before the match; the last one has the finish reason."""
        rest: list[CompletionChunk] = []
        for number, chunk in enumerate(self._held):
            left_chars = max(0, chars - self._sent_chars)
            left_tokens = max(0, tokens - self._sent_tokens)
            self._sent_chars += len(chunk.text)
            self._sent_tokens += len(chunk.token_ids)
            if left_chars or left_tokens or not number:
                rest.append(_cut(chunk, left_chars, left_tokens, None))
        self._held.clear()
        if rest:
            rest[-1] = msgspec.structs.replace(rest[-1], finish_reason="content_filter")
        return rest


def _cut(of: C, chars: int, tokens: int, reason: FinishReason | None) -> C:
    """Return the beginning of a chunk or a sample."""
    return msgspec.structs.replace(
        of,
        text=of.text[:chars],
        token_ids=of.token_ids[:tokens],
        logprobs=of.logprobs[:tokens],
        top_logprobs=_first(of.top_logprobs, tokens),
        finish_reason=reason,
        **token_columns(of, 0, tokens),
    )


def _first(of_tokens: tuple[T, ...] | None, number: int) -> tuple[T, ...] | None:
    return None if of_tokens is None else of_tokens[:number]
