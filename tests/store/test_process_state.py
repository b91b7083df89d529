"""The kernel tells of a process whether it runs, and the board tells it on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import msgspec
import pytest

from nano_inference.bus import Bus
from nano_inference.store.board import StageReport
from nano_inference.store.process_state import ProcessState, identity_of, state_of

from ..buses import STORES

BUSES = STORES
LIMIT_S = 20


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def until(child: subprocess.Popen[bytes], identity: str, state: ProcessState) -> None:
    """Waits until the kernel has obeyed a signal."""
    ends_at = time.monotonic() + LIMIT_S
    while state_of(child.pid, identity) != state:
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def test_a_process_is_stopped_goes_on_and_ends(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child.pid)
    assert state_of(child.pid, identity) == "running"
    child.send_signal(signal.SIGSTOP)
    until(child, identity, "stopped")
    child.send_signal(signal.SIGCONT)
    until(child, identity, "running")
    # It counts as ended before its parent has taken notice.
    child.kill()
    until(child, identity, "gone")
    child.wait()
    assert state_of(child.pid, identity) == "gone"


def test_a_busy_process_runs() -> None:
    assert state_of(os.getpid(), identity_of(os.getpid())) == "running"


def test_a_process_with_the_pid_of_another_is_not_that_one(child: subprocess.Popen[bytes]) -> None:
    machine, _, started = identity_of(child.pid).rpartition("/")
    assert state_of(child.pid, f"{machine}/{int(started) - 1}") == "gone"


@pytest.mark.parametrize("identity", ["", "7", "other-boot/4026531836/7"])
def test_nothing_is_known_of_a_process_elsewhere(identity: str) -> None:
    assert state_of(2**22 + 1, identity) == "unknown"
    assert state_of(os.getpid(), identity) == "unknown"


async def test_the_board_shows_the_state_of_processes(
    bus: Bus, child: subprocess.Popen[bytes]
) -> None:
    identity = identity_of(child.pid)
    here = StageReport(
        lane="0",
        stage="executor",
        incarnation="a",
        host="h",
        pid=child.pid,
        epoch=1,
        state="ready",
        process=identity,
        # Only the reader knows it.
        process_state="gone",
    )
    elsewhere = msgspec.structs.replace(here, stage="admission", process="another machine/7")

    async def states() -> list[tuple[str, str]]:
        await bus.store.board.report([here, elsewhere])
        return [(each.stage, each.process_state) for each in await bus.store.board.read()]

    assert await states() == [("admission", "unknown"), ("executor", "running")]
    child.send_signal(signal.SIGSTOP)
    until(child, identity, "stopped")
    assert await states() == [("admission", "unknown"), ("executor", "stopped")]
    child.kill()
    until(child, identity, "gone")
    assert await states() == [("admission", "unknown"), ("executor", "gone")]
