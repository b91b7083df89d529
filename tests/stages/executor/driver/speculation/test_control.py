from __future__ import annotations

import pytest

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation.control import CostControl
from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.driver.speculation.drafts import Draft
from nano_inference.stages.executor.runner.model import wrap_model

from ...models import make_model

DRAFT = Draft((1, 2, 3, 4), (), "ngram")


def started(*, max_rows: int = 64) -> CostControl:
    control = CostControl(StepCosts((1, 4, 16), (0.036, 0.042, 0.069)), max_rows=max_rows)
    control.add(0)
    for _ in range(50):
        control.settle(0, DRAFT, DRAFT.tokens)
    return control


def ratio(control: CostControl) -> float:
    return control.costs.of(16) / control.costs.of(1)


def test_what_is_to_be_expected_is_verified_as_far_as_rows_go() -> None:
    for max_rows, wanted in ((64, 4), (3, 2)):
        control = started(max_rows=max_rows)
        assert control.begin(1, 0, 64)
        assert control.lengths([control.expected(0, DRAFT)]) == [wanted]


def test_where_nothing_could_pay_nobody_is_asked() -> None:
    control = CostControl(StepCosts((1, 4, 16), (0.036, 0.042, 0.5)))
    assert control.begin(1, 0, 64)
    assert not control.begin(4, 0, 64)
    assert not control.begin(1, 600, 64)
    assert not control.begin(0, 10, 0)
    # Nor where it takes longer to ask than is saved.
    control = CostControl(StepCosts((1, 4, 16), (0.036, 0.042, 0.069)))
    assert control.begin(4, 0, 64)
    control = CostControl(StepCosts((1, 4, 16), (0.036, 0.042, 0.069)))
    for _ in range(200):
        control.spent(4, 1.0, 0)
    assert not control.begin(4, 0, 64)
    # A row of a long context is work of its own.
    costs = StepCosts((1, 4, 16), (0.036, 0.042, 0.069), context_s=1e-4)
    assert CostControl(costs).begin(4, 0, 64)
    assert not CostControl(costs).begin(4, 0, 50_000)


def steps_asked(control: CostControl, steps: int, seconds: float, accepted: int) -> int:
    """In how many of so many steps of 4 rows somebody is asked, which takes so long."""
    count = rest = 0
    for _ in range(steps):
        if rest:
            rest -= 1
        elif control.begin(4, 0, 64):
            count += 1
            control.lengths([])
            control.timed(0.042)
            control.spent(4, seconds, accepted)
        else:
            rest = control.rest()
    return count


def test_where_asking_takes_more_than_it_saves_it_is_seldom_done() -> None:
    # A step takes 42 ms, so a token 10 ms.
    control = started()
    assert steps_asked(control, 2000, 0.002, 0) < 300
    assert steps_asked(control, 2000, 0.002, 1) > 1850
    assert steps_asked(started(), 2000, 0.0004, 0) == 2000, "a hundredth of a step is free"


def test_a_sequence_that_left_leaves_nothing_to_the_next_in_its_row() -> None:
    for leave in (lambda control: control.forget(0), lambda control: control.clear()):
        control = started()
        control.settle(0, DRAFT, [1])
        leave(control)
        control.add(0)
        control.settle(0, Draft(), [9])
        assert control.expected(0, DRAFT) == control.expected(1, DRAFT)


def test_costs_follow_the_steps_whose_lengths_were_chosen() -> None:
    control = started()
    before = ratio(control)
    for rows in (1, 16) * 200:
        control.begin(rows, 0, 64)
        control.lengths([])
        control.timed(rows * 0.01)
    assert ratio(control) > 1.5 * before


def test_steps_with_prompts_and_steps_that_nobody_asked_about_teach_nothing() -> None:
    control = started()
    before = ratio(control)
    for _ in range(200):
        control.begin(1, 0, 64)
        control.timed(0.01)
        control.begin(16, 300, 64)
        control.lengths([])
        control.timed(5.0)
        control.begin(16, 0, 64)
        control.timed(0.02)
        control.timed(5.0)
    assert ratio(control) == before


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_a_lane_finds_out_what_its_steps_cost_only_where_it_drafts(
    speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(self: ExecutorCore) -> StepCosts:
        measured.append(original(self))
        return measured[-1]

    original = ExecutorCore._measure_costs
    monkeypatch.setattr(ExecutorCore, "_measure_costs", measure)
    config = EngineConfig(max_batch_size=4, kv_cache_bytes=1 << 20, speculation=speculation)  # type: ignore[arg-type]
    core = ExecutorCore(config, model=wrap_model(make_model("qwen2"), 64))
    assert len(measured) == (speculation == "auto")
    if measured:
        assert core._speculator is not None
        assert core._speculator._control.costs is measured[0]  # type: ignore[attr-defined]
