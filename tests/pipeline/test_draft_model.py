"""A pipeline whose draft model is asked for everything says what it says without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nano_inference import Pipeline, WeightsError
from nano_inference.config import BusError
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.driver.speculation.costs import StepCosts

from . import short_model
from .conftest import MakeConfig
from .test_life import break_once
from .test_speculation import all_told

SHORT_MODEL = True
LIMIT_S = 120
DRAFTING = {
    "engine__speculation": "auto",
    "engine__draft_sources": ["ngram"],
    "engine__draft_model_path": str(short_model.folder()),
    "engine__max_draft_tokens": 6,
}


@contextmanager
def expected_interruption() -> Iterator[None]:
    try:
        yield
    except (BusError, WeightsError) as error:
        if error.code not in ("no_answer", "weights_interrupted"):
            raise


async def test_memory_failures_and_cancelled_requests(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step takes as long with many rows as with few, so whatever is likely enough is verified.
    alike = StepCosts((1, 64), (0.5, 0.5))
    monkeypatch.setattr(ExecutorCore, "_measure_costs", lambda core: alike)
    exact: dict[str, Any] = {"engine__deterministic": True, "engine__max_model_len": 256}
    async with asyncio.timeout(LIMIT_S), Pipeline(make_config(**exact)) as pipeline:
        expected = await all_told(pipeline)
    break_once(monkeypatch, ExecutorCore, "execute", after=25)
    turns = {"fairness__max_timeslice_tokens": 16, "pipeline__restart_backoff_s": 0.01}
    few = {"engine__max_batch_size": 5, "engine__kv_cache_bytes": 1 << 19}
    config = make_config(**exact, **DRAFTING, **turns, **few)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        client = pipeline.client

        async def meanwhile() -> None:
            for number in range(4):
                request = {
                    "request_id": f"c{number}",
                    "prompt": "Once " * 9,
                    "sampling": {"max_tokens": 99},
                }
                other = asyncio.create_task(pipeline.complete(request))
                await asyncio.sleep(0.05)
                await client.cancel(f"c{number}")
                await client.pause(in_flight="retract")
                # The executor that fails has all its memory again when it has started anew.
                with expected_interruption():
                    await client.release_memory(["kv_cache"])
                with expected_interruption():
                    await client.resume_memory(["kv_cache"])
                await client.resume()
                assert (await other).status in ("cancelled", "done")

        found = await all_told(pipeline, meanwhile)
    for (one, told), (other, wanted) in zip(found, expected, strict=True):
        assert told == wanted
        for sample, same in zip(one.samples, other.samples, strict=True):
            assert sample.logprobs == same.logprobs
    usages = [completion.usage for completion, _ in found]
    assert sum(usage.accepted_prediction_tokens for usage in usages) > 100
