"""`health`, as probes use it."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest
from redis import Redis

from nano_inference.bus import StageReport
from nano_inference.bus.keys import Keys
from nano_inference.config import STAGES, Config

from .conftest import Run
from .test_clients import until_ready
from .test_errors import assert_refused


@pytest.fixture
def told(on_nobody: str, redis_url: str) -> Any:
    """Puts reports of processes on this host on the board."""

    def tell(**changed: dict[str, Any]) -> None:
        reports = []
        for stage in STAGES:
            given = {"incarnation": stage, "pid": 1, "epoch": 5, "state": "ready", "lane": "0"}
            given |= {"host": socket.gethostname(), **changed.get(stage, {})}
            reports.append(StageReport(stage=stage, **given))
        with Redis.from_url(redis_url) as redis:
            redis.xadd(Keys(on_nobody).stages, {"json": msgspec.json.encode(reports)})

    return tell


def test_nobody_is_there(run: Run, on_nobody: str) -> None:
    for question in ("--live", "--ready"):
        ran = run("health", question)
        assert ran.status == 1
        assert "no stage of lane 0 on" in ran.stdout


def test_a_running_pipeline(run: Run, on_served: Config) -> None:
    until_ready(run)
    assert run("health")[:2] == (0, "ready\n")
    assert run("health", "--live")[:2] == (0, "live\n")
    assert run("health", "--stage", "executor", "--stage", "batching").status == 0
    ran = run("health", "--host", "elsewhere", "--stage", "executor")
    assert ran.status == 1
    assert "the executor stage of lane 0 on elsewhere was not heard of" in ran.stdout


def test_live_and_not_ready(run: Run, told: Any) -> None:
    told(executor={"state": "starting", "reason": "it is loading", "epoch": 0})
    assert run("health", "--live").status == 0
    assert run("health")[:2] == (1, "executor is starting: it is loading\n")
    assert run("health", "--stage", "streaming").status == 0


def test_in_an_older_epoch_than_the_lane(run: Run, told: Any) -> None:
    told(streaming={"epoch": 4, "host": "elsewhere"}, executor={"epoch": 3})
    ran = run("health")
    assert (ran.status, ran.stdout) == (1, "executor has not come into the current epoch\n")


def test_redis_is_away(run: Run, closed_port: int) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    live, ready = run("health", "--live", "--bus", url), run("health", "--bus", url)
    assert (live.status, ready.status) == (0, 1)
    assert live.stdout.startswith("unknown: can't reach Redis")
    assert ready.stdout.startswith("not ready: can't reach Redis")


def test_unknown_stage(run: Run) -> None:
    assert_refused(run("health", "--stage", "exec"), "did you mean 'executor'?")
