"""Weights that are lost midway, and weights in parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from torch import Tensor

from nano_inference import Pipeline, WeightsError
from nano_inference.bus.weights import FolderWeights, LocalWeights, StagedWeights
from nano_inference.stages.executor.runner.weights import WeightSyncManager

from .. import oracle
from ..oracle import announcing, token_of
from .builders import begun, check_stamps, greedy, raises_code, until, versions_of
from .conftest import both_buses

SHORT_MODEL = True


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


async def test_freed_pending_weights_change_nothing(
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
    with raises_code(WeightsError, "weights_incomplete"):
        await client.update_weights({"model.norm.weight": new["model.norm.weight"]}, partial=True)
    assert not request.done()
    assert await client.update_weights(new) == 2
    completion = await request
    assert check_stamps(completion) == 2
    assert set(versions_of(completion)) == {1, 2}
    assert "weights_lost" not in executor.load()
    assert running._actors["executor"] is executor, "it was not started anew"


# --- parts -----------------------------------------------------------------------------------


REQUEST = {"prompt_token_ids": [20, 21], "sampling": {"temperature": 0, "max_tokens": 2}}


@pytest.fixture
def halves(pipeline: Pipeline, tmp_path: Path) -> tuple[FolderWeights, FolderWeights]:
    """Weights that spell version 1, in two folders."""
    file = pipeline.config.engine.model_folder / "model.safetensors"
    new = announcing(safetensors.torch.load_file(file), 1)
    names = sorted(new)
    return saved(new, names[::2], tmp_path / "a"), saved(new, names[1::2], tmp_path / "b")


def saved(tensors: Mapping[str, Tensor], names: list[str], folder: Path) -> FolderWeights:
    folder.mkdir()
    chosen = {name: tensors[name] for name in names}
    safetensors.torch.save_file(chosen, folder / "x.safetensors")
    return FolderWeights(str(folder))


async def tokens(pipeline: Pipeline) -> tuple[int, ...]:
    return (await pipeline.complete(REQUEST)).samples[0].token_ids


@both_buses
async def test_all_parts_make_a_version(
    pipeline: Pipeline, halves: tuple[FolderWeights, FolderWeights]
) -> None:
    client, before = pipeline.client, await tokens(pipeline)
    for half in halves:
        await client.stage_weights("u", half)
        assert (await tokens(pipeline), await client.weight_version()) == (before, 0)
    assert await client.update_weights(StagedWeights("u", 2), partial=True) == 1
    assert await tokens(pipeline) == (token_of(1),) * 2


async def test_with_a_part_missing_nothing_changes(
    pipeline: Pipeline, halves: tuple[FolderWeights, FolderWeights], tmp_path: Path
) -> None:
    client, before = pipeline.client, await tokens(pipeline)
    await client.stage_weights("u", halves[0])
    with pytest.raises(WeightsError):
        await client.stage_weights("u", FolderWeights(str(tmp_path / "none")))
    await client.stage_weights("u", halves[1])
    with raises_code(WeightsError, "weights_incomplete"):
        await client.update_weights(StagedWeights("u", 2), partial=True)
    assert (await tokens(pipeline), await client.weight_version()) == (before, 0)


async def test_a_state_dict_is_no_part(pipeline: Pipeline) -> None:
    with pytest.raises(WeightsError, match="all tensors at once"):
        await pipeline.client.stage_weights("u", LocalWeights("x"))
