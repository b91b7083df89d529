"""Weights that can't be written: the pipeline keeps those before, or says that it has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from nano_inference import Pipeline, WeightsError
from nano_inference.stages.executor.runner.weights import WeightSyncManager

from .. import oracle
from . import reference, short_model
from .conftest import MakeConfig, both_buses
from .test_life import until
from .test_weights import DTYPE, begun, check_stamps, greedy, versions_of

SHORT_MODEL = True
LIMIT_S = 120


@pytest.fixture(scope="module")
def loaded() -> dict[str, Tensor]:
    """The short model's weights."""
    return dict(reference.model(short_model.folder()).state_dict())


@pytest.fixture
async def running(make_config: MakeConfig) -> AsyncIterator[Pipeline]:
    config = make_config(pipeline__restart_backoff_s=0.01, engine__dtype=DTYPE)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        yield pipeline


def free_once_taken(patch: pytest.MonkeyPatch) -> None:
    """New weights lose their storage while they wait for the plan that puts them in place."""
    original = WeightSyncManager.start_sync

    def start_sync(self: WeightSyncManager, *args: Any, **options: Any) -> int:
        version = original(self, *args, **options)
        assert self._pending is not None
        for tensor in self._pending[0].values():
            tensor.untyped_storage().resize_(0)
        return version

    patch.setattr(WeightSyncManager, "start_sync", start_sync)


def fail_midway(patch: pytest.MonkeyPatch) -> None:
    original = WeightSyncManager._write

    def write(self: WeightSyncManager, new_weights: Mapping[str, Tensor]) -> None:
        original(self, dict(list(new_weights.items())[:5]))
        raise RuntimeError("the device is gone")

    patch.setattr(WeightSyncManager, "_write", write)


async def test_weights_that_were_freed_while_they_waited_change_nothing(
    running: Pipeline, loaded: dict[str, Tensor]
) -> None:
    client = running.client
    await client.update_weights(oracle.announcing(loaded, 1))
    request = await begun(client, greedy(0, 300))
    executor = running._actors["executor"]
    with pytest.MonkeyPatch.context() as patch:
        free_once_taken(patch)
        with pytest.raises(WeightsError, match="changed before they were in place") as refused:
            await client.update_weights(oracle.announcing(loaded, 2))
    assert refused.value.code == "weights_refused"
    assert await client.weight_version() == 1
    await client.update_weights(oracle.announcing(loaded, 2))
    assert check_stamps(await request) == 2
    assert running._actors["executor"] is executor, "it was not started anew"


@both_buses
async def test_lost_weights_generate_nothing_until_all_have_come(
    running: Pipeline, loaded: dict[str, Tensor]
) -> None:
    client = running.client
    await client.update_weights(oracle.announcing(loaded, 1))
    request = await begun(client, greedy(0, 300))
    executor = running._actors["executor"]
    with pytest.MonkeyPatch.context() as patch:
        fail_midway(patch)
        with pytest.raises(WeightsError, match="the device is gone") as lost:
            await client.update_weights(oracle.announcing(loaded, 2))
    assert lost.value.code == "weights_lost"
    await until(lambda: running._actors["batching"].load().get("waiting") == 1)
    assert executor.load()["lacks"] == "weights"
    assert "weights_lost" in await client.trouble()
    new = oracle.announcing(loaded, 2)
    with pytest.raises(WeightsError) as refused:
        await client.update_weights({"model.norm.weight": new["model.norm.weight"]}, partial=True)
    assert refused.value.code == "weights_incomplete"
    assert not request.done()
    assert await client.update_weights(new) == 2
    completion = await request
    assert check_stamps(completion) == 2
    assert set(versions_of(completion)) == {1, 2}
    assert "weights_lost" not in executor.load()
    assert running._actors["executor"] is executor, "it was not started anew"
