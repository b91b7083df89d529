"""Products of several layers over weights that lie side by side, as on CUDA, in PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch.nn import functional as F

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.fast_modules import joined
from nano_inference.stages.executor.runner.fast_modules.calls import (
    GATED,
    PROJECTIONS,
    join_weights,
    pack,
)

from .....soaking import in_soak
from ...models import make_model
from ...plans import PROMPT, Generation, Planner, step_plan
from ...recorder import PlainKernels, PlainPagedAttention, core_with_kernels
from ...refusals import needs_kernels

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=4)


def joined_model(name: str, **changes: Any) -> Any:
    """A model as it is loaded on CUDA."""
    module = make_model(name, head_dim=32, **changes)
    join_weights(module)
    return replace(wrap_model(module, 64), is_shared=False)


def groups(module: Any) -> list[Any]:
    found = [pack(part, names) for part in module.modules() for names in (PROJECTIONS, GATED)]
    return [each for each in found if each]


def run(core: ExecutorCore) -> list[list[int]]:
    generations = [
        Generation(i, PROMPT[: 3 + i], SamplingParams(temperature=0.0, max_tokens=6))
        for i in range(3)
    ]
    core.reset()
    Planner(core).run(generations)
    return [each.token_ids for each in generations]


def core_of(monkeypatch: pytest.MonkeyPatch, model: Any) -> ExecutorCore:
    needs_kernels(torch.float32)
    return core_with_kernels(monkeypatch, CONFIG, model, PlainKernels, PlainPagedAttention)


def test_joined_weights_are_the_same_numbers_in_the_same_memory() -> None:
    module = make_model("qwen2", head_dim=32)
    before = copy.deepcopy(module.state_dict())
    names = {id(each): name for name, each in module.named_parameters()}
    join_weights(module)
    assert {id(each): name for name, each in module.named_parameters()} == names
    for name, tensor in module.state_dict().items():
        assert tensor.equal(before[name])
        assert tensor.is_contiguous()
    assert len(groups(module)) == 2 * len(module.model.layers)
    assert all(map(joined.lie_together, groups(module)))
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in module.parameters()
    }
    assert sum(each.nbytes() for each in storages.values()) == sum(
        each.nbytes for each in module.parameters()
    )
    assert not any(map(joined.lay_together, groups(module)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_joined_product_is_that_of_its_layers(dtype: torch.dtype) -> None:
    module = make_model("qwen2", head_dim=32).to(dtype)
    join_weights(module)
    layer = module.model.layers[0]
    rows = torch.randn(5, module.config.hidden_size).to(dtype)
    with torch.no_grad():
        found = joined.JoinedLinear(pack(layer.self_attn, PROJECTIONS))(rows)
        wanted = torch.cat([getattr(layer.self_attn, name)(rows) for name in PROJECTIONS], 1)
        torch.testing.assert_close(found, wanted)
        gated = joined.JoinedLinear(pack(layer.mlp, GATED), lambda gates, ups: F.silu(gates) * ups)
        wanted = F.silu(layer.mlp.gate_proj(rows)) * layer.mlp.up_proj(rows)
        torch.testing.assert_close(gated(rows), wanted)
        layer.mlp.gate_proj.weight.data = layer.mlp.gate_proj.weight.clone()
        torch.testing.assert_close(gated(rows), wanted)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", *map(in_soak, ("llama", "gemma2"))])
def test_steps_with_joined_products_have_transformers_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []
    multiply = joined.JoinedLinear.__call__

    def counted(self: Any, rows: torch.Tensor) -> torch.Tensor:
        products.append(len(rows))
        return multiply(self, rows)

    monkeypatch.setattr(joined.JoinedLinear, "__call__", counted)
    wanted = run(ExecutorCore(CONFIG, model=wrap_model(make_model(name, head_dim=32), 64)))
    core = core_of(monkeypatch, joined_model(name))
    products.clear()
    assert run(core) == wanted
    assert products
    # As with adapters, which wrap single layers.
    fast: Any = core.runner.fast_modules
    msgspec.structs.force_setattr(core.runner, "active", partial(fast.active, alone=True))
    products.clear()
    assert run(core) == wanted
    assert not products


def test_new_weights_and_released_memory_reach_joined_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = core_of(monkeypatch, joined_model("qwen2"))
    before, other = run(core), make_model("qwen2", seed=1, head_dim=32)
    wanted = run(ExecutorCore(CONFIG, model=wrap_model(copy.deepcopy(other), 64)))
    assert wanted != before
    weights, memory = core.part(WeightChanges).manager, core.part(MemoryRelease)
    weights.sync_blocking(other.state_dict())
    assert run(core) == wanted
    memory.memory.begin_release(("weights",))
    core.execute(step_plan(release=("weights",)))
    assert not any(map(joined.lie_together, groups(core.model.module)))
    memory.resume(("weights",))
    assert all(map(joined.lie_together, groups(core.model.module)))
    weights.sync_blocking(other.state_dict())
    assert run(core) == wanted


def test_layers_that_differ_or_have_codes_are_not_joined() -> None:
    module = make_model("qwen2", head_dim=32)
    attention = module.model.layers[0].self_attn
    attention.k_proj.bias = None
    assert not joined.lay_together(pack(attention, PROJECTIONS))
    coded = [each._replace(codes=object()) for each in pack(module.model.layers[0].mlp, GATED)]
    assert not joined.lay_together(coded)
