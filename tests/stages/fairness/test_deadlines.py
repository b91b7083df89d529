"""Deadlines: the order of requests, and requests that can't be done in time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nano_inference.bus.messages import Credit
from nano_inference.config import FairnessConfig, SamplingParams
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.core import HOPELESS
from nano_inference.stages.fairness.parts.fastest_step import (
    CAUTION,
    WINDOW,
    FastestStep,
    least_tokens,
)
from nano_inference.stages.fairness.queue import UNDATED_NS

from .requests import SECOND, drain, grant, request

EDF = FairnessConfig(deadline_order=True)
ENDLESS = SamplingParams(max_tokens=100)


def test_the_earliest_deadline_goes_first_within_a_tenants_class() -> None:
    core = FairnessCore(EDF)
    core.push(request("late"), 0, deadline_ns=20 * SECOND)
    core.push(request("soon"), 1, deadline_ns=5 * SECOND)
    core.push(request("low", priority=-1), 2, deadline_ns=SECOND)
    grant(core, 3)
    assert drain(core, 3) == ["soon", "late", "low"]


def test_by_default_the_order_is_that_of_arrival() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("late"), 0, deadline_ns=20 * SECOND)
    core.push(request("soon"), 1, deadline_ns=5 * SECOND)
    grant(core, 2)
    assert drain(core, 3) == ["late", "soon"]


def test_a_request_without_a_deadline_starts() -> None:
    core = FairnessCore(EDF)
    core.push(request("undated"), 0)
    now = 0
    while True:
        now += SECOND
        core.push(request(f"dated-{now}"), now, deadline_ns=now + 5 * SECOND)
        grant(core, 1)
        if drain(core, now) == ["undated"]:
            break
        assert now <= UNDATED_NS
    assert now >= UNDATED_NS - 6 * SECOND, "until then the urgent ones went first"


def test_the_order_can_change_while_requests_wait() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("late"), 0, deadline_ns=20 * SECOND)
    core.push(request("soon"), 1, deadline_ns=5 * SECOND)
    core.configure(EDF)
    grant(core, 2)
    assert drain(core, 3) == ["soon", "late"]


@pytest.mark.parametrize(
    ("budget_ns", "runs"), [(49 * 10**7, False), (51 * 10**7, True), (None, True)]
)
def test_hopeless_requests_never_run(budget_ns: int | None, runs: bool) -> None:
    """100 tokens at 10 ms a step; a step may take half of that in an emptier batch."""
    core = FairnessCore(FairnessConfig())
    core.absorb(Credit(1, steps=((9,),), step_ns=10_000_000), 0)
    core.push(request("it", sampling=ENDLESS), 0, deadline_ns=budget_ns)
    assert drain(core, 0) == (["it"] if runs else [])
    assert core.credits == (0 if runs else 1)
    expired = core.expire(0)
    assert [(c.request_id, c.status, c.code, c.unstarted) for c in expired] == (
        [] if runs else [("it", "expired", "expired", True)]
    )
    assert core.counts.hopeless == (not runs)
    assert all(each.message == HOPELESS for each in expired)
    assert core.num_queued == 0


@pytest.mark.parametrize(
    ("own", "budget_ns", "runs"),
    [
        (None, 125_000_000, True),
        (None, 124_000_000, False),
        (1, 249_000_000, False),
        (1, 251_000_000, True),
        (0, 499_000_000, False),
        (99, 125_000_000, True),
    ],
)
def test_drafts_shorten_the_least_time(own: int | None, budget_ns: int, runs: bool) -> None:
    """100 tokens; a step makes up to four with three drafts."""
    core = FairnessCore(FairnessConfig(), max_draft_tokens=3)
    core.absorb(Credit(1, steps=((9,),), step_ns=10_000_000), 0)
    sampling = SamplingParams(max_tokens=100, max_draft_tokens=own)
    core.push(request("it", sampling=sampling), 0, deadline_ns=budget_ns)
    assert drain(core, 0) == (["it"] if runs else [])


def test_nothing_is_hopeless_before_the_first_step() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("it", sampling=ENDLESS), 0, deadline_ns=1)
    grant(core, 1)
    assert drain(core) == ["it"]


def test_expiring_hopeless_requests_can_be_switched_off() -> None:
    core = FairnessCore(FairnessConfig(expire_hopeless=False))
    core.absorb(Credit(1, steps=((9,),), step_ns=10_000_000), 0)
    core.push(request("it", sampling=ENDLESS), 0, deadline_ns=10_000_000)
    assert drain(core) == ["it"]


@pytest.mark.parametrize(
    ("sampling", "has_stop_strings", "number"),
    [
        (SamplingParams(max_tokens=100), False, 100),
        (SamplingParams(max_tokens=100, stop_token_ids=frozenset({3})), False, 1),
        (SamplingParams(max_tokens=100), True, 1),
        (SamplingParams(max_tokens=100, min_tokens=20), True, 20),
    ],
)
def test_least_tokens_of_a_sample(
    sampling: SamplingParams, has_stop_strings: bool, number: int
) -> None:
    admitted = request("it", sampling=sampling)
    assert least_tokens(replace(admitted, has_stop_strings=has_stop_strings)) == number


def test_the_fastest_step_is_forgotten_after_two_windows() -> None:
    pace = FairnessCore(FairnessConfig()).part(FastestStep)
    assert pace.least_step_ns == 0
    pace.add(10)
    for _ in range(WINDOW - 1):
        pace.add(50)
    assert pace.least_step_ns == 10 * CAUTION
    for _ in range(2 * WINDOW):
        pace.add(50)
    assert pace.least_step_ns == 50 * CAUTION
