"""A lane that a living process serves: refused to a second `up`, and the successor's name."""

from __future__ import annotations

import os
from contextlib import aclosing
from typing import Any

import pytest

from nano_inference.bus import Bus, open_bus
from nano_inference.cli.occupied import is_alive, refuse_if_served, successor
from nano_inference.config import BusConfig, ConfigError
from nano_inference.store.board import StageReport
from nano_inference.store.process_state import identity_of

HERE = identity_of(os.getpid())


def report(**fields: Any) -> StageReport:
    given = {"lane": "0", "incarnation": "a", "host": "h", "pid": os.getpid(), "epoch": 1}
    more = {"stage": "admission", "state": "ready", "process": HERE}
    return StageReport(**{**given, **more, **fields})


async def test_a_lane_of_a_living_process_is_refused(redis_url: str) -> None:
    config = BusConfig(url=redis_url, prefix=f"occupied-{os.getpid()}")
    async with aclosing(open_bus(config)) as bus:
        await check_lane(bus, config)


async def check_lane(bus: Bus, config: BusConfig) -> None:
    await refuse_if_served(config, ["admission"])
    dead = report(stage="fairness", pid=4_000_000, process=HERE.rpartition("/")[0] + "/1")
    elsewhere = report(stage="executor.1")
    await bus.store.board.report([dead, elsewhere, report(lane="b")])
    await refuse_if_served(config, ["admission", "fairness"])
    await bus.store.board.report([report()])
    served = rf"lane 0 is served by {os.getpid()}@h .*bus\.lane.*--take-over"
    with pytest.raises(ConfigError, match=served):
        await refuse_if_served(config, ["admission"])
    assert await successor(config, "admission", 1) == f"{os.getpid()}@h"
    assert await successor(config, "admission", os.getpid()) == ""


@pytest.mark.parametrize(
    ("age_s", "passed_s", "alive"), [(1.0, 0.0, False), (2.9, 3.0, False), (0.4, 3.0, True)]
)
def test_a_process_elsewhere_lives_if_it_goes_on_reporting(
    age_s: float, passed_s: float, alive: bool
) -> None:
    far = report(process="other/1", process_state="unknown", age_s=age_s)
    assert is_alive(far, passed_s) is alive
