"""`up` where it can't start, and where it is killed."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from nano_inference.cli.processes import Processes
from nano_inference.config import STAGES, load_config
from nano_inference.pipeline.supervisor import StageFailed

from ..commands import Command
from ..processes import processes_of
from .conftest import Run, assert_refused
from .servers import free_port

LIMIT_S = 60


@pytest.fixture
def patient() -> Retry:
    """While a server starts."""
    return Retry(ConstantBackoff(0.05), LIMIT_S * 20)


def test_redis_is_away(run: Run, closed_port: int) -> None:
    assert_refused(run("up", "--bus", f"redis://127.0.0.1:{closed_port}"), "connection refused")


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
def test_everything_ends_with_a_killed_parent(patient: Retry, tmp_path: Path) -> None:
    """The stages too where they do nothing by themselves, as in one long call."""
    port = free_port()
    up = Command("up", "--port", str(port), log=tmp_path / "log")
    with Redis(port=port, retry=patient) as redis:
        server = os.pidfd_open(redis.info("server")["process_id"])
        # The stages come after whatever else `up` has to prepare.
        while not redis.xlen("nano:stages") or len(stages_of(up)) < len(STAGES):
            assert up.poll() is None
            time.sleep(0.05)
    stages = stages_of(up)
    assert len(stages) == len(STAGES)
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


def test_it_goes_on_without_a_replica_while_there_is_another() -> None:
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
