"""The executor stage's scoring by the reference model: one pass at a time, between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ...bus.links import CONTROL
from ...bus.scoring import SampleScored, ScoreSample
from ..actor import Actor
from .reference import ReferenceModel


class Scoring:
    """The samples that wait to be scored, and who scores them."""

    def __init__(
        self,
        stage: Actor,
        reference: ReferenceModel | None,
        on_torch: Callable[..., Awaitable[Any]],
    ) -> None:
        """`on_torch` calls a function on the thread that has the models."""
        self._stage = stage
        self._reference = reference
        self._on_torch = on_torch
        # Each with the epoch in which it was asked for.
        self._asked: asyncio.Queue[tuple[int, ScoreSample]] = asyncio.Queue()

    def ask(self, sample: ScoreSample) -> None:
        """Scores a sample when its turn comes, unless a new epoch begins before that."""
        self._asked.put_nowait((self._stage.epoch, sample))

    async def score_forever(self) -> None:
        """Scores what is asked for, and tells streaming."""
        while True:
            asked = [await self._asked.get()]
            while not self._asked.empty():
                asked.append(self._asked.get_nowait())
            epoch = self._stage.epoch
            samples = [sample for asked_in, sample in asked if asked_in == epoch]
            if self._reference is None:
                await self._tell(tuple(map(_unscored, samples)), epoch)
                continue
            passes = self._reference.score(samples)
            while epoch == self._stage.epoch:
                scored = await self._on_torch(next, passes, None)
                if scored is None:
                    break
                await self._tell(scored, epoch)

    def close(self) -> None:
        """Gives up the reference model; to be called on its thread."""
        if self._reference is not None:
            self._reference.close()
            self._reference = None

    async def _tell(self, scored: tuple[SampleScored, ...], epoch: int) -> None:
        for sample in scored:
            await self._stage.send(CONTROL["streaming"], sample, epoch=epoch)


def _unscored(sample: ScoreSample) -> SampleScored:
    return SampleScored(sample.request_id, sample.entry_id, sample.sample_index, ())
