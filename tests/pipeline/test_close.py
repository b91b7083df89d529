"""What is closed gives its memory back at once, and not when Python's garbage collector runs."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from nano_inference import EngineConfig, InferenceEngine, Pipeline
from nano_inference.config import load_config
from nano_inference.stages.executor.core import ExecutorCore

from .test_life import GOOD, LIMIT_S, LONG, break_once, whole_streams


class Kept:
    """The tensors of all executors made so far that somebody still holds."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[Tensor]] = []
        self.when_made: list[int] = []

    def __len__(self) -> int:
        return sum(ref() is not None for ref in self._tensors)

    def watch(self, core: ExecutorCore) -> None:
        tensors = (*core.cache.keys, *core.cache.values, *core.model.module.parameters())
        self._tensors += map(weakref.ref, tensors)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    """With the garbage collector off."""
    found = Kept()
    load = ExecutorCore.__init__

    def watched(self: ExecutorCore, *args: Any, **kwargs: Any) -> None:
        found.when_made.append(len(found))
        load(self, *args, **kwargs)
        found.watch(self)

    monkeypatch.setattr(ExecutorCore, "__init__", watched)
    gc.collect()
    gc.disable()
    try:
        yield found
    finally:
        gc.enable()


# Where there are kernels for bfloat16, they are woven into the model.
@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(dtype="float32"),
        EngineConfig(dtype="bfloat16"),
        EngineConfig(dtype="float32", deterministic=True),
    ],
    ids=["float32", "bfloat16", "deterministic"],
)
def test_an_engine(kept: Kept, config: EngineConfig) -> None:
    with InferenceEngine(config, reference=config) as engine:
        engine.generate(["98 + 25 ="])
        assert len(kept)
    assert not len(kept)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_pipeline_with_requests_under_way(kept: Kept, dtype: str) -> None:
    config = load_config(env={}, overrides={"engine.dtype": dtype})
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        await pipeline.complete(GOOD)
        endless = pipeline.submit({**LONG, "stream": True})
        await anext(endless)
        assert len(kept)
    assert not len(kept)
    # Nobody is there any more who could be told that it is not wanted.
    async with asyncio.timeout(LIMIT_S):
        await endless.aclose()


async def test_a_stage_that_failed_before_its_successor_loads(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        env={}, overrides={"engine.dtype": "float32", "pipeline.restart_backoff_s": 0.01}
    )
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        break_once(monkeypatch, ExecutorCore, "execute", after=20)
        await whole_streams(pipeline)
    assert kept.when_made == [0, 0]
    assert not len(kept)
