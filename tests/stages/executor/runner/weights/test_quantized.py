"""New weights of quantised models: codes are made of whole tensors as they come."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nano_inference import WeightDelta
from nano_inference.bus.control import UpdateWeights
from nano_inference.bus.weights import FolderWeights, source_of
from nano_inference.config import EngineConfig, WeightsError
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.linear import requantizing
from nano_inference.stages.executor.runner.linear.quantized import (
    QuantizedLinear,
    ReorderedLinear,
)
from nano_inference.stages.executor.runner.linear.requantizing import CodesBox
from nano_inference.stages.executor.runner.linear.rounding import Rounding, round_weight
from nano_inference.stages.executor.runner.model import wrap_model
from nano_inference.stages.executor.runner.weights.parts import PartsTaker
from nano_inference.stages.executor.runner.weights.received_delta import ReceivedDelta
from nano_inference.stages.executor.runner.weights.sync_manager import WeightSyncManager
from nano_inference.stages.executor.runner.weights.transports.shared_memory import SharedWeights

from ...models import make_model
from ...refusals import refused
from .codes import quantized

State = dict[str, Tensor]
DOWN = "model.layers.0.mlp.down_proj.weight"


def loaded(
    name: str = "qwen2", seed: int = 0, bits: int = 4, fixed: bool = False, **changes: Any
) -> tuple[Any, State]:
    """Return a quantised model, and the weights that it was made of, in float32."""
    plain = make_model(name, seed=seed, **changes)
    state = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    return wrap_model(quantized(plain.bfloat16(), bits, fixed=fixed), 64), state


def manager_of(model: Any) -> WeightSyncManager:
    return WeightSyncManager(model.module, shards=model.shards)


def same(model: Any, other: Any) -> bool:
    pairs = zip(model.module.state_dict().items(), other.module.state_dict().items(), strict=True)
    return all(left[0] == right[0] and torch.equal(left[1], right[1]) for left, right in pairs)


@pytest.mark.parametrize(("name", "bits"), [("qwen2", 8), ("phi3", 4)])
def test_codes_are_those_of_a_model_loaded_with_the_new_weights(name: str, bits: int) -> None:
    """Also after release and resumption, with tied and fused tensors, in another dtype."""
    model, _ = loaded(name, bits=bits)
    wanted, new = loaded(name, seed=1, bits=bits)
    assert not same(model, wanted)
    manager = manager_of(model)
    assert manager.sync_blocking(new) == 1
    assert same(model, wanted)
    back, old = loaded(name, bits=bits)
    for tensor in manager.parameters():
        tensor.data = torch.zeros_like(tensor)
    manager.sync_blocking(manager.prepare(old))
    assert same(model, back)


def sent(kind: str, state: State, folder: Path, changes: WeightChanges) -> None:
    """Send weights to the executor as a trainer does, by the names of a checkpoint."""
    update = partial(UpdateWeights, timeout_s=10.0)
    if kind == "folder":
        save_file(
            {key: each.contiguous() for key, each in state.items()}, folder / "model.safetensors"
        )
        fetched = changes.fetch(update(FolderWeights(str(folder))))
    elif kind == "memory":
        with SharedWeights(state, bucket_bytes=1 << 12) as shared:
            fetched = changes.fetch(update(shared.source))
    else:
        with source_of(state) as source:
            fetched = changes.fetch(update(source))
    assert fetched.covers
    changes.manager.sync_blocking(fetched.tensors)


@pytest.mark.parametrize("kind", ["folder", "memory", "state dict"])
def test_each_transport_rounds_tensors_as_they_come(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a layer's whole tensors are held at a time, and the switch rounds none."""
    model, _ = loaded("qwen3_moe")
    wanted, new = loaded("qwen3_moe", seed=1)
    config = EngineConfig(kv_cache_bytes=1 << 20, deterministic=False)
    core = ExecutorCore(config, model=model)
    changes = core.part(WeightChanges)
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def take(self: PartsTaker, name: str, tensor: Tensor) -> None:
        alive.append(sum(each() is not None for each in held))
        held.append(weakref.ref(tensor))
        taken(self, name, tensor)

    def write(self: WeightSyncManager) -> bool:
        monkeypatch.setattr(CodesBox, "_packed", None)
        return written(self)

    taken, written = PartsTaker.take, WeightSyncManager.maybe_finish_sync
    monkeypatch.setattr(PartsTaker, "take", take)
    monkeypatch.setattr(WeightSyncManager, "maybe_finish_sync", write)
    of_checkpoint = unfused(new)
    assert len(of_checkpoint) > len(new)
    sent(kind, of_checkpoint, tmp_path, changes)
    assert same(model, wanted)
    a_layer = max(len([key for key in of_checkpoint if f"layers.{n}." in key]) for n in range(3))
    assert kind == "state dict" or 0 < max(alive) <= a_layer
    core.close()


def unfused(state: State) -> State:
    """Return the tensors of a checkpoint of Qwen3-MoE: each expert's are separate there."""
    found: State = {}
    for key, each in state.items():
        if key.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(each):
                prefix = key.replace("gate_up_proj", f"{number}.")
                gate, up = expert.chunk(2)
                found |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif key.endswith("experts.down_proj"):
            for number, expert in enumerate(each):
                found[key.replace("down_proj", f"{number}.down_proj.weight")] = expert
        else:
            found[key] = each
    return found


def test_a_partial_update_changes_one_layer() -> None:
    model, old = loaded()
    _, new = loaded(seed=1)
    wanted = wrap_model(quantized(with_state({**old, DOWN: new[DOWN]})), 64)
    manager = manager_of(model)
    staged = manager.prepare({DOWN: new[DOWN]})
    assert manager.start_sync(staged, partial=True) == 1
    assert manager.maybe_finish_sync()
    assert same(model, wanted)


def with_state(state: State) -> Any:
    module = make_model("qwen2")
    module.load_state_dict(state)
    return module.bfloat16()


def not_a_number(state: State) -> State:
    state[DOWN][3, 5] = torch.nan
    return state


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (not_a_number, "weights_not_finite"),
        (lambda state: {**state, DOWN: state[DOWN][1:]}, "weights_refused"),
        (lambda state: {**state, "x": state[DOWN]}, "weights_refused"),
        (lambda state: {key: state[key] for key in state if key != DOWN}, "weights_refused"),
        (lambda state: {**state, "lm_head.weight": state["lm_head.weight"] + 1}, "weights_refused"),
    ],
)
def test_a_refused_update_changes_nothing(change: Callable[[State], State], code: str) -> None:
    model, state = loaded()
    before, _ = loaded()
    manager = manager_of(model)
    for staged in (change(state), None):
        with pytest.raises(WeightsError) as refused:
            manager.start_sync(manager.prepare(change(state)) if staged is None else staged)
        assert refused.value.code == code
    assert same(model, before)
    assert manager.version == 0


@pytest.mark.parametrize("partial_update", [True, False])
def test_codes_of_a_checkpoint_are_not_replaced(partial_update: bool) -> None:
    """Tensors beside them are."""
    model, _ = loaded(fixed=True)
    before, state = loaded(fixed=True)
    manager = manager_of(model)
    new = {DOWN: state[DOWN] + 1} if partial_update else state
    for prepare in (manager.prepare, dict):
        with pytest.raises(WeightsError, match="serve the unquantised checkpoint") as refused:
            manager.start_sync(prepare(new), partial=partial_update)
        assert refused.value.code == "weights_quantized"
    assert same(model, before)
    manager.sync_blocking({"model.norm.weight": torch.ones(48)}, partial=True)
    assert not same(model, before)


def test_weights_are_read_in_the_order_of_the_whole_layer() -> None:
    """Of inputs that are sorted by their groups, as in GPTQ's act-order."""
    weight = torch.randn(70, 32, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    inner = QuantizedLinear(*round_weight(weight[:, order], Rounding(8, 8)), dtype=torch.float32)
    (box,) = ReorderedLinear(inner, order).boxes("weight")
    assert box.fixed
    torch.testing.assert_close(box.read(), weight, atol=0.02, rtol=0)


def test_outputs_are_rounded_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks send them, and in places that begin within a panel."""
    model, _ = loaded(intermediate_size=200)
    wanted, new = loaded(seed=1, intermediate_size=200)
    monkeypatch.setattr(requantizing, "_ROUNDED", 64 * 48)
    for name, tensor in new.items():
        for start in range(0, tensor.shape[0], 70):
            model.shards.shards[name].write_rows(tensor[start : start + 70], start)
    assert same(model, wanted)
    gate = "model.layers.0.mlp.gate_proj.weight"
    (box,) = model.shards.shards[gate].boxes()
    part = msgspec.structs.replace(box, place=(slice(20, 150), slice(0, 48)), first=20)
    assert torch.equal(part.read(), box.read()[20:150])
    other, _ = loaded(intermediate_size=200)
    (own,) = other.shards.shards[gate].boxes()
    old = own.read()
    part = msgspec.structs.replace(own, place=part.place, first=20)
    part.put(part.hold(new[gate]))
    assert torch.equal(own.read(), torch.cat([old[:20], box.read()[20:150], old[150:]]))


def test_a_delta_of_codes_needs_what_they_were_made_of() -> None:
    """Tensors beside the codes, and codes beside the unquantised model, take one."""
    model, _ = loaded(bits=8)
    manager = manager_of(model)
    plain = make_model("qwen2", seed=0).bfloat16()
    old = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    for name, names_it in ((DOWN, True), ("model.norm.weight", False)):
        new = {name: old[name] * 2}
        delta = WeightDelta.between(old, new, base_version=manager.version)
        with refused("weights_quantized", "down_proj") if names_it else nullcontext():
            weights = ReceivedDelta(delta, manager).new_weights()
            base = manager.version
            manager.sync_blocking(manager.prepare(weights), partial=True, base=base)
    model.shards.others.append(plain)
    plain.model.norm.weight.data.mul_(2)
    delta = WeightDelta.between(old, {DOWN: old[DOWN] * 2}, base_version=1)
    weights = ReceivedDelta(delta, manager).new_weights()
    manager.sync_blocking(manager.prepare(weights), partial=True, base=1)
    wanted, _ = loaded(bits=8)
    manager_of(wanted).sync_blocking(dict(plain.state_dict()))
    assert torch.equal(plain.state_dict()[DOWN], old[DOWN] * 2)
    assert same(model, wanted)
