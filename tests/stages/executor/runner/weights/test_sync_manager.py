"""New weights are put in place as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nano_inference.config import ModelError, WeightsError
from nano_inference.stages.executor import WeightSyncManager

from ...models import make_model
from ...refusals import refused

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


NORM = "model.norm.weight"  # the last tensor of a model, so that the others would be written


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (dict.clear, "missing"),
        (lambda state: state.pop(NORM), r"'model.norm.weight'; .*, or partial=True"),
        (
            lambda state: state.update({"model.norm.bias": torch.zeros(1)}),
            r"does not have, such as 'model.norm.bias'",
        ),
        (
            lambda state: state.update({NORM: torch.zeros(3)}),
            r"'model.norm.weight' is \(3,\), and the model's is \(48,\)",
        ),
        (lambda state: state.update({NORM: [1.0]}), r"'model.norm.weight' is list"),
        (lambda state: state.update({NORM: state[NORM].numpy()}), "is a numpy array; pass a torch"),
        (
            lambda state: state.update({f"module.{NORM}": state.pop(NORM)}),
            "1 tensor that the model does not have, .*; remove the prefix 'module.' of the names",
        ),
        (
            lambda state: state.update({"lm_head.weight": state["lm_head.weight"] + 1}),
            "are one tensor",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    module: nn.Module, spoil: Callable[[State], object], message: str
) -> None:
    before, new = copied(module), changed(module)
    spoil(new)
    weights = WeightSyncManager(module)
    with pytest.raises(ModelError, match=message):
        weights.sync_blocking(new)
    assert same(module, before)
    assert (weights.version, weights.pending_version) == (0, False)


class Wrapper(Tensor):
    """A tensor subclass like DTensor and quantised weights: other tensors behind a shape."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Wrapper:
        made: Wrapper = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, *rest: Any) -> Any:
        raise RuntimeError(f"{function} of a wrapper")


def resized(tensor: Tensor, num_bytes: int) -> Tensor:
    """A tensor of the same shape, over a storage of this size in bytes."""
    view = tensor.clone()
    view.untyped_storage().resize_(num_bytes)
    return view


def quantised(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "on the meta device": lambda tensor: tensor.to("meta"),
    "layout is sparse_coo": Tensor.to_sparse,
    "layout is nested": lambda tensor: torch.nested.nested_tensor([tensor]),
    "dtype is qint8": quantised,
    "dtype is complex64": lambda tensor: tensor.to(torch.complex64),
    "has 0 bytes": lambda tensor: resized(tensor, 0),
    "are needed": lambda tensor: resized(tensor, tensor.nbytes - 1),
    "is a Wrapper": Wrapper,
    "this UninitializedParameter has no storage": lambda _: nn.UninitializedParameter(),
    "this Tensor has no storage": lambda tensor: torch._efficientzerotensor(tensor.shape),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:.*quantize_per_tensor")
@pytest.mark.parametrize("message", UNREADABLE)
def test_tensors_without_storage_change_nothing(module: nn.Module, message: str) -> None:
    before, new = copied(module), changed(module)
    new[NORM] = UNREADABLE[message](new.pop(NORM))
    weights = WeightSyncManager(module)
    for take in (weights.sync_blocking, weights.start_sync, weights.prepare):
        with pytest.raises(WeightsError, match=message) as refused:
            take(new)
        assert NORM in refused.value.message
        assert refused.value.code == "weights_refused"
    assert same(module, before)
    assert (weights.version, weights.pending_version, weights.empty) == (0, 0, False)


SPOIL: list[Callable[[Tensor], object]] = [
    lambda tensor: tensor.untyped_storage().resize_(0),
    lambda tensor: tensor.resize_(1),  # would be broadcast
    lambda tensor: tensor.fill_(torch.nan),
]


@pytest.mark.parametrize("spoil", SPOIL)
def test_weights_that_change_while_they_wait_are_dropped_as_a_whole(
    module: nn.Module, spoil: Callable[[Tensor], object]
) -> None:
    before, new = copied(module), changed(module)
    weights = WeightSyncManager(module)
    weights.start_sync(new)
    spoil(new[NORM])
    with pytest.raises(WeightsError, match="changed before they were in place"):
        weights.maybe_finish_sync()
    assert same(module, before)
    assert (weights.version, weights.pending_version, weights.empty) == (0, 0, False)
    weights.sync_blocking(changed(module))
    assert weights.version == 1


def fail_to_write(patch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
    """Let this number of writes succeed, and fail the next."""
    copy, written = Tensor.copy_, []

    def fails(self: Tensor, *rest: Any) -> Tensor:
        if len(written) >= after:
            raise error
        written.append(self)
        return copy(self, *rest)

    patch.setattr(Tensor, "copy_", fails)


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), KeyboardInterrupt()])
def test_a_write_that_fails_midway_leaves_no_weights(
    module: nn.Module, error: BaseException
) -> None:
    weights, new = WeightSyncManager(module), changed(module)
    with pytest.MonkeyPatch.context() as patch:
        fail_to_write(patch, 5, error)
        with pytest.raises((WeightsError, KeyboardInterrupt)) as failed:
            weights.sync_blocking(new)
    if isinstance(failed.value, WeightsError):
        assert failed.value.code == "weights_lost"
        assert "the device is gone" in failed.value.message
    assert weights.empty
    assert weights.version == 0
    with refused("weights_incomplete", "an update failed midway"):
        weights.sync_blocking({NORM: new[NORM]}, partial=True)
    weights.sync_blocking(new)
    assert (weights.version, weights.empty, weights.lost) == (1, False, "")
    assert same(module, new)


def test_layers_may_change_places(module: nn.Module) -> None:
    """New tensors may be the module's own memory, which the first write would change."""
    own = dict(module.state_dict())
    before = copied(module)
    one, two, *_ = (name for name in own if name.endswith("mlp.up_proj.weight"))
    own[one], own[two] = own[two], own[one]
    WeightSyncManager(module).sync_blocking(own)
    assert torch.equal(module.state_dict()[one], before[two])
    assert torch.equal(module.state_dict()[two], before[one])


def test_one_update_at_a_time(module: nn.Module) -> None:
    weights = WeightSyncManager(module)
    weights.start_sync(changed(module))
    with pytest.raises(ModelError, match="under way already"):
        weights.start_sync(changed(module))
    weights.maybe_finish_sync()
    assert weights.version == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_found_anywhere(dtype: torch.dtype, bad: float) -> None:
    for size in (1, 7, 16, 1000):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(size).to(dtype))
        weights = WeightSyncManager(module)
        weights.prepare({"weight": torch.full((size,), torch.finfo(dtype).max, dtype=dtype)})
        for place in {0, size // 2, size - 1}:
            new = torch.randn(size).to(dtype)
            new[place] = bad
            with refused("weights_not_finite", "have NaN or infinity"):
                weights.prepare({"weight": new})


def test_some_of_many_are_named(module: nn.Module) -> None:
    new = {name: torch.full_like(tensor, torch.nan) for name, tensor in module.state_dict().items()}
    with pytest.raises(ModelError, match=f"model.embed_tokens.weight, .* and {len(new) - 3} more"):
        WeightSyncManager(module).prepare(new)


def test_buffers_may_be_infinite() -> None:
    """Masks are infinite."""
    module = nn.Module()
    module.register_buffer("mask", torch.zeros(3))
    new = {"mask": torch.full((3,), -torch.inf)}
    assert set(WeightSyncManager(module).prepare(new)) == {"mask"}


def test_covers(module: nn.Module) -> None:
    weights, new = WeightSyncManager(module), copied(module)
    assert weights.covers(new)
    del new["lm_head.weight"]  # another name of the embeddings
    assert weights.covers(new)
    del new["model.norm.weight"]
    assert not weights.covers(new)
