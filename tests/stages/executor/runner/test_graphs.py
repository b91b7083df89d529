"""Recorded decode steps: the same tokens as the ordinary path, whatever the batch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from nano_inference.bus.parts.columns import SUPPORT_LOGPROBS
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model
from nano_inference.stages.executor.driver.choose import TokenChooser
from nano_inference.stages.executor.driver.sampled import TokenFeed, placeholders
from nano_inference.stages.executor.parts.graphs import Graphs
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.graphs import DecodeStep, batch_buckets, pack_step

from ....sections import columns_of
from ....soaking import in_soak
from ..models import ARCHITECTURES, make_model
from ..plans import GREEDY, PROMPT, SAMPLED, Generation, Planner, new_sequence, step_plan
from ..recorder import OperationRecorder, core_as_on_cuda

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=12)


def make_core(model: LoadedModel, *, graphs: bool, **settings: Any) -> ExecutorCore:
    """A core that runs as on CUDA, with recorded decode steps or without."""
    settings = {"max_batch_size": 12, **settings}
    config = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, **settings)
    return core_as_on_cuda(config, model, graphs=graphs)


def replays(core: ExecutorCore) -> int:
    assert core.state.steps.graphs is not None
    return sum(core.state.steps.graphs.replays.values())


def mixed(count: int, **changes: Any) -> list[Generation]:
    """Greedy and sampled sequences of different lengths that come one after the other."""
    return [
        Generation(
            seed,
            PROMPT[: 2 + seed % 7],
            SamplingParams(temperature=(0.0, 1.0, 0.6)[seed % 3], max_tokens=8 + seed, **changes),
            arrives=seed,
            seed=seed,
        )
        for seed in range(1, count + 1)
    ]


def run(core: ExecutorCore, generations: list[Generation]) -> list[Generation]:
    Planner(core, chunk=4, shuffle=1).run(generations)
    return generations


def assert_same(found: list[Generation], expected: list[Generation]) -> None:
    for ours, other in zip(found, expected, strict=True):
        assert ours.token_ids == other.token_ids
        assert ours.reason == other.reason
        assert ours.logprobs == pytest.approx(other.logprobs, abs=1e-4)


# --- buckets and buffers ----------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 7, 8, 12, 16, 100, 256, 1000])
def test_buckets_end_at_the_largest_batch_and_waste_little(most: int) -> None:
    buckets = batch_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == most
    for count in range(1, most + 1):
        size = min(size for size in buckets if size >= count)
        assert size - count <= max(size // 3, 7)
    assert len(buckets) <= 11 + most // 32


def test_padding_names_only_the_padding_block(model: LoadedModel) -> None:
    core = make_core(model, graphs=False)
    bits = np.array([0.5, 0.25]).view(np.int64)
    step = DecodeStep(
        input_ids=np.array([7, -4]),
        positions=np.array([5, 8]),
        tables=np.array([[9, 3, 0], [6, 2, 8]]),
        table_rows=np.array([1, 3]),
        sampling=(bits,) * 5,
    )
    packed = pack_step(step, 4, 5, core.cache, padding_row=28)
    padding = core.cache.padding_block
    ids, positions, slots, contexts, rows, *sampling = packed[:40].reshape(10, 4)
    tables = packed[40:].reshape(4, 5)
    assert ids.tolist() == [7, -4, 0, 0]
    assert positions.tolist() == [5, 8, 0, 0]
    assert slots.tolist() == [3 * 4 + 1, 8 * 4, padding * 4, padding * 4]
    assert contexts.tolist() == [6, 9, 1, 1]
    assert rows.tolist() == [1, 3, 28, 28]
    for column in sampling:
        assert column.view(np.float64).tolist() == [0.5, 0.25, 0, 0]
    assert tables[:2, :3].tolist() == step.tables.tolist()
    assert tables[2:, 0].tolist() == [padding, padding]
    assert tables.max() == padding


def test_a_feed_resolves_placeholders() -> None:
    feed = TokenFeed(4, torch.device("cpu"))
    feed.put(torch.tensor([2, 0, feed.padding_row]), torch.tensor([31, 45, 99]))
    ids = torch.from_numpy(np.array([5, *placeholders(np.array([0, 2])), 0]))
    assert feed.resolve(ids).tolist() == [5, 45, 31, 0]
    feed.enlarge(9)
    feed.put(torch.tensor([feed.padding_row, 8]), torch.tensor([98, 12]))
    ids = torch.from_numpy(placeholders(np.array([0, 2, 8, 4])))
    assert feed.resolve(ids).tolist() == [45, 31, 12, 0]


# --- replaying --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [name if name in ("qwen2", "gemma2", "gpt_oss") else in_soak(name) for name in ARCHITECTURES],
)
def test_replayed_steps_equal_ordinary_steps(name: str) -> None:
    model = wrap_model(make_model(name), 64)
    core = make_core(model, graphs=True)
    expected = run(ExecutorCore(CONFIG, model=model), mixed(7))
    assert_same(run(core, mixed(7)), expected)
    assert replays(core) > 10
    assert core.state.steps.graphs is not None
    assert sum(count > 0 for count in core.state.steps.graphs.replays.values()) >= 3


@pytest.mark.parametrize("recorded", [True, False])
def test_choices_within_limits_never_reach_the_host_s_chooser(
    recorded: bool, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "top_p": 0.9}, {}]

    def several() -> list[Generation]:
        return [
            Generation(
                seed,
                PROMPT[: 2 + seed % 7],
                SamplingParams(temperature=seed % 5 / 2, max_tokens=6 + seed, **limited[seed % 4]),  # type: ignore[arg-type]
                arrives=seed,
                seed=seed,
            )
            for seed in range(1, 9)
        ]

    generations = several(), several()
    planner = Planner(ExecutorCore(CONFIG, model=model), chunk=4)
    planner.run(generations[0])
    core = make_core(model, graphs=False)
    recorder, steps = OperationRecorder(), len(batch_buckets(12))

    def capture(step: Any) -> Any:
        if recorder.recorded == steps and not recorded:
            raise RuntimeError("no sorting here")
        return recorder(step)

    core.use(Graphs(core.state, capture))
    assert ("no sorting here" in core.off.get("graphs", "")) != recorded

    def chosen(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host was waited for")

    monkeypatch.setattr(TokenChooser, "choose", chosen)
    ours = Planner(core, chunk=4)
    ours.run(generations[1])
    assert_same(generations[1], generations[0])
    assert replays(core) > 10
    reported = 0
    for own, other in zip(ours.results, planner.results, strict=True):
        found, wanted = (columns_of(each).get(SUPPORT_LOGPROBS, ()) for each in (own, other))
        assert [each is None for each in found] == [each is None for each in wanted]
        numbers = [[each for each in some if each is not None] for some in (found, wanted)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
        reported += len(numbers[0])
    assert reported > 10


def test_every_bucket_is_recorded_once_and_the_largest_first(model: LoadedModel) -> None:
    sizes: list[int] = []
    recorder = OperationRecorder()
    core = make_core(model, graphs=False)

    def capture(step: Any) -> Any:
        replay = recorder(step)
        sizes.append(len(step()[0]))
        return replay

    core.use(Graphs(core.state, capture))
    assert sizes == [12, 8, 4, 2, 1] * 2, "steps, and choices within limits"
    run(core, mixed(5))
    assert recorder.recorded == len(sizes)


def test_every_batch_size_gives_the_same_as_alone(model: LoadedModel) -> None:
    core = make_core(model, graphs=True)
    sampling = SamplingParams(temperature=1.0, max_tokens=4)
    alone: list[list[int]] = []
    for seed in range(12):
        generation = Generation(100 + seed, PROMPT, sampling, seed=seed)
        Planner(ExecutorCore(CONFIG, model=model)).run([generation])
        alone.append(generation.token_ids)
    for count in range(1, 13):
        core.reset()
        together = [Generation(seed, PROMPT, sampling, seed=seed) for seed in range(count)]
        Planner(core, chunk=16).run(together)
        assert [generation.token_ids for generation in together] == alone[:count]


def test_padding_writes_to_no_sequence_s_blocks(model: LoadedModel) -> None:
    core = make_core(model, graphs=True)
    new = [new_sequence(i, PROMPT, (3 * i, 3 * i + 1, 3 * i + 2), GREEDY) for i in range(3)]
    core.execute(step_plan(new=tuple(new), rows={0: 9, 1: 9, 2: 9}))
    before = [keys.clone() for keys in core.cache.keys]
    core.execute(step_plan(rows={0: 1, 1: 1, 2: 1}))
    assert core.state.steps.graphs is not None
    assert core.state.steps.graphs.replays[4] == 1
    written = {0, 1, 2}
    for keys, old in zip(core.cache.keys, before, strict=True):
        changed = (keys != old).flatten(2).any(-1).nonzero().tolist()
        assert {(block, place) for block, place in changed} <= {
            *((3 * i + 2, 1) for i in written),
            (core.cache.padding_block, 0),
        }


def test_raw_logprobs_are_those_of_the_ordinary_path(model: LoadedModel) -> None:
    raw: dict[str, Any] = {"logprobs_mode": "raw"}
    core = make_core(model, graphs=True, **raw)
    plain = make_core(model, graphs=False, **raw)
    changes = {"repetition_penalty": 1.3}
    assert_same(run(core, mixed(5, **changes)), run(plain, mixed(5, **changes)))
    assert replays(core) > 5


def test_prefills_and_scored_prompts_are_not_replayed(model: LoadedModel) -> None:
    core = make_core(model, graphs=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    new = (new_sequence(1, PROMPT, range(5), GREEDY), new_sequence(2, [5, 6], (9,), scored))
    core.execute(step_plan(new=new, rows={1: 8, 2: 1}))
    result = core.execute(step_plan(rows={1: 1, 2: 1}))
    assert len(result.token_ids) == 2
    assert replays(core) == 1, "the second step has rows of one token that sample"
    third = new_sequence(3, PROMPT, range(10, 15), GREEDY)
    core.execute(step_plan(new=(third,), rows={1: 1, 3: 1}))
    assert replays(core) == 1, "row 3 is a part of a prompt"


def test_new_weights_reach_the_recorded_steps() -> None:
    model = wrap_model(make_model("qwen2"), 64)
    core = make_core(model, graphs=True)
    other = make_model("qwen2", seed=1)
    run(core, mixed(3))
    core.part(WeightChanges).manager.sync_blocking(other.state_dict())
    core.reset()
    before = replays(core)
    expected = run(ExecutorCore(CONFIG, model=wrap_model(copy.deepcopy(other), 64)), mixed(3))
    assert_same(run(core, mixed(3)), expected)
    assert replays(core) > before


def test_more_sequences_than_settings_allow_are_recorded_for_again(model: LoadedModel) -> None:
    core = make_core(model, graphs=True, max_batch_size=2)
    first = core.state.steps.graphs
    short = SamplingParams(max_tokens=2)
    many, plain = ([Generation(i, PROMPT[:2], short, seed=i) for i in range(20)] for _ in range(2))
    Planner(ExecutorCore(CONFIG, model=model)).run(plain)
    Planner(core).run(many)
    assert core.state.steps.graphs is not first
    assert_same(many, plain)
    core.reset()
    one = Generation(50, PROMPT, SAMPLED, seed=3)
    Planner(core, chunk=16).run([one])
    assert replays(core) > 0


def test_a_step_that_waits_for_the_device_can_t_be_recorded() -> None:
    module = make_model("qwen2")

    def look(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        assert logits.isfinite().all().item()

    module.lm_head.register_forward_hook(look)
    model = wrap_model(module, 64)
    core = make_core(model, graphs=False)
    with pytest.raises(RuntimeError, match="can't be recorded"):
        core.use(Graphs(core.state, OperationRecorder()))
    assert core.state.steps.graphs is None
    assert core.off.get("graphs", "")
    assert_same(run(core, mixed(3)), run(ExecutorCore(CONFIG, model=model), mixed(3)))
