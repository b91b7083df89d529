"""One step ahead: a step is launched before anybody has read the tokens of the one before it."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.control import Cancel
from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model
from nano_inference.stages.executor.driver.sampled import Readback

from ...soaking import in_soak
from .driver.speculation.drafting import DraftingLane, Row, assert_same
from .models import VOCAB, make_model
from .plans import GREEDY, PROMPT, SAMPLED, new_sequence, step_plan
from .recorder import core_as_on_cuda

CONFIG = EngineConfig(
    block_size=4, kv_cache_bytes=1 << 20, max_batch_size=6, max_tokens_per_batch=16
)


def make_core(model: LoadedModel, *, graphs: bool) -> ExecutorCore:
    if graphs:
        return core_as_on_cuda(CONFIG, model, graphs=True)
    return ExecutorCore(CONFIG, model=model, runs_ahead=True)


def lane_of(core: ExecutorCore) -> DraftingLane:
    """With two steps in flight if the core runs ahead."""
    return DraftingLane(CONFIG, core, steps_ahead=2 if core.runs_ahead else 1)


STOPS = frozenset(range(0, VOCAB, 3))
KINDS: dict[str, dict[str, Any]] = {
    "limits": {},
    "stop tokens": {"stop_token_ids": STOPS},
    "penalties": {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {11: 4.0},
        "stop_token_ids": STOPS,
    },
    "min_tokens": {"min_tokens": 3, "stop_token_ids": STOPS},
    "limits of the choice": {"top_k": 40, "top_p": 0.7, "min_p": 0.01, "stop_token_ids": STOPS},
    "top logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("graphs", [True, in_soak(False)])
def test_steps_in_flight_equal_one_step_at_a_time(
    model: LoadedModel, kind: str, graphs: bool
) -> None:
    def run(lane: DraftingLane) -> dict[int, list[Row]]:
        for seq_id in range(1, 15):
            temperature = 0.0 if seq_id % 3 == 0 else 1.0
            # Every other sequence is plain, so that both ways meet in one step.
            special = KINDS[kind] if seq_id % 2 else {}
            sampling = SamplingParams(temperature=temperature, max_tokens=3 + seq_id % 9, **special)
            lane.add(seq_id, sampling, PROMPT[: 2 + seq_id % 7])
        return lane.run()

    ahead = lane_of(make_core(model, graphs=graphs))
    found = run(ahead)
    expected = run(lane_of(ExecutorCore(CONFIG, model=model)))
    assert ahead.most_in_flight == 2
    assert_same(found, expected)
    reasons = {rows[-1][2] for rows in found.values()}
    assert reasons == ({"length", "stop"} if "stop_token_ids" in KINDS[kind] else {"length"})


@pytest.mark.parametrize("graphs", [True, False])
def test_launching_reads_no_token(
    model: LoadedModel, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a slow device: a launch may not wait for a result."""
    core = make_core(model, graphs=graphs)
    arrived: set[Readback] = set()
    numbers = Readback.numbers

    def careful(self: Readback) -> Any:
        assert self in arrived, "the tokens of a step that is not done were asked for"
        return numbers(self)

    monkeypatch.setattr(Readback, "numbers", careful)
    new = (new_sequence(1, PROMPT, range(6), SAMPLED, seed=4),)
    plans = [step_plan(1, new=new, rows={1: 9})]
    plans += [step_plan(2 + step, rows={1: 1}) for step in range(7)]
    launched = [core.launch(plan) for plan in plans]
    results = []
    for step in launched:
        assert step.outputs.sampled is not None
        arrived.add(step.outputs.sampled.readback)
        results.append(core.finish(step))
    found = [result.token_ids[0] for result in results]
    monkeypatch.undo()
    other = ExecutorCore(CONFIG, model=model)
    assert found == [other.execute(plan).token_ids[0] for plan in plans]
    assert [result.finish_reasons for result in results] == [("",)] * 7 + [("length",)]


def test_a_sequence_at_its_limit_is_not_computed_again(model: LoadedModel) -> None:
    core = make_core(model, graphs=False)
    two = SamplingParams(temperature=0.0, max_tokens=2)
    steps = [core.launch(step_plan(1, new=(new_sequence(1, PROMPT, range(4), two),), rows={1: 9}))]
    steps += [core.launch(step_plan(step, rows={1: 1})) for step in (2, 3)]
    assert steps[2].outputs.sampled is None
    assert [core.finish(step).finish_reasons for step in steps] == [("",), ("length",), ()]


def test_the_row_of_a_stopped_sequence_is_dropped(model: LoadedModel) -> None:
    core = make_core(model, graphs=False)
    stopping = SamplingParams(temperature=0.0, stop_token_ids=frozenset(range(VOCAB)))
    new = (
        new_sequence(1, PROMPT, range(4), stopping),
        new_sequence(2, PROMPT, range(4, 8), GREEDY),
    )
    first = core.launch(step_plan(1, new=new, rows={1: 9, 2: 9}))
    second = core.launch(step_plan(2, rows={1: 1, 2: 1}))
    assert core.finish(first).finish_reasons == ("stop", "")
    assert core.finish(second).seq_ids == (2,)


def test_a_reused_row_keeps_its_new_tokens(model: LoadedModel) -> None:
    core = make_core(model, graphs=False)
    expected = ExecutorCore(CONFIG, model=model)
    first = core.launch(step_plan(1, new=(new_sequence(1, PROMPT, range(4), GREEDY),), rows={1: 9}))
    other = new_sequence(2, PROMPT[::-1], range(4, 8), GREEDY)
    plans = [step_plan(2, new=(other,), rows={2: 9}, finished=(1,)), step_plan(3, rows={2: 1})]
    second = core.launch(plans[0])
    assert core.finish(first).seq_ids == ()
    third = core.launch(plans[1])
    found = [core.finish(step).token_ids for step in (second, third)]
    assert found == [expected.execute(plan).token_ids for plan in plans]


def test_a_cancelled_sequence_leaves_while_its_step_is_under_way(model: LoadedModel) -> None:
    lane = lane_of(make_core(model, graphs=True))
    for seq_id in (1, 2, 3):
        lane.add(seq_id, SAMPLED, PROMPT)
    for _ in range(4):
        lane.turn()
    lane.batching.cancel(Cancel("r2", "r2", "cancelled", "cancelled", "enough"))
    lane.add(4, SAMPLED, PROMPT)
    found = lane.run()
    other = lane_of(ExecutorCore(CONFIG, model=model))
    for seq_id in (1, 2, 3, 4):
        other.add(seq_id, SAMPLED, PROMPT)
    expected = other.run()
    assert len(found[2]) < 8
    expected[2] = expected[2][: len(found[2])]
    assert_same(found, expected)


def test_a_step_from_before_a_reset_gives_no_tokens(model: LoadedModel) -> None:
    core = make_core(model, graphs=False)
    plan = step_plan(1, new=(new_sequence(1, PROMPT, range(4), GREEDY),), rows={1: 9})
    before = core.launch(plan)
    core.reset()
    after = core.launch(plan)
    assert core.finish(before).seq_ids == ()
    assert core.finish(after).seq_ids == (1,)


def test_steps_are_finished_in_order(model: LoadedModel) -> None:
    core = make_core(model, graphs=False)
    core.launch(step_plan(1, new=(new_sequence(1, PROMPT, range(4), GREEDY),), rows={1: 9}))
    second = core.launch(step_plan(2, rows={1: 1}))
    with pytest.raises(ValueError, match="in the order"):
        core.finish(second)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_output_is_found_when_the_step_is_read(graphs: bool, temperature: float) -> None:
    """Not before: looking would wait for the device. Nor is a token made of it that none has."""
    model = wrap_model(make_model("qwen2"), 64)
    core = make_core(model, graphs=graphs)
    sampling = SamplingParams(temperature=temperature, max_tokens=8)
    first = step_plan(1, new=(new_sequence(1, PROMPT, range(4), sampling),), rows={1: 9})
    core.execute(first)
    model.module.get_output_embeddings().weight.data.fill_(float("nan"))  # type: ignore[operator]
    steps = [core.launch(step_plan(step, rows={1: 1})) for step in (2, 3)]
    with pytest.raises(ModelError, match="not finite"):
        core.finish(steps[0])
