"""Acceptance, costs and gains of drafts decide how much is drafted and verified."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation.control import (
    Acceptance,
    CostControl,
    DraftLedger,
)
from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.driver.speculation.drafts import NO_DRAFT, Draft
from nano_inference.stages.executor.parts.speculation import Speculation
from nano_inference.stages.executor.runner.model import wrap_model

from .....soaking import in_soak
from ...models import make_model

DRAFT = Draft((1, 2, 3, 4), (), "ngram")


def control_of_steps(*, max_rows: int = 64) -> CostControl:
    control = CostControl(StepCosts((1, 4, 16), (0.036, 0.042, 0.069)), max_rows=max_rows)
    for _ in range(50):
        control.acceptance.settle(0, DRAFT, DRAFT.tokens)
    return control


def ratio(control: CostControl) -> float:
    seconds = control.costs.at()
    return float(seconds[16] / seconds[1])


def test_expected_tokens_are_verified_up_to_the_row_limit() -> None:
    for max_rows, wanted in ((64, 4), (3, 2)):
        control = control_of_steps(max_rows=max_rows)
        assert control.begin(1, 0, 64)
        assert control.lengths([control.acceptance.expected(0, DRAFT)]) == [wanted]


def test_sources_are_not_asked_if_no_draft_could_pay() -> None:
    control = CostControl(StepCosts((1, 4, 16), (0.036, 0.042, 0.5)))
    assert control.begin(1, 0, 64)
    assert not control.begin(4, 0, 64)
    assert not control.begin(1, 600, 64)
    assert not control.begin(0, 10, 0)
    # A row of a long context is work of its own.
    costs = StepCosts((1, 4, 16), (0.036, 0.042, 0.069), context_s=1e-4)
    assert CostControl(costs).begin(4, 0, 64)
    assert not CostControl(costs).begin(4, 0, 50_000)


def steps_asked(control: CostControl, steps: int, seconds: float, accepted: int) -> int:
    """The number of steps of 4 rows with calls of sources, at a given cost."""
    count = rest = 0
    for _ in range(steps):
        if rest:
            rest -= 1
        elif control.begin(4, 0, 64):
            count += 1
            control.lengths([])
            control.timed(0.042)
            control.spent(seconds, accepted)
        else:
            rest = control.rest()
    return count


def test_sources_rest_if_asking_takes_longer_than_drafts_save() -> None:
    control = control_of_steps()
    for _ in range(200):
        assert control.begin(4, 0, 64) or control.rest()
        control.spent(1.0, 1)
    assert steps_asked(control, 1000, 1.0, 1) < 200


def test_asking_that_does_not_pay_is_rare() -> None:
    # A step takes 42 ms, so a token 10 ms.
    control = control_of_steps()
    assert steps_asked(control, 2000, 0.002, 0) < 300
    assert steps_asked(control, 2000, 0.002, 1) > 1850
    assert steps_asked(control_of_steps(), 2000, 0.0004, 0) == 2000, "a hundredth of a step is free"


def test_a_reused_row_starts_without_history() -> None:
    for leave in (lambda control: control.acceptance.forget(0), lambda control: control.clear()):
        control = control_of_steps()
        control.acceptance.settle(0, DRAFT, [1])
        leave(control)
        control.acceptance.settle(0, Draft(), [9])
        assert control.acceptance.expected(0, DRAFT) == control.acceptance.expected(1, DRAFT)


def test_costs_follow_the_steps_whose_lengths_were_chosen() -> None:
    control = control_of_steps()
    before = ratio(control)
    for rows in (1, 16) * 200:
        control.begin(rows, 0, 64)
        control.lengths([])
        control.timed(rows * 0.01)
    assert ratio(control) > 1.5 * before


def test_only_timed_steps_without_prompts_are_learned_from() -> None:
    control = control_of_steps()
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
def test_costs_are_measured_only_with_speculation(
    speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(self: Speculation) -> StepCosts:
        measured.append(original(self))
        return measured[-1]

    original = Speculation._measure_costs
    monkeypatch.setattr(Speculation, "_measure_costs", measure)
    config = EngineConfig(max_batch_size=4, kv_cache_bytes=1 << 20, speculation=speculation)  # type: ignore[arg-type]
    core = ExecutorCore(config, model=wrap_model(make_model("qwen2"), 64))
    assert len(measured) == (speculation == "auto")
    if measured:
        assert core.part(Speculation).speculator is not None
        assert core.part(Speculation).speculator.control.costs is measured[0]  # type: ignore[attr-defined]


def asked(saved: float, steps: int, ledger: DraftLedger | None = None) -> int:
    """The number of steps with a call of a model whose drafts take a second and save this many."""
    ledger = ledger or DraftLedger(256)
    count = 0
    for _ in range(steps):
        if ledger.may_ask():
            count += 1
            ledger.settle(1.0, saved)
    return count


def test_a_source_that_pays_never_rests() -> None:
    assert asked(1.2, 1000) == 1000


def test_a_source_that_does_not_pay_rests_longer_and_longer() -> None:
    assert asked(1.0, 16 + 16 + 16 + 32) == 32
    assert asked(0.0, 10_000) < 800


def test_a_source_that_starts_to_pay_is_asked_again() -> None:
    ledger = DraftLedger(256)
    asked(0.5, 5000, ledger)
    asked(2.0, 300, ledger)
    assert asked(2.0, 1000, ledger) == 1000


def asked_after_prompts(reading: float, answer: int, prompts: int) -> float:
    """The share of steps with a call of a model that reads prompts for `reading` seconds, then
    drafts for `answer` steps, and saves twice its cost in each."""
    ledger, count = DraftLedger(256), 0
    for number in range(prompts * (answer + 1)):
        if ledger.may_ask():
            count += 1
            if number % (answer + 1):
                ledger.settle(1.0, 2.0)
            else:
                ledger.owe(reading)
    return count / (prompts * (answer + 1))


def test_the_cost_of_reading_a_prompt_is_charged_to_later_drafts() -> None:
    assert asked_after_prompts(200.0, answer=400, prompts=20) == 1
    # Ten steps save ten seconds more than they take.
    assert asked_after_prompts(5.0, answer=10, prompts=500) == 1
    assert asked_after_prompts(30.0, answer=10, prompts=500) < 0.2


def test_a_source_that_only_reads_prompts_rests() -> None:
    assert asked_after_prompts(1.0, answer=0, prompts=10_000) < 0.1


COSTS = StepCosts((1, 2, 4, 8, 16, 32, 64), (0.036, 0.041, 0.042, 0.051, 0.069, 0.115, 0.2))
"""Of a model of 0.5 billion parameters on two CPU cores."""

SECONDS = COSTS.at().tolist()

DRAFTING_S = 20e-6
"""The cost of asking for a row's draft and learning from it."""

LONGEST = 16

Rights = Iterator[bool]
"""Whether the source predicts each next token of a text, independent of earlier drafts."""


def templates(known: int, unknown: int, seed: int = 1) -> Rights:
    """Stretches that are known, and others that are not, as of values in a template."""
    lengths = random.Random(seed)
    while True:
        yield from (True for _ in range(lengths.randint(1, 2 * known)))
        yield from (False for _ in range(lengths.randint(1, 2 * unknown)))


def luck(share: float, seed: int = 1) -> Rights:
    """Each token by itself, in this number of cases."""
    chance = random.Random(seed)
    while True:
        yield chance.random() < share


class Text:
    """One row. Its tokens are their positions; a source that does not know one says -1."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights
        self._ahead: list[bool] = []
        self.position = 0

    def draft(self) -> Draft:
        while len(self._ahead) < LONGEST + 1:
            self._ahead.append(next(self._rights))
        tokens = (
            self.position + place if right else -1
            for place, right in enumerate(self._ahead[:LONGEST])
        )
        return Draft(tuple(tokens), (), "made up")

    def advance(self, verified: int) -> list[int]:
        """The tokens of a step that verifies this number of the draft's places."""
        accepted = next(
            (n for n, right in enumerate(self._ahead[:verified]) if not right), verified
        )
        got = list(range(self.position, self.position + accepted + 1))
        self.position += len(got)
        del self._ahead[: len(got)]
        return got


def run(texts: list[Text], num_tokens: int, control: CostControl) -> float:
    """Times the tokens per second of off, for so many tokens of all texts together."""
    seconds, tokens = 0.0, 0
    while tokens < num_tokens:
        drafts = [text.draft() for text in texts]
        control.begin(len(texts), 0, 64)
        chances = [control.acceptance.expected(row, draft) for row, draft in enumerate(drafts)]
        lengths = control.lengths(chances)
        seconds += SECONDS[len(texts) + sum(lengths)] + DRAFTING_S * len(texts)
        for row, (text, draft, length) in enumerate(zip(texts, drafts, lengths, strict=True)):
            got = text.advance(length)
            control.acceptance.settle(row, draft, got)
            tokens += len(got)
    return tokens / seconds / (len(texts) / SECONDS[len(texts)])


Texts = Callable[[int], Rights]


@pytest.mark.parametrize("num_tokens", [64, 512])
@pytest.mark.parametrize(
    ("rows", "text", "least"),
    [
        (1, lambda seed: repeat(True), 3.0),
        (4, lambda seed: repeat(True), 2.0),
        (16, lambda seed: repeat(True), 1.25),
        (1, lambda seed: templates(30, 5, seed), 2.0),
        (16, lambda seed: templates(30, 5, seed), 1.1),
    ],
)
def test_a_predictable_text_is_generated_faster(
    rows: int, text: Texts, least: float, num_tokens: int
) -> None:
    texts = [Text(text(seed)) for seed in range(rows)]
    assert run(texts, num_tokens * rows, CostControl(COSTS)) >= least


@pytest.mark.parametrize(("rows", "num_tokens"), [(1, 64), (1, 512), (16, 64), in_soak(16, 512)])
@pytest.mark.parametrize(
    "text",
    [
        lambda seed: repeat(False),
        lambda seed: luck(0.05, seed),
        lambda seed: luck(0.2, seed),
        lambda seed: luck(0.5, seed),
        lambda seed: templates(3, 30, seed),
        lambda seed: templates(10, 10, seed),
    ],
)
def test_no_text_is_made_slower(rows: int, text: Texts, num_tokens: int) -> None:
    """On average: a source that has luck at first is believed for a while."""
    gains = []
    for number in range(5):
        texts = [Text(text(rows * number + seed)) for seed in range(rows)]
        gains.append(run(texts, num_tokens * rows, CostControl(COSTS)))
    assert sum(gains) / len(gains) >= 0.98


@pytest.mark.parametrize("rows", [1, 16])
def test_a_text_that_changes_is_followed(rows: int) -> None:
    def changing() -> Rights:
        while True:
            yield from (False for _ in range(300))
            yield from (True for _ in range(300))

    texts, control = [Text(changing()) for _ in range(rows)], CostControl(COSTS)
    gains = [run(texts, 300 * rows, control) for _ in range(6)]
    known = 3.0 if rows == 1 else 1.2
    # A step or two too late each time, in which a part of the next stretch is run already.
    assert all(gain >= known for gain in gains[1::2])
    assert all(gain >= 0.98 for gain in gains[0::2])


def test_a_batch_of_one_known_text_among_others_is_not_made_slower() -> None:
    texts = [Text(repeat(True)), *(Text(repeat(False)) for _ in range(15))]
    assert run(texts, 16 * 512, CostControl(COSTS)) >= 0.98


RIGHT = (1, 2, 3, 4, 5, 6, 7, 8)
WRONG = (9, *RIGHT[1:])


def draft(*tokens: int, likelihoods: tuple[float, ...] = (), source: str = "ngram") -> Draft:
    return Draft(tokens, likelihoods, source)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=8),
            st.lists(st.floats(), max_size=9),
            st.sampled_from(["ngram", "model"]),
            st.lists(st.integers(0, 3), max_size=9),
        ),
        max_size=60,
    )
)
def test_chances_fall_and_are_chances_whatever_happens(
    history: list[tuple[list[int], list[float], str, list[int]]],
) -> None:
    acceptance = Acceptance()
    for tokens, likelihoods, source, got in history:
        proposed = Draft(tuple(tokens), tuple(likelihoods), source)
        chances = acceptance.expected(0, proposed)
        assert len(chances) <= len(tokens)
        assert bool(chances) == bool(tokens)
        assert all(0 < chance < 1 for chance in chances)
        assert chances == sorted(chances, reverse=True)
        acceptance.settle(0, proposed, got)


def test_a_source_that_is_never_right_is_not_verified_until_it_is_right() -> None:
    control = control_of_steps()
    wrong, verified = draft(*WRONG, source="suffix"), []
    for row in range(120):
        control.begin(1, 0, 64)
        verified += control.lengths([control.acceptance.expected(row % 4, wrong)])
        control.acceptance.settle(row % 4, wrong, [RIGHT[0]])
    assert verified[-20:] == [0] * 20
    # Nor of a sequence that is new.
    control.begin(1, 0, 64)
    assert control.lengths([control.acceptance.expected(9, wrong)]) == [0]
    for _ in range(20):
        control.acceptance.settle(0, wrong, [WRONG[0]])
    control.begin(1, 0, 64)
    assert control.lengths([control.acceptance.expected(0, wrong)])[0] > 0


def test_no_history_makes_acceptance_certain() -> None:
    """No division by zero, also after a million tokens."""
    acceptance = Acceptance()
    for _ in range(20_000):
        acceptance.settle(0, draft(1), [1])
    assert 0.99 < acceptance.expected(0, draft(1))[0] < 1
    for _ in range(20_000):
        acceptance.settle(0, draft(1), [2])
    assert 0 < acceptance.expected(0, draft(1))[0] < 0.01


@pytest.mark.parametrize(("row", "source"), [(1, "suffix"), (0, "ngram")])
def test_sequences_and_sources_differ(row: int, source: str) -> None:
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.settle(0, draft(*RIGHT, source="suffix"), RIGHT)
        acceptance.settle(row, draft(*WRONG, source=source), RIGHT)
    assert acceptance.expected(0, draft(*RIGHT, source="suffix"))[0] > 0.9
    assert acceptance.expected(row, draft(*RIGHT, source=source))[0] < 0.1


def test_a_new_sequence_starts_from_its_sources_record_with_others() -> None:
    acceptance = Acceptance()
    guess = acceptance.expected(1, draft(*RIGHT))[0]
    for _ in range(40):
        acceptance.settle(0, draft(*RIGHT), RIGHT)
    assert acceptance.expected(1, draft(*RIGHT))[0] > guess
    # Neither from the row's earlier sequence, nor from its pending draft.
    acceptance.settle(0, draft(*RIGHT), RIGHT[:4])
    acceptance.forget(0)
    assert acceptance.expected(0, draft(*RIGHT)) == acceptance.expected(1, draft(*RIGHT))
    acceptance.settle(0, NO_DRAFT, [0])
    assert acceptance.expected(0, draft(*RIGHT)) == acceptance.expected(1, draft(*RIGHT))


def test_likelihoods_are_calibrated_by_outcomes() -> None:
    """An overconfident source: its estimate is 0.9, and half of its tokens are right."""
    acceptance = Acceptance()
    sure, unsure = ((1,), (0.9,)), ((1,), (0.2,))
    first = acceptance.expected(0, Draft(*sure, "suffix"))[0]
    assert first > acceptance.expected(0, Draft(*unsure, "suffix"))[0]
    for number in range(400):
        acceptance.settle(0, Draft(*sure, "suffix"), [number % 2])
        acceptance.settle(0, Draft(*unsure, "suffix"), [0])
    assert acceptance.expected(1, Draft(*sure, "suffix"))[0] == pytest.approx(0.5, abs=0.1)
    assert acceptance.expected(1, Draft(*unsure, "suffix"))[0] < 0.1


def test_a_nan_likelihood_counts_as_zero() -> None:
    acceptance = Acceptance()
    for hostile in (math.nan, -1.0, -math.inf):
        assert acceptance.expected(0, draft(1, likelihoods=(hostile,))) == acceptance.expected(
            0, draft(1, likelihoods=(0.0,))
        )


def test_unverified_drafts_are_compared_with_the_text() -> None:
    unverified, verified = Acceptance(), Acceptance()
    unverified.settle(0, draft(1, 2, 9, 4), [1])
    verified.settle(0, draft(1), [1])
    assert unverified.expected(0, draft(*RIGHT)) == verified.expected(0, draft(*RIGHT))


def test_one_likelihood_is_that_of_all_tokens() -> None:
    one, all_of_them = draft(*RIGHT, likelihoods=(0.9,)), draft(*RIGHT, likelihoods=(0.9,) * 8)
    found = []
    for proposed in (one, all_of_them):
        acceptance = Acceptance()
        acceptance.settle(0, proposed, (1, 2, 3, 9))
        found.append([acceptance.expected(0, each) for each in (one, all_of_them)])
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def test_after_a_long_failure_a_text_that_repeats_itself_is_soon_known_again() -> None:
    acceptance = Acceptance()
    for _ in range(500):
        acceptance.settle(0, draft(*WRONG), [RIGHT[0]])
    assert acceptance.expected(0, draft(*RIGHT))[0] < 0.05
    steps = 0
    while acceptance.expected(0, draft(*RIGHT))[0] < 0.5:
        acceptance.settle(0, draft(*RIGHT), [RIGHT[0]])
        steps += 1
    assert steps <= 20


def test_clear_forgets_sequences_and_not_sources() -> None:
    acceptance = Acceptance()
    for _ in range(40):
        acceptance.settle(0, draft(*WRONG), RIGHT)
    acceptance.clear()
    assert acceptance.expected(0, draft(*RIGHT))[0] < 0.3
