"""An idle process gives back what a burst of work has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 60

PROGRAM = """
import anyio
import gc
import os
from nano_inference.cli import process

process.LOOK_S = 0.05

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def burst():
    cycles = [[bytearray(200)] for _ in range(200_000)]
    for each in cycles:
        each.append(each)

async def main():
    process.freeze_memory()
    async with anyio.create_task_group() as group:
        group.start_soon(process.trim_memory_forever)
        await anyio.sleep(0)
        start = resident()
        gc.disable()  # so that all of it is left
        burst()
        assert resident() > start + (64 << 20)
        with anyio.fail_after(30):
            while resident() > start + (32 << 20):
                await anyio.sleep(0.05)
        group.cancel_scope.cancel()

anyio.run(main)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_memory_is_trimmed_after_a_burst() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONMALLOC": "malloc"},  # whose memory glibc can give back
    )
    assert ran.returncode == 0, ran.stderr
