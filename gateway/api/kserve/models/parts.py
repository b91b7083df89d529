"""What comes of a request's samples, in parts that follow each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain

import msgspec

from .....bus.public import (
    Completion,
    CompletionChunk,
    CompletionSample,
    FinishReason,
    Output,
    TokenLogprob,
)
from ....serving.samples import UnsentOutputs


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What comes next of a sample: `[k]` tokens, and the text that is certain by now.

    Attributes:
        weight_versions: `[k]`, of the weights that made each token.
        tops: `[k]`, the likeliest tokens at each place; empty where none were asked for.
        finish_reason: Why it has ended; None while it goes on.
        ref_logprobs: `[k]`, by the reference model; None where there is none, or not yet.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    weight_versions: tuple[int, ...] = ()
    tops: tuple[tuple[TokenLogprob, ...], ...] = ()
    finish_reason: FinishReason | None = None
    ref_logprobs: tuple[float, ...] | None = None


def parts_of(completion: Completion, n: int) -> list[Part]:
    """The samples of a request that has ended, whole. One that never began has no tokens."""
    made = {each.sample_index: each for each in completion.samples}
    return [
        _part_of(made[index]) if index in made else Part(finish_reason="abort")
        for index in range(n)
    ]


class Parts(UnsentOutputs):
    """What has come of the samples of a request and was not sent yet: of each one part."""

    def __init__(self, n: int, take: Callable[[Sequence[Part]], Awaitable[None]]) -> None:
        super().__init__()
        self._take = take
        self._waiting: list[list[Part]] = [[] for _ in range(n)]
        self._texts = [0] * n
        self._tokens = [0] * n
        self._ended: list[FinishReason | None] = [None] * n
        self._any = False

    def put(self, output: Output) -> None:
        if isinstance(output, CompletionChunk):
            self._put(output.sample_index, _part_of_chunk(output))
            return
        for index, part in enumerate(parts_of(output, len(self._ended))):
            first, text = self._tokens[index], part.text[self._texts[index] :]
            self._put(index, msgspec.structs.replace(_from(part, first), text=text))

    def _put(self, index: int, part: Part) -> None:
        ends = part.finish_reason is not None and self._ended[index] is None
        if not (part.text or part.token_ids or ends):
            return
        self._texts[index] += len(part.text)
        self._tokens[index] += len(part.token_ids)
        self._ended[index] = self._ended[index] or part.finish_reason
        self._waiting[index].append(part)
        self._any = True
        self._came(len(part.token_ids))

    @property
    def is_due(self) -> bool:
        return self._any

    async def send_next(self) -> None:
        """Hand over a part of each sample."""
        parts = [
            msgspec.structs.replace(_joined(waiting), finish_reason=ended)
            for waiting, ended in zip(self._waiting, self._ended, strict=True)
        ]
        self._waiting = [[] for _ in self._waiting]
        self._any = False
        self._taken()
        await self._take(parts)


def _part_of(sample: CompletionSample) -> Part:
    count = len(sample.token_ids)
    spans = sample.weight_versions or ((sample.weight_version, 0),)
    ends = [*(first for _, first in spans[1:]), count]
    versions = chain.from_iterable(
        (version,) * (end - first) for (version, first), end in zip(spans, ends, strict=True)
    )
    return Part(
        text=sample.text,
        token_ids=sample.token_ids,
        logprobs=sample.logprobs,
        weight_versions=tuple(versions),
        tops=sample.top_logprobs or (),
        finish_reason=sample.finish_reason,
        ref_logprobs=sample.ref_logprobs,
    )


def _part_of_chunk(chunk: CompletionChunk) -> Part:
    return Part(
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        weight_versions=(chunk.weight_version,) * len(chunk.token_ids),
        tops=chunk.top_logprobs or (),
        finish_reason=chunk.finish_reason,
    )


def _from(part: Part, first: int) -> Part:
    """Its tokens from the given one on."""
    return Part(
        token_ids=part.token_ids[first:],
        logprobs=part.logprobs[first:],
        weight_versions=part.weight_versions[first:],
        tops=part.tops[first:],
        finish_reason=part.finish_reason,
    )


def _joined(parts: Sequence[Part]) -> Part:
    """Parts that follow each other as one."""
    if len(parts) == 1:
        return parts[0]
    return Part(
        text="".join(part.text for part in parts),
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        weight_versions=tuple(chain.from_iterable(part.weight_versions for part in parts)),
        tops=tuple(chain.from_iterable(part.tops for part in parts)),
    )
