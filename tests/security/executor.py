"""An executor that runs, told what anybody on the bus may tell it."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from structlog.testing import capture_logs
from structlog.typing import EventDict

from nano_inference.bus import Outcome
from nano_inference.bus.links import CONTROL
from nano_inference.bus.weights import TensorMeta
from nano_inference.config import load_config
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.executor.changes.shell import StagedChanges

LIMIT_S = 60.0

NORM = TensorMeta("model.norm.weight", "float32", (128,))
REQUEST = {"prompt_token_ids": [20, 21], "sampling": {"temperature": 0, "max_tokens": 4}}


class Executor:
    """The executor of a pipeline that runs, as somebody on the bus sees it."""

    def __init__(self, pipeline: Pipeline, tokens: tuple[int, ...], lines: list[EventDict]) -> None:
        self.pipeline = pipeline
        self.lines = lines
        self._tokens = tokens
        self._stage = pipeline._actors["executor"]
        self._answered: Counter[str] = Counter()
        replies = pipeline.bus.replies
        answer = replies.answer

        async def count(operation_id: str, outcome: Outcome) -> None:
            self._answered[operation_id] += 1
            await answer(operation_id, outcome)

        replies.answer = count  # type: ignore[method-assign]

    @property
    def updates(self) -> StagedChanges:
        updates = vars(self._stage)["_changes"]
        assert isinstance(updates, StagedChanges)
        return updates

    async def tell(self, operation: Any) -> str:
        """Sends it; returns the id under which it is answered."""
        name = uuid.uuid4().hex
        sender = self.pipeline.bus.sender(CONTROL["executor"], "test")
        await sender.send(operation, operation_id=name)
        return name

    async def answer(self, name: str) -> Outcome:
        (outcome,) = await self.pipeline.bus.replies.outcomes(name, 1, LIMIT_S)
        return outcome

    async def ask(self, operation: Any) -> Outcome:
        return await self.answer(await self.tell(operation))

    async def is_as_it_was(self) -> bool:
        """It has not failed, has answered everybody once, and serves with the weights it had."""
        return await self.is_as_it_was_but_for([]) and not self.updates.core.fetching

    async def is_as_it_was_but_for(self, waiting: list[str]) -> bool:
        """The same, where these wait for their answers."""
        completion = await self.pipeline.complete(REQUEST)
        return (
            self.pipeline._actors["executor"] is self._stage
            and list(self.updates.core.unanswered) == waiting
            and set(self._answered.values()) <= {1}
            and completion.samples[0].token_ids == self._tokens
            and completion.samples[0].weight_version == 0
        )


@asynccontextmanager
async def running() -> AsyncIterator[Executor]:
    """In a pipeline of its own, in memory."""
    overrides = {"engine.dtype": "float32", "engine.kv_cache_bytes": 1 << 24}
    async with Pipeline(load_config(env={}, overrides=overrides)) as pipeline:
        completion = await pipeline.complete(REQUEST)
        with capture_logs() as lines:
            yield Executor(pipeline, completion.samples[0].token_ids, lines)
