"""New weights are put in place as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nano_inference.config import ModelError
from nano_inference.stages.executor import WeightSyncManager

from .models import make_model

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
