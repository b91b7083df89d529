"""Parts of an update are put in place when all of them are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
from torch import Tensor

from nano_inference.bus.weights import FolderWeights, LocalWeights, StagedWeights
from nano_inference.config import WeightsError
from nano_inference.pipeline.pipeline import Pipeline

from ..oracle import announcing, token_of
from .builders import refused
from .conftest import both_buses

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
    with refused(WeightsError, "weights_incomplete"):
        await client.update_weights(StagedWeights("u", 2), partial=True)
    assert (await tokens(pipeline), await client.weight_version()) == (before, 0)


async def test_a_state_dict_is_no_part(pipeline: Pipeline) -> None:
    with pytest.raises(WeightsError, match="all tensors at once"):
        await pipeline.client.stage_weights("u", LocalWeights("x"))
