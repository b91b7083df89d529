"""Costs of steps are measured and learned, and decide how many drafted tokens are verified."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation import control
from nano_inference.stages.executor.driver.speculation.control import CostControl
from nano_inference.stages.executor.driver.speculation.costs import StepCosts, measure_costs
from nano_inference.stages.executor.driver.trial import trial_step
from nano_inference.stages.executor.runner.model import wrap_model

from .....soaking import in_soak
from ...models import make_model

COSTS = StepCosts((1, 4, 16, 64), (0.036, 0.042, 0.069, 0.2))


def choose_lengths(
    num_rows: int,
    chances: list[list[float]],
    costs: StepCosts,
    *,
    max_rows: int,
    num_prefill: int = 0,
) -> list[int]:
    chooser = CostControl(costs, max_rows=max_rows)
    chooser.begin(num_rows, num_prefill, 64)
    return chooser.lengths(chances)


def seconds_of(costs: StepCosts, rows: int, context: float = 64) -> float:
    return float(costs.at(context)[rows])


# --- the costs of steps ---------------------------------------------------------------------


def test_between_sizes_costs_are_linear_and_beyond_the_last_too() -> None:
    assert seconds_of(COSTS, 1) == seconds_of(COSTS, 0) == pytest.approx(0.036)
    assert seconds_of(COSTS, 2) == pytest.approx(0.038)
    assert seconds_of(COSTS, 40) == pytest.approx((0.069 + 0.2) / 2)
    assert seconds_of(COSTS, 112) == pytest.approx(0.2 + 0.2 - 0.069)
    assert seconds_of(StepCosts((1,), (0.5,)), 3) == pytest.approx(1.5)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12))
def test_more_rows_never_cost_less(seconds: list[float]) -> None:
    costs = StepCosts([2**n for n in range(len(seconds))], seconds)
    for context in (0, 64, 1000):
        table = costs.at(context).tolist()
        assert table == sorted(table)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((), ()),
        ((2, 4), (1.0, 2.0)),
        ((1, 1), (1.0, 2.0)),
        ((1, 2), (1.0,)),
        ((1,), (0.0,)),
        ((1,), (math.nan,)),
        ((1,), (math.inf,)),
    ],
)
def test_invalid_costs_are_refused(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"has to|have to"):
        StepCosts(sizes, seconds)


def test_ratios_follow_the_steps_that_are_run() -> None:
    """Here rows cost twice as much as was measured, on a machine whose speed changes as well."""
    costs = StepCosts((1, 4, 16, 64), (0.036, 0.042, 0.069, 0.2))
    for number in range(2000):
        speed = 1.0 if number % 100 < 50 else 1.6
        rows = 16 if number % 2 else 1
        costs.observe(rows, speed * (0.036 + (rows - 1) * 0.0044))
    assert seconds_of(costs, 16) / seconds_of(costs, 1) == pytest.approx(0.102 / 0.036, rel=0.05)


def test_steps_of_one_size_or_incomparable_steps_change_no_costs() -> None:
    costs = StepCosts((1, 4, 16, 64), (0.036, 0.042, 0.069, 0.2))
    before = costs.at().tolist()
    for number in range(100):
        costs.observe(1, 0.5 * (1 + number % 3))
    for hostile in (math.nan, math.inf, 0.0, -1.0):
        costs.observe(1, 0.1)
        costs.observe(16, hostile)
        costs.observe(4, 0.001)
        costs.observe(65, 5.0)
        costs.observe(0, 5.0)
    for _ in range(100):
        costs.observe(1, 0.036)
        costs.interrupt()
        costs.observe(16, 3.0)
        costs.interrupt()
    assert costs.at().tolist() == before


def test_learned_costs_are_bounded() -> None:
    costs = StepCosts((1, 4, 16, 64), (0.036, 0.042, 0.069, 0.2))
    for _ in range(10_000):
        costs.observe(1, 1e-9)
        costs.observe(64, 1e9)
    assert 0.2 < seconds_of(costs, 64) <= 2 * 0.2 * (1 + 1e-9)
    for _ in range(10_000):
        costs.observe(1, 1e9)
        costs.observe(64, 1e-9)
    assert 0.2 / 2 <= seconds_of(costs, 64) < 0.2


# --- measuring ------------------------------------------------------------------------------


class FakeMachine:
    """Steps on a clock of its own."""

    def __init__(self, first_ns: int, row_ns: int, context_ns: int = 0) -> None:
        self.first_ns, self.row_ns, self.context_ns = first_ns, row_ns, context_ns
        self.time_ns = 0
        self.steps: list[int] = []

    def step(self, rows: int, context: int) -> None:
        self.steps.append(rows)
        self.time_ns += self.first_ns + self.row_ns * (rows - 1) + self.context_ns * rows * context

    def now_ns(self) -> int:
        return self.time_ns


def test_all_sizes_are_measured_several_times_where_steps_are_short() -> None:
    machine = FakeMachine(1_000_000, 50_000)
    costs = measure_costs(machine.step, 64, machine.now_ns)
    assert costs.most_rows == 64
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80):
        assert seconds_of(costs, rows) == pytest.approx(0.001 + 0.00005 * (rows - 1))
    counts = Counter(machine.steps)
    rounds = counts.pop(64)
    # One begins, and with 16 rows contexts are compared.
    assert (counts.pop(1), counts.pop(16)) == (rounds + 1, 2 * rounds)
    assert set(counts.values()) == {rounds}
    assert 5 < rounds <= 40
    assert machine.now_ns() < 0.5e9, "a quarter of the budget, and the first round"


def test_costs_include_longer_contexts() -> None:
    machine = FakeMachine(1_000_000, 50_000, 10)
    costs = measure_costs(machine.step, 64, machine.now_ns)
    for rows, context in ((1, 64), (16, 64), (64, 1000), (16, 5000), (100, 200), (8, 8)):
        wanted = 0.001 + 0.00005 * (rows - 1) + 1e-8 * rows * context
        assert seconds_of(costs, rows, context) == pytest.approx(wanted)
    assert seconds_of(costs, 1, 0) > 0


@given(first_ns=st.integers(0, 10**10), row_ns=st.integers(0, 10**10), most=st.integers(1, 300))
@example(first_ns=0, row_ns=0, most=300)
def test_measuring_keeps_to_its_budget(first_ns: int, row_ns: int, most: int) -> None:
    machine = FakeMachine(first_ns, row_ns)
    costs = measure_costs(machine.step, most, machine.now_ns, budget_s=1.5)
    assert costs.most_rows <= most
    assert max(machine.steps) == costs.most_rows
    necessary = 5 * first_ns + 25 * row_ns
    assert machine.time_ns <= max(1.5e9, necessary) + first_ns


def test_slow_steps_are_measured_at_four_sizes() -> None:
    machine = FakeMachine(3_000_000_000, 100_000_000)
    costs = measure_costs(machine.step, 512, machine.now_ns)
    assert machine.steps == [1, 1, 16, 4, 8]
    # Beyond, where a step may cost many times more, there are no drafts.
    assert choose_lengths(12, [[1.0] * 16], costs, max_rows=512) == [4]
    assert choose_lengths(20, [[1.0] * 16], costs, max_rows=512) == [0]
    assert not CostControl(costs).begin(20, 0, 64)


def test_a_step_that_was_disturbed_does_not_count() -> None:
    machine = FakeMachine(1_000_000, 50_000)

    def step(rows: int, context: int) -> None:
        machine.step(rows, context)
        if len(machine.steps) % 17 == 3:
            machine.time_ns += 30_000_000

    costs = measure_costs(step, 16, machine.now_ns)
    assert seconds_of(costs, 1) == pytest.approx(0.001)
    assert seconds_of(costs, 16) == pytest.approx(0.001 + 15 * 0.00005)


def core(**settings: object) -> ExecutorCore:
    config = EngineConfig(block_size=4, max_batch_size=4, kv_cache_bytes=1 << 20, **settings)  # type: ignore[arg-type]
    return ExecutorCore(config, model=wrap_model(make_model("qwen2"), 64))


@pytest.mark.parametrize("settings", [{}, in_soak({"kernels": "off"}), {"deterministic": True}])
def test_a_trial_step_changes_nothing(settings: dict[str, object]) -> None:
    executor = core(**settings)
    cache, random_state = executor.cache, torch.random.get_rng_state()
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_(generator=torch.Generator().manual_seed(1))
    kept = [tensor[: cache.num_blocks].clone() for tensor in (*cache.keys, *cache.values)]
    step = trial_step(executor.runner)
    clock = itertools.count(0, 1000)
    with executor.runner.active():
        tokens = step(5, 30)
        costs = measure_costs(step, 8, lambda: next(clock), longest=64)
    assert isinstance(tokens, list)
    assert len(tokens) == 5
    assert costs.most_rows == 8
    after = [tensor[: cache.num_blocks] for tensor in (*cache.keys, *cache.values)]
    assert all(torch.equal(now, then) for now, then in zip(after, kept, strict=True))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(torch.isfinite(tensor).all() for tensor in (*cache.keys, *cache.values))


# --- how many -------------------------------------------------------------------------------

chances_of_drafts = st.lists(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), max_size=4).map(
        lambda chances: sorted(chances, reverse=True)
    ),
    max_size=4,
)
seconds_of_sizes = st.lists(st.floats(0.01, 1), min_size=5, max_size=5)


def rate(num_rows: int, num_prefill: int, tokens: float, added: int, costs: StepCosts) -> float:
    """Tokens per second of the step's rows, drafted ones included."""
    # Each row after the largest size costs the same.
    others = min(num_rows + num_prefill, costs.most_rows)
    seconds = costs.at()
    drafted = seconds[others + added] - seconds[others]
    return float((num_rows + tokens) / (seconds[num_rows] + drafted))


@given(
    num_rows=st.integers(1, 6),
    num_prefill=st.one_of(st.integers(0, 20), st.integers(50, 80)),
    chances=chances_of_drafts,
    seconds=seconds_of_sizes,
    max_rows=st.integers(1, 20),
)
def test_no_other_lengths_give_more(
    num_rows: int, num_prefill: int, chances: list[list[float]], seconds: list[float], max_rows: int
) -> None:
    costs = StepCosts((1, 2, 4, 8, 64), seconds)
    lengths = choose_lengths(num_rows, chances, costs, max_rows=max_rows, num_prefill=num_prefill)

    def rate_of(lengths: tuple[int, ...]) -> float:
        tokens = sum(
            sum(falling[:length]) for falling, length in zip(chances, lengths, strict=True)
        )
        return rate(num_rows, num_prefill, tokens, sum(lengths), costs)

    off = rate_of((0,) * len(chances))
    within = num_rows + num_prefill <= 64
    rooms = [max_rows - num_rows, *([64 - num_rows - num_prefill] if within else [])]
    possible = [
        other
        for other in itertools.product(*(range(len(falling) + 1) for falling in chances))
        if sum(other) <= max(0, min(rooms))
    ]
    best = max(map(rate_of, possible))
    assert tuple(lengths) in possible
    if any(lengths):
        assert rate_of(tuple(lengths)) == pytest.approx(best)
        assert best >= 1.05 * off * (1 - 1e-9)
    else:
        assert best <= 1.05 * off * (1 + 1e-9)


@given(chances=chances_of_drafts, seconds=seconds_of_sizes, hopeless=st.integers(0, 3))
def test_likelier_drafts_are_never_verified_less(
    chances: list[list[float]], seconds: list[float], hopeless: int
) -> None:
    costs = StepCosts((1, 2, 4, 8, 16), seconds)
    lengths = choose_lengths(2, chances, costs, max_rows=16)
    certain = [[1.0 for _ in falling] for falling in chances]
    assert sum(choose_lengths(2, certain, costs, max_rows=16)) >= sum(lengths)
    # Drafts without expected gain change nothing.
    others = [[0.0, 0.0]] * hopeless
    assert choose_lengths(2, chances + others, costs, max_rows=16) == lengths + [0] * hopeless


@pytest.mark.parametrize("num_rows", [0, 1, 64, 65, 1000])
def test_no_chances_give_no_lengths(num_rows: int) -> None:
    assert choose_lengths(num_rows, [], COSTS, max_rows=64) == []
    assert choose_lengths(num_rows, [[], [0.0], [math.nan]], COSTS, max_rows=64) == [0, 0, 0]


def test_no_drafts_are_verified_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    certain = [[1.0] * 4]
    assert choose_lengths(0, certain, COSTS, max_rows=64) == [0]
    assert choose_lengths(4, certain, COSTS, max_rows=4) == [0]
    assert choose_lengths(4, certain, COSTS, max_rows=6) == [2]
    # Also beyond the measured sizes.
    monkeypatch.setattr(control, "LEAST_GAIN", 0.5)
    assert choose_lengths(62, certain, COSTS, max_rows=200) == [2]
