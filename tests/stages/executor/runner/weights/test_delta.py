"""A delta changes exactly the bits that it names, of exactly the weights that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor, nn

from nano_inference import WeightDelta
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.runner.shards import NewShard
from nano_inference.stages.executor.runner.weights.checks import DELTA_HEAD
from nano_inference.stages.executor.runner.weights.delta import DeltaHead
from nano_inference.stages.executor.runner.weights.received_delta import ReceivedDelta

from ...models import make_model
from ...refusals import refused

State = dict[str, Tensor]

EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def module() -> nn.Module:
    """A model with tied embeddings."""
    model: nn.Module = make_model("qwen2").to(torch.bfloat16)
    return model


def copied(module: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def some_changed(state: State, *, every: int = 200) -> State:
    """One element in `every` is one bit larger."""
    new = {name: tensor.clone() for name, tensor in state.items() if name != "lm_head.weight"}
    for tensor in new.values():
        tensor.view(-1).view(torch.int16)[::every] += 1
    return new


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def received(payload: Any, manager: WeightSyncManager) -> dict[str, Any]:
    return dict(manager.prepare(ReceivedDelta(payload, manager).new_weights()))


@pytest.mark.parametrize("every", [1, 3, 200, 10**9])
def test_new_weights_have_the_bits_of_a_whole_update(module: nn.Module, every: int) -> None:
    """Dense, half sparse, sparse, and next to none."""
    manager, old = WeightSyncManager(module), copied(module)
    new = some_changed(old, every=every)
    delta = WeightDelta.between(old, new, base_version=0)
    weights = received(delta, manager)
    assert manager.sync_blocking(weights, partial=True, base=0) == 1
    assert all(same_bits(module.state_dict()[name], new[name]) for name in new)
    if every > 30:
        assert all(isinstance(each, NewShard) for each in weights.values())
        assert delta.num_bytes < sum(each.nbytes for each in new.values()) / 20


def test_bits_are_compared_and_not_values() -> None:
    old = {"a": torch.tensor([0.0, 1.0, float("nan")]), "b": torch.tensor([True, False])}
    new = {"a": torch.tensor([-0.0, 1.0, float("nan")]), "b": torch.tensor([True, True])}
    delta = WeightDelta.between(old, new, base_version=7)
    assert (delta.elements, delta.head.base_version) == (2, 7)
    assert all(same_bits(each, new[name]) for name, each in delta.apply(old).items())


def test_a_delta_without_changes_is_an_update_that_checks_its_base(module: nn.Module) -> None:
    manager, old = WeightSyncManager(module), copied(module)
    delta = WeightDelta.between(old, old, base_version=0)
    assert (delta.elements, len(delta.head.tensors)) == (0, 1)
    assert manager.sync_blocking(received(delta, manager), partial=True, base=0) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8])
def test_any_dtype_and_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    old = {"a": torch.arange(5000).to(dtype), "n": torch.tensor(3).to(dtype)}
    new = {"a": old["a"].clone(), "n": torch.tensor(4).to(dtype)}
    new["a"][[5, 6, 4999]] += 1
    WeightDelta.between(old, new, base_version=1).save(tmp_path / "delta.safetensors")
    delta = WeightDelta.load(tmp_path / "delta.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["delta.safetensors"]
    assert all(torch.equal(each, new[name]) for name, each in delta.apply(old).items())


def changed_head(payload: State, change: Callable[[DeltaHead], DeltaHead]) -> State:
    head = msgspec.msgpack.decode(payload[DELTA_HEAD].numpy().tobytes(), type=DeltaHead)
    data = bytearray(msgspec.msgpack.encode(change(head)))
    return {**payload, DELTA_HEAD: torch.frombuffer(data, dtype=torch.uint8)}


def with_elements(payload: State, gaps: list[int], width: int = 1) -> State:
    """The query's elements at these distances, all with the change 1."""
    kind = {1: np.uint8, 8: np.uint64}[width]
    raw = np.array(gaps, kind)[:, None].view(np.uint8).T.tobytes() + bytes([1] * len(gaps))
    frame = zstandard.compress(raw + bytes(len(gaps)))

    def change(head: DeltaHead) -> DeltaHead:
        (entry,) = [each for each in head.tensors if each.meta.name == QUERY]
        entry = msgspec.structs.replace(entry, changed=len(gaps), gap_bytes=width)
        return msgspec.structs.replace(head, tensors=(entry,))

    only = {name: payload[name] for name in (DELTA_HEAD, QUERY)}
    only[QUERY] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    return changed_head(only, change)


def of_version(head: DeltaHead) -> DeltaHead:
    return msgspec.structs.replace(head, base_version=3)


def twice(head: DeltaHead) -> DeltaHead:
    return msgspec.structs.replace(head, tensors=(*head.tensors, head.tensors[0]))


def of_other_result(head: DeltaHead) -> DeltaHead:
    first, *others = head.tensors
    first = msgspec.structs.replace(first, after=bytes(16))
    return msgspec.structs.replace(head, tensors=(first, *others))


DAMAGE: dict[str, tuple[Callable[[State], State], str]] = {
    "another version": (lambda payload: changed_head(payload, of_version), "weights_base"),
    "a cut tensor": (lambda payload: {**payload, QUERY: payload[QUERY][:-3]}, "weights_delta"),
    "more after a tensor": (
        lambda payload: {**payload, QUERY: torch.cat([payload[QUERY], torch.zeros(1).byte()])},
        "weights_delta",
    ),
    "a missing tensor": (
        lambda payload: {name: payload[name] for name in payload if name != QUERY},
        "weights_delta",
    ),
    "a cut head": (
        lambda payload: {**payload, DELTA_HEAD: payload[DELTA_HEAD][:-1]},
        "weights_delta",
    ),
    "a tensor twice": (lambda payload: changed_head(payload, twice), "weights_delta"),
    "another result": (lambda payload: changed_head(payload, of_other_result), "weights_delta"),
    "an element twice": (lambda payload: with_elements(payload, [5, 0, 2]), "weights_delta"),
    "before the first": (lambda payload: with_elements(payload, [0, 2]), "weights_delta"),
    "after the last": (lambda payload: with_elements(payload, [1 << 40], 8), "weights_delta"),
    "a sum that overflows": (
        lambda payload: with_elements(payload, [9, (1 << 64) - 4], 8),
        "weights_delta",
    ),
}


@pytest.mark.parametrize(("damage", "code"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_delta_is_refused_and_nothing_changes(
    module: nn.Module, damage: Callable[[State], State], code: str
) -> None:
    manager, old = WeightSyncManager(module), copied(module)
    delta = WeightDelta.between(old, some_changed(old), base_version=0)
    with refused(code):
        received(damage(dict(delta)), manager)
    assert all(same_bits(module.state_dict()[name], old[name]) for name in old)
    assert manager.version == 0


def test_other_weights_of_the_same_version_are_refused(module: nn.Module) -> None:
    manager, old = WeightSyncManager(module), copied(module)
    delta = WeightDelta.between(old, some_changed(old), base_version=0)
    module.state_dict()[QUERY][0, 0] += 1
    with refused("weights_base", "q_proj.* checksum"):
        received(delta, manager)


def test_weights_that_changed_after_the_check_are_refused(module: nn.Module) -> None:
    manager, old = WeightSyncManager(module), copied(module)
    weights = received(WeightDelta.between(old, some_changed(old), base_version=0), manager)
    manager.sync_blocking(old)
    with refused("weights_base", "version 0, and 1 is in place"):
        manager.start_sync(weights, partial=True, base=0)


def test_a_delta_that_makes_nan_is_refused(module: nn.Module) -> None:
    manager, old = WeightSyncManager(module), copied(module)
    new = some_changed(old)
    new[QUERY][0, 0] = float("nan")
    with refused("weights_not_finite", "q_proj"):
        received(WeightDelta.between(old, new, base_version=0), manager)


def test_another_dtype_and_unknown_names_are_refused(module: nn.Module) -> None:
    manager, old = WeightSyncManager(module), copied(module)
    wide = {QUERY: old[QUERY].float()}
    delta = WeightDelta.between(wide, {QUERY: wide[QUERY] + 1}, base_version=0)
    with refused("weights_base", "bfloat16.*float32"):
        received(delta, manager)
    other = {"experts.0.up.weight": torch.ones(2)}
    delta = WeightDelta.between(other, {"experts.0.up.weight": torch.zeros(2)}, base_version=0)
    with refused("weights_refused", "no tensor of the model"):
        received(delta, manager)
