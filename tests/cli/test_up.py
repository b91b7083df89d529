"""`up`: how it starts and ends, and the processes of several models."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from nano_inference.cli.app import _status_of
from nano_inference.cli.children import Forks, Spawned, spawn
from nano_inference.cli.processes import CanNotStart, Printer, Processes
from nano_inference.cli.up import MetricsPorts
from nano_inference.config import (
    STAGES,
    ConfigError,
    LaneReplaced,
    as_text,
    load_config,
    parse_value,
)
from nano_inference.pipeline.supervisor import StageFailed
from nano_inference.store.board import Restarts
from nano_inference.store.redis.embedded import EmbeddedPassword, read_password

from ..commands import Command
from ..processes import processes_of
from .conftest import Run, assert_refused
from .servers import free_port

LIMIT_S = 120


def test_an_address_that_others_reach(run: Run, closed_port: int) -> None:
    """Is refused before there is any process; asked for it, `up` goes on, to a bus that is away."""
    bus = f"redis://127.0.0.1:{closed_port}"
    options = ("up", "--bus", bus, "--gateway", "1", "--set", "gateway.host=0.0.0.0")
    assert_refused(run(*options), "without keys whoever reaches it may replace the weights")
    assert_refused(run(*options, "--insecure"), "can't reach Redis")


def test_busy_port(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert_refused(run("up", "--port", str(port)), f"can't start on port {port}")


@pytest.mark.slow
def test_all_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    """The stages too where they do nothing by themselves, as in one long call."""
    port, log = free_port(), tmp_path / "log"
    up = Command("up", "--port", str(port), log=log)
    retry, password = Retry(ConstantBackoff(0.05), LIMIT_S * 20), EmbeddedPassword(port)
    with Redis(port=port, retry=retry, credential_provider=password) as redis:
        server = os.pidfd_open(redis.info("server")["process_id"])
        # The stages come after whatever else `up` has to prepare.
        while not redis.xlen("nano:stages") or len(stages_of(up)) < len(STAGES):
            assert up.poll() is None
            time.sleep(0.05)
    stages = stages_of(up)
    assert len(stages) == len(STAGES)
    shown = [Path(f"/proc/{each}/cmdline").read_text() for each in (up.pid, *stages)]
    assert len(read_password(port)) > 32
    assert not any(read_password(port) in text for text in (*shown, log.read_text()))
    for stage in stages:
        os.kill(stage, signal.SIGSTOP)
    ends = [server, *map(os.pidfd_open, stages)]
    os.kill(up.pid, signal.SIGKILL)
    up.wait()
    up.close()
    # A process's descriptor is readable once the process has ended.
    for end in ends:
        gone, _, _ = select.select([end], [], [], LIMIT_S)
        os.close(end)
        assert gone
    with socket.create_server(("127.0.0.1", port)):
        pass  # the next one can have the port


def stages_of(up: Command) -> list[int]:
    """The processes of the stages that an `up` has started."""
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    titles = {int(each): Path(f"/proc/{each}/cmdline").read_text() for each in children}
    return [pid for pid, title in titles.items() if "run --with-parent" in title]


def test_a_lost_replica_is_tolerated_while_another_runs() -> None:
    def processes(replicas: int) -> Processes:
        return processes_of(load_config(env={}, overrides={"pipeline.replicas": replicas}))

    error = StageFailed("it failed too often")
    three = processes(3)
    three.give_up("executor.2", error)
    three.give_up("batching.2", error)
    three.give_up("executor", error)
    with pytest.raises(StageFailed):
        three.give_up("batching.1", error)
    with pytest.raises(StageFailed):
        processes(3).give_up("streaming", error)
    with pytest.raises(StageFailed):
        processes(1).give_up("executor", error)


async def test_without_a_stage_for_good_no_request_is_awaited() -> None:
    processes = processes_of(load_config(env={}))
    said: list[str] = []
    processes._say = said.append  # type: ignore[method-assign]
    with pytest.raises(StageFailed):
        processes.give_up("executor", StageFailed("it failed too often"))
    assert said == ["giving up, stopping: it failed too often"]
    drained: list[tuple[str, bool]] = []

    async def stop(role: str, limit_s: float, *, drain: bool = False) -> None:
        drained.append((role, drain))

    processes._stop = stop  # type: ignore[method-assign]
    await processes.stop(drain=True)
    assert drained[0] == ("admission", False)


class Sleepers:
    """Starts a process that does nothing, instead of a stage, and stops it at once."""

    async def start(self, role: str, command: Sequence[str]) -> Spawned:
        child = Spawned(await anyio.open_process(["sleep", "1000"], stdin=subprocess.PIPE))
        child.send_signal(signal.SIGSTOP)
        return child

    def ended(self, child: Spawned) -> None:
        pass


async def test_a_stopped_rank_0_is_killed_after_its_timeout() -> None:
    """So that its successor starts; only the kernel tells of it, since nothing else of it runs."""
    settings = {"engine.tensor_parallel": 2, "engine.rank_timeout_s": 0.5}
    processes = processes_of(load_config(env={}, overrides=settings), forks=cast(Forks, Sleepers()))
    with anyio.fail_after(LIMIT_S):
        assert await processes._run_once("executor") == -signal.SIGKILL


class Ending(Sleepers):
    """Starts processes that end with these statuses."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = [*statuses]
        self.commands: list[Sequence[str]] = []

    async def start(self, role: str, command: Sequence[str]) -> Spawned:
        self.commands.append(command)
        return await spawn(["sh", "-c", f"exit {self.statuses.pop(0)}"], None)


@pytest.mark.parametrize(
    ("forks", "expected"),
    [
        (Ending(2), CanNotStart),
        (Ending(1, 2, 2), StageFailed),  # files that can't be read for a while
        (Ending(1, _status_of(LaneReplaced("")) or 0), CanNotStart),
    ],
)
async def test_a_stage_that_has_run_is_restarted_though_it_can_not_start(
    forks: Ending, expected: type[Exception]
) -> None:
    settings = {"pipeline.max_restarts": 2, "pipeline.restart_backoff_s": 0}
    processes = processes_of(load_config(env={}, overrides=settings), forks=cast(Forks, forks))
    with anyio.fail_after(LIMIT_S), pytest.raises(expected):
        await processes._keep_running("fairness")
    assert not forks.statuses


async def test_a_restarted_process_is_given_the_number_and_cause_of_its_restarts() -> None:
    settings = {"pipeline.max_restarts": 2, "pipeline.restart_backoff_s": 0}
    forks = Ending(1, 7, 1)
    processes = processes_of(load_config(env={}, overrides=settings), forks=cast(Forks, forks))
    with anyio.fail_after(LIMIT_S), pytest.raises(StageFailed):
        await processes._keep_running("fairness")
    restarts = [_restarts_in(command) for command in forks.commands]
    causes = ["", "it ended with status 1", "it ended with status 7"]
    assert [(each.count, each.cause) for each in restarts] == list(enumerate(causes))


def _restarts_in(command: Sequence[str]) -> Restarts:
    return msgspec.json.decode(command[command.index("--restarted") + 1], type=Restarts)


def test_in_a_container_every_line_of_up_is_json_with_its_process() -> None:
    out = StringIO()
    printer = Printer(["a"], out, as_json=True)
    printer.say("starting", "a")
    printer.line("a", "executor", '{"event": "model_loaded", "level": "info"}')
    printer.line("a", "gateway", "nano-inference: the port is taken")
    printer.line("", "executor", "Warning: [1]")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    found = [[line.get(name) for name in ("process", "model", "event", "level")] for line in lines]
    assert found == [
        ["up", "a", "starting", "info"],
        ["executor", "a", "model_loaded", "info"],
        ["gateway", "a", "nano-inference: the port is taken", "error"],
        ["executor", None, "Warning: [1]", "info"],
    ]


# --- several models -------------------------------------------------------------------------------


def test_each_process_has_a_port_for_its_metrics() -> None:
    ports = MetricsPorts(9000)
    assert tuple(ports.gateway) == (9001,)
    assert ports.of("a", 5) == range(9002, 9007)
    assert ports.of("b", 7) == range(9007, 9014)
    assert ports.of("a", 5) == range(9002, 9007)
    assert MetricsPorts(0).of("a", 5) == MetricsPorts(0).gateway == ()
    with pytest.raises(ConfigError, match="metrics_port"):
        MetricsPorts(65_530).of("a", 5)


@pytest.mark.parametrize(
    "value", ["a: b # c", "7", 7, 1.5, True, ["x", "7", "a b"], {"a": "/b c"}, [], "x" * 200]
)
def test_settings_of_a_model_get_through_a_command_line(value: Any) -> None:
    assert parse_value(as_text(value)) == value
    assert "\n" not in as_text(value)
