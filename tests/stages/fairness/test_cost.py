"""A decision takes as many operations with thousands of waiting requests as with a hundred."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from nano_inference.bus.messages import AdmittedRequest, Credit
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import FairnessCore

from .requests import grant, request

SETTINGS = {
    "default": FairnessConfig(),
    "everything": FairnessConfig(
        enable_preemption=True, max_timeslice_tokens=4, locality_tokens=1000, deadline_order=True
    ),
}


def calls_per_decision(config: FairnessConfig, requests: int, tenants: int) -> float:
    """Calls of functions, Python's and built in, for each of 100 ends and dispatches."""
    core = FairnessCore(config)
    for number in range(requests + 120):
        core.push(
            request(str(number), priority=number % 3, tenant=str(number % tenants)),
            number,
            10**15 + number,
        )
    running: list[int] = []

    def dispatch(now_ns: int) -> None:
        while (dispatched := core.pop(now_ns)) is not None:
            assert isinstance(dispatched.message, AdmittedRequest)
            running.extend(spec.seq_id for spec in dispatched.message.sequences)
        core.ask_to_pause(now_ns)
        core.expire(now_ns)

    grant(core, 20)
    dispatch(10**6)
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for step in range(100):
            seq_id = running.pop(0)
            report = Credit(1, (tuple(running),), ((seq_id, 1),), ended=(seq_id,))
            core.absorb(report, 10**6 + step)
            dispatch(10**6 + step)
    finally:
        sys.setprofile(before)
    assert core.num_queued == requests
    return calls / 100


@pytest.mark.soak
@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_operations_of_a_decision_do_not_grow_with_the_queue(
    config: FairnessConfig, soak: bool
) -> None:
    most = 10_000 if soak else 2_000
    few = calls_per_decision(config, 100, 10)
    many = calls_per_decision(config, most, 10)
    tenants = calls_per_decision(config, most, most // 10)
    assert many <= 1.3 * few
    assert tenants <= 2 * few
