"""All processes that `up` has started end with it, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nano_inference.cli.children import Watchdog

LIMIT_S = 60
PROGRAM = """
import subprocess, sys
from nano_inference.cli.children import Watchdog

watchdog = Watchdog(grace_s=0)
sleeping = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(3)]
for each in sleeping:
    watchdog.add(-each.pid)
watchdog.remove(-sleeping[1].pid)
print(*(each.pid for each in sleeping), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sleeping() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that watches the first and the last of three others, and these."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        others = [int(each) for each in parent.stdout.readline().split()]
        yield parent, others
        parent.kill()
        os.kill(others[1], signal.SIGKILL)


def test_targets_end_with_the_process_that_was_killed(
    sleeping: tuple[subprocess.Popen[str], list[int]],
) -> None:
    parent, others = sleeping
    first, forgotten, last = map(os.pidfd_open, others)
    parent.kill()
    for each in (first, last):
        ended, _, _ = select.select([each], [], [], LIMIT_S)
        assert ended
        os.close(each)
    ended, _, _ = select.select([forgotten], [], [], 0)
    assert not ended
    os.close(forgotten)


def test_closing_kills_nothing() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        watchdog = Watchdog(grace_s=0)
        watchdog.add(-process.pid)
        watchdog.close()
        assert process.poll() is None
