"""A number of one kind is never taken for one of the other, on any interface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nano_inference import EngineConfig, InferenceEngine
from nano_inference.bus.weights import FolderWeights, source_of
from nano_inference.config import WeightsError
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.runner.weights.transports import (
    SharedWeights,
    WeightGroups,
    fetch,
)

from ..errors import raises
from ..stages.executor.models import make_model

State = dict[str, Tensor]
Prepare = Callable[[WeightSyncManager, State], object]

NORM = "model.norm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
LIMIT_S = 60.0


def from_folder(weights: WeightSyncManager, state: State, folder: Path) -> object:
    save_file(state, folder / "model.safetensors")
    source = FolderWeights(str(folder))
    return weights.prepare(dict(fetch(source, WeightGroups(), LIMIT_S)), checkpoint=True)


def from_shared_memory(weights: WeightSyncManager, state: State) -> object:
    with SharedWeights(state) as shared:
        return weights.prepare(fetch(shared.source, WeightGroups(), LIMIT_S))


def from_the_process(weights: WeightSyncManager, state: State) -> object:
    with source_of(state) as source:
        return weights.prepare(fetch(source, WeightGroups(), LIMIT_S))


@pytest.fixture(params=["whole", "prepared", "folder", "shared memory", "process"])
def interface(request: pytest.FixtureRequest, tmp_path: Path) -> Prepare:
    return {
        "whole": lambda weights, state: weights.sync_blocking(state),
        "prepared": lambda weights, state: weights.prepare(state),
        "folder": lambda weights, state: from_folder(weights, state, tmp_path),
        "shared memory": from_shared_memory,
        "process": from_the_process,
    }[request.param]


def checkpoint(name: str, folder: Path) -> State:
    make_model(name, seed=1).save_pretrained(folder)
    found = fetch(FolderWeights(str(folder)), WeightGroups(), LIMIT_S)
    (folder / "model.safetensors").unlink()
    return dict(found)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize(
    ("spoilt", "named"),
    [(NORM, NORM), (EXPERT, "model.layers.0.mlp.experts.gate_up_proj")],
    ids=["by itself", "fused"],
)
def test_integers_are_no_parameters(
    interface: Prepare, dtype: torch.dtype, spoilt: str, named: str, tmp_path: Path
) -> None:
    state = checkpoint("mixtral", tmp_path)
    state[spoilt] = state[spoilt].to(dtype)
    module = make_model("mixtral")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    weights = WeightSyncManager(module)
    with raises("weights_refused", "of the same kind", WeightsError) as refused:
        interface(weights, state)
    assert named in refused.value.message
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.fixture
def counting() -> nn.Module:
    """A module that counts, beside a parameter."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2))
    module.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    return module


def test_values_that_are_no_integers_do_not_count(counting: nn.Module) -> None:
    weights = WeightSyncManager(counting)
    for check in (weights.prepare, weights.start_sync):
        with pytest.raises(WeightsError, match=r"'count' is torch\.float32"):
            check({"weight": torch.ones(2), "count": torch.ones(2)})
    ours = {"weight": torch.ones(2), "count": torch.ones(2, dtype=torch.int32)}
    assert weights.prepare(ours)["count"].dtype == torch.int64


def test_widths_may_differ(interface: Prepare, tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn)
    state = {
        name: each.to(dtypes[index % 3])
        for index, (name, each) in enumerate(checkpoint("llama", tmp_path).items())
    }
    interface(WeightSyncManager(make_model("llama")), state)


def test_the_engine_takes_no_integers() -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(InferenceEngine(EngineConfig(kv_cache_bytes=1 << 24)))
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        state[NORM] = state[NORM].to(torch.int32)
        for blocking in (True, False):
            with pytest.raises(WeightsError, match=rf"'{NORM}' is torch.int32"):
                engine.update_weights(state, blocking=blocking)
        assert engine.get_weight_version() == 0
