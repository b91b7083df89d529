"""New weights are put in place as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nano_inference.config import ModelError
from nano_inference.stages.executor import WeightSyncManager

from ..models import make_model

State = dict[str, Tensor]


@pytest.fixture
def module() -> nn.Module:
    """A model with tied embeddings."""
    model: nn.Module = make_model("qwen2")
    return model


def copied(module: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module: nn.Module) -> State:
    return {name: tensor + 1 for name, tensor in module.state_dict().items()}


def same(module: nn.Module, state: State) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


def test_the_version_counts_updates_in_place(module: nn.Module) -> None:
    weights, new = WeightSyncManager(module), changed(module)
    assert not weights.maybe_finish_sync()
    weights.start_sync(new)
    assert (weights.version, weights.pending_version, same(module, new)) == (0, True, False)
    assert weights.maybe_finish_sync()
    assert (weights.version, weights.pending_version, same(module, new)) == (1, False, True)
    weights.sync_blocking(changed(module))
    assert weights.version == 2


def test_one_name_of_a_tied_tensor_is_enough_and_dtypes_are_converted(module: nn.Module) -> None:
    new = {name: tensor.double() for name, tensor in changed(module).items()}
    del new["lm_head.weight"]
    WeightSyncManager(module).sync_blocking(new)
    assert torch.equal(
        module.state_dict()["lm_head.weight"].double(), new["model.embed_tokens.weight"]
    )


def drop(state: State) -> None:
    del state["model.norm.weight"]


def add(state: State) -> None:
    state["model.norm.bias"] = torch.zeros(1)


def reshape(state: State) -> None:
    state["model.norm.weight"] = torch.zeros(3)


def untie(state: State) -> None:
    state["lm_head.weight"] = state["lm_head.weight"] + 1


def mistype(state: State) -> None:
    state["model.norm.weight"] = [1.0]  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (dict.clear, "missing"),
        (drop, r"missing, such as 'model.norm.weight'"),
        (add, r"does not have, such as 'model.norm.bias'"),
        (reshape, r"'model.norm.weight' is \(3,\), and the model's is \(48,\)"),
        (mistype, r"'model.norm.weight' is list"),
        (untie, "are one tensor"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    module: nn.Module, spoil: Callable[[State], None], message: str
) -> None:
    before, new = copied(module), changed(module)
    spoil(new)
    weights = WeightSyncManager(module)
    with pytest.raises(ModelError, match=message):
        weights.sync_blocking(new)
    assert same(module, before)
    assert (weights.version, weights.pending_version) == (0, False)


def test_one_update_at_a_time(module: nn.Module) -> None:
    weights = WeightSyncManager(module)
    weights.start_sync(changed(module))
    with pytest.raises(ModelError, match="under way already"):
        weights.start_sync(changed(module))
    weights.maybe_finish_sync()
    assert weights.version == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 16, 1000):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(size).to(dtype))
        weights = WeightSyncManager(module)
        weights.prepare({"weight": torch.full((size,), torch.finfo(dtype).max, dtype=dtype)})
        for place in {0, size // 2, size - 1}:
            new = torch.randn(size).to(dtype)
            new[place] = bad
            with pytest.raises(ModelError, match="have NaN or infinity") as refused:
                weights.prepare({"weight": new})
            assert refused.value.code == "weights_not_finite"


def test_some_of_many_are_named(module: nn.Module) -> None:
    new = {name: torch.full_like(tensor, torch.nan) for name, tensor in module.state_dict().items()}
    with pytest.raises(ModelError, match=f"model.embed_tokens.weight, .* and {len(new) - 3} more"):
        WeightSyncManager(module).prepare(new)


def test_buffers_may_be_infinite() -> None:
    """As masks are."""
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(3))
    new = {"mask": torch.full((3,), -torch.inf)}
    assert set(WeightSyncManager(module).prepare(new)) == {"mask"}


def test_whether_all_is_replaced(module: nn.Module) -> None:
    weights, new = WeightSyncManager(module), copied(module)
    assert weights.covers(new)
    del new["lm_head.weight"]  # another name of the embeddings
    assert weights.covers(new)
    del new["model.norm.weight"]
    assert not weights.covers(new)
