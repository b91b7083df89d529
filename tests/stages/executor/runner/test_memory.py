"""Released memory is freed, and no step runs without it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from nano_inference.config import EngineConfig, SamplingParams, WeightsError
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.system_memory import LargePages, why_no_huge_pages

from ....resident import asks_for_huge_pages, needs_proc, resident_bytes
from ....soaking import in_soak
from ..models import make_model
from ..plans import Generation, Planner, new_sequence, step_plan
from ..recorder import core_as_on_cuda
from ..refusals import needs_kernels, refused

BOTH = ("weights", "kv_cache")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
MIB = 1 << 20


def make_core(module: Any, *, graphs: bool = False, **settings: Any) -> ExecutorCore:
    config = EngineConfig(max_model_len=64, max_batch_size=8, block_size=4, **settings)
    # As a loaded model: addresses of weights are not checked in each step.
    model = replace(wrap_model(module, 64), is_shared=False)
    if graphs:
        return core_as_on_cuda(config, model, graphs=True)
    return ExecutorCore(config, model=model)


@pytest.fixture
def core() -> ExecutorCore:
    return make_core(make_model("qwen2"))


def generate(core: ExecutorCore) -> list[list[int]]:
    generations = [Generation(seed, [3, 1, 4, 1, 5, seed], GREEDY) for seed in range(1, 4)]
    Planner(core).run(generations)
    core.reset()
    return [generation.token_ids for generation in generations]


def release(core: ExecutorCore, *tags: str) -> None:
    core.part(MemoryRelease).memory.begin_release(tags)
    core.execute(step_plan(release=tags))


def state_of(core: ExecutorCore) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in core.model.module.state_dict().items()}


HOW = ("plain", "bfloat16", "float32", "graphs")
PAIRS = [*zip(HOW, ("gpt_oss", "gemma3_text", "qwen2", "gpt_oss"), strict=True)]


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *(
            pair if pair in PAIRS else in_soak(*pair)
            for pair in product(HOW, ("qwen2", "gpt_oss", "gemma3_text"))
        ),
        ("deterministic", "qwen2"),
    ],
)
def test_afterwards_all_is_as_before(name: str, how: str) -> None:
    """Whatever has kept an address: kernels, their tables for whole decoders, recorded steps."""
    model = make_model(name, head_dim=32)
    kernels = how in ("bfloat16", "float32")
    if kernels:
        dtype = getattr(torch, how)
        needs_kernels(dtype)
        model = model.to(dtype)
    core = make_core(
        model,
        graphs=how == "graphs",
        deterministic=how == "deterministic",
        kernels="auto" if kernels else "off",
    )
    before, state = generate(core), state_of(core)
    kept: list[Any] = []
    for tags in (("kv_cache",), ("weights",), BOTH):
        release(core, *tags)
        # Otherwise the allocator might return the same addresses.
        kept += [torch.full_like(tensor, torch.nan) for tensor in state.values()]
        kept += [torch.full(keys.shape, torch.nan, dtype=keys.dtype) for keys in core.cache.keys]
        core.part(MemoryRelease).resume(BOTH)
        kept += [tensor.clone() for tensor in state.values()]
        if "weights" in tags:
            core.part(WeightChanges).manager.sync_blocking(state)
        assert generate(core) == before
    core.execute(step_plan(release=BOTH))  # planned twice: it comes late, and does nothing
    assert (core.state.steps.graphs is not None) == (how == "graphs")
    if core.state.steps.graphs is not None:
        assert sum(core.state.steps.graphs.replays.values()) > 5
    if kernels:
        assert core.off.get("kernels", "") == ""


@needs_proc
@pytest.mark.parametrize("tag", ["kv_cache", in_soak("weights")])
def test_the_process_holds_less(tag: str) -> None:
    long, wide = {"max_position_embeddings": 4096}, {"vocab_size": 40_000, "hidden_size": 512}
    model = make_model("qwen2", **(wide if tag == "weights" else long))
    config = EngineConfig(max_model_len=4096, max_batch_size=256, kv_cache_bytes=96 * MIB)
    core = ExecutorCore(config, model=wrap_model(model, 4096))
    tensors = [*core.cache.keys, *core.cache.values]
    core.cache.clear()  # which touches all pages
    if tag == "weights":
        tensors = core.part(WeightChanges).manager.parameters()
    size = sum(tensor.nbytes for tensor in tensors)
    assert size > 70 * MIB
    before = resident_bytes()
    release(core, tag)
    assert before - resident_bytes() > 0.9 * size
    core.part(MemoryRelease).resume((tag,))
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == size


def test_no_step_runs_while_memory_is_released(core: ExecutorCore) -> None:
    state = state_of(core)
    new = new_sequence(1, [1, 2, 3], [0], GREEDY)
    step = step_plan(new=(new,), rows={1: 3})
    for tag in BOTH:
        release(core, tag)
        assert core.capacity().lacks == (tag,)
        with pytest.raises(ValueError, match="lacks"):
            core.execute(step)
        core.reset()
        core.part(MemoryRelease).resume((tag,))
        if tag == "weights":
            assert core.capacity().lacks == ("weights",), "they hold nothing"
            with pytest.raises(ValueError, match="lacks"):
                core.execute(step)
            core.reset()
            core.part(WeightChanges).manager.sync_blocking(state)
        assert core.capacity().lacks == ()
        assert core.execute(step).token_ids
        core.reset()


def test_steps_planned_before_a_release_still_run(core: ExecutorCore) -> None:
    core.part(MemoryRelease).memory.begin_release(BOTH)
    assert core.capacity().lacks == BOTH
    new = new_sequence(1, [1, 2, 3], [0], GREEDY)
    assert core.execute(step_plan(new=(new,), rows={1: 3})).token_ids
    core.execute(step_plan(release=BOTH))
    assert not core.part(MemoryRelease).memory.runs


def test_a_cancelled_release_keeps_all_memory(core: ExecutorCore) -> None:
    """A late plan of it has no effect."""
    before = generate(core)
    core.part(MemoryRelease).memory.begin_release(BOTH)
    core.part(MemoryRelease).resume(BOTH)
    core.execute(step_plan(release=BOTH))
    assert core.capacity().lacks == ()
    assert generate(core) == before
    assert core.part(WeightChanges).manager.sync_blocking(state_of(core)) == 1


def test_repeated_releases_and_resumes_are_idempotent(core: ExecutorCore) -> None:
    before, state = generate(core), state_of(core)
    core.part(MemoryRelease).resume(BOTH)
    for _ in range(2):
        release(core, *BOTH)
        assert not core.part(MemoryRelease).memory.pending
    for _ in range(2):
        core.part(MemoryRelease).resume(BOTH)
    core.part(WeightChanges).manager.sync_blocking(state)
    assert generate(core) == before


def test_only_all_weights_replace_those_that_were_released(core: ExecutorCore) -> None:
    state = state_of(core)
    part = {"model.norm.weight": state["model.norm.weight"]}
    release(core, "weights")
    with refused("memory_released"):
        core.part(WeightChanges).manager.start_sync(state)
    core.part(MemoryRelease).resume(BOTH)
    with refused("weights_incomplete"):
        core.part(WeightChanges).manager.start_sync(part, partial=True)
    assert core.part(WeightChanges).manager.version == 0
    assert core.part(WeightChanges).manager.sync_blocking(state, partial=True) == 1, (
        "it has them all"
    )
    assert core.part(WeightChanges).manager.sync_blocking(part, partial=True) == 2


def test_weights_that_wait_to_be_put_in_place_are_not_lost(core: ExecutorCore) -> None:
    core.part(WeightChanges).manager.start_sync(state_of(core))
    with refused("weights_busy"):
        core.part(MemoryRelease).memory.begin_release(BOTH)
    assert core.capacity().lacks == ()
    core.part(MemoryRelease).memory.begin_release(("kv_cache",))
    core.part(WeightChanges).manager.maybe_finish_sync()


def test_without_enough_memory_it_stays_released(
    core: ExecutorCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer still holds the memory."""
    before, state = generate(core), state_of(core)
    release(core, *BOTH)
    zeros, given = LargePages.zeros, 0

    def scarce(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal given
        given += 1
        if given > len(core.part(WeightChanges).manager.parameters()) + 2:
            raise RuntimeError("can't allocate memory\nat some place")
        return zeros(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LargePages, "zeros", scarce)
        with pytest.raises(WeightsError, match="can't allocate memory; free some") as refused:
            core.part(MemoryRelease).resume(BOTH)
    assert refused.value.code == "out_of_memory"
    assert core.part(MemoryRelease).memory.released == {"kv_cache"}
    core.part(WeightChanges).manager.sync_blocking(state)
    core.part(MemoryRelease).resume(BOTH)
    assert generate(core) == before


def test_an_unknown_tag_is_refused(core: ExecutorCore) -> None:
    for call in (
        core.part(MemoryRelease).memory.begin_release,
        core.part(MemoryRelease).resume,
    ):
        with pytest.raises(WeightsError, match="no memory 'cuda'"):
            call(("kv_cache", "cuda"))
    assert core.capacity().lacks == ()


@needs_proc
@pytest.mark.skipif(bool(why_no_huge_pages()), reason="this system has no large pages")
@pytest.mark.parametrize("setting", ["auto", "off"])
def test_large_pages_survive_a_release(setting: str) -> None:
    settings: Any = {"huge_pages": setting, "block_size": 4}
    model = wrap_model(make_model("qwen2"), 64)
    core = ExecutorCore(EngineConfig(**settings), model=model, num_blocks=1 << 13)
    tensors = (*core.cache.keys, *core.cache.values)
    assert {asks_for_huge_pages(tensor) for tensor in tensors} == {setting == "auto"}
    release(core, "kv_cache")
    core.part(MemoryRelease).resume(["kv_cache"])
    assert {asks_for_huge_pages(tensor) for tensor in tensors} == {setting == "auto"}
