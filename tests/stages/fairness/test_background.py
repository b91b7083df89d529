"""Requests of the lowest priority run while nothing else does."""

from __future__ import annotations

import msgspec

from nano_inference.bus.messages import Credit
from nano_inference.config import BACKGROUND, FairnessConfig
from nano_inference.stages.fairness import FairnessCore

from .requests import SECOND, drain, grant, request

LONG_AGO = -10_000 * SECOND


def core_with(*, beside: int = 0, samples: int = 3) -> FairnessCore:
    """A core whose background runs, with credits left."""
    core = FairnessCore(FairnessConfig(background_beside=beside))
    core.push(request("line", priority=BACKGROUND, samples=samples), LONG_AGO)
    grant(core, 8)
    assert drain(core) == ["line"]
    return core


def test_background_pauses_for_any_other_request_and_resumes_after_it() -> None:
    core = core_with()
    core.push(request("user", priority=-999), 0)
    assert drain(core) == ["user"]
    asked = [running.spec.seq_id for running in core.ask_to_pause(1)]
    assert len(asked) == 3
    assert core.ask_to_pause(2) == []
    core.absorb(Credit(3, paused=tuple(asked)), 3)
    assert core.pop(3) is None, "it waits while the other one runs"
    (user,) = [
        running.spec.seq_id
        for replica in core.replicas.values()
        for running in replica.running.values()
    ]
    core.absorb(Credit(1, ended=(user,)), 4)
    assert drain(core) == ["line+"] * 3


def test_background_never_ages() -> None:
    core = FairnessCore(FairnessConfig())
    core.push(request("line", priority=BACKGROUND), LONG_AGO)
    core.push(request("user"), 0)
    grant(core, 8)
    assert drain(core) == ["user"]
    assert core.num_queued == 1


def test_a_setting_lets_some_of_it_run_beside_others() -> None:
    core = core_with(beside=2, samples=1)
    core.push(request("user"), 0)
    core.push(request("more", priority=BACKGROUND), 0)
    core.push(request("most", priority=BACKGROUND), 0)
    assert drain(core) == ["user", "more"]
    assert core.ask_to_pause(1) == []
    core.configure(msgspec.structs.replace(core.config, background_beside=0))
    assert len(core.ask_to_pause(2)) == 2
