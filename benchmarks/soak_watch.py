"""Measurements of soak.py: memory, descriptors and threads of processes, Redis, files; and trends.

A trend is the slope of a straight line within the life of each process, after its warm-up: a
process that replaces a killed one has a level of its own, and the same slope. Its interval comes
from leaving out one tenth of the time after the other (a jackknife over blocks), since neighbouring
samples are not independent.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import anonymous_mb, command_line, descendants, pss_mb

BLOCKS = 10
T_OF_BLOCKS = 2.26
"""Student's t of 95 % with nine degrees of freedom."""
SHARED_MEMORY = Path("/dev/shm")
PSS = "PSS, MiB"
"""Proportional set size of all processes. It has no trend: each restart begins another level."""


class Sample(NamedTuple):
    """One value of a series: when, of which process (0 for none), and the value."""

    at_s: float
    pid: int
    value: float


def role_of(pid: int, main: str) -> str:
    """Return the role of a process of `nano-inference up`; "" if it has ended.

    Args:
        pid: Its id.
        main: The model whose stages have no prefix.
    """
    text = " ".join(command_line(pid))
    if not text:
        return ""
    if found := re.search(r"--stages (\w+)", text):
        replica = re.search(r"pipeline\.replica=(\d+)", text)
        stage = found[1] + (f".{replica[1]}" if replica and replica[1] != "0" else "")
        model = re.search(r"bus\.model=(\S+)", text)
        return stage if model is None or model[1] == main else f"{model[1]}: {stage}"
    if re.search(r"nano.inference up ", text):
        return "up"
    if "fork_server" in text:
        return "forks with torch" if text.rstrip().endswith("executor") else "forks"
    for name in ("gateway", "template_process", "grammar_trial", "decoder", "valkey", "redis"):
        if name in text:
            return name
    return "other"


class Watch:
    """Series of values.

    Attributes:
        series: By quantity and what it is of, such as ("memory, MiB", "executor").
    """

    def __init__(self, up: int, server: int, client: Any, folder: Path, main: str) -> None:
        """Args: processes of `up` and of Redis, a client of it, the temporary folder, the model."""
        self._up, self._server, self._client = up, server, client
        self._folder, self._main = folder, main
        self._start = time.monotonic()
        self.series: dict[tuple[str, str], list[Sample]] = {}

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def begin(self) -> None:
        """Count times from now on."""
        self._start = time.monotonic()

    async def run(self, every_s: float) -> None:
        """Take samples until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(every_s)

    async def sample(self) -> None:
        """Take one sample of each series."""
        at_s = self.now_s
        await asyncio.to_thread(self._look, at_s)
        info = await self._client.info("memory")
        self._add("Redis, MiB", "data", at_s, 0, info["used_memory"] / 2**20)
        self._add("Redis, keys", "all", at_s, 0, await self._client.dbsize())
        clients = await self._client.info("clients")
        self._add("Redis, clients", "all", at_s, 0, clients["connected_clients"])

    def _look(self, at_s: float) -> None:
        """Sample processes and files."""
        seen = self._processes([*descendants(self._up), self._server], at_s)
        files = {
            "shared memory": sum(1 for _ in SHARED_MEMORY.glob("*nano*")),
            "memfd": sum(map(_memfds, seen)),
            "temporary": sum(1 for _ in self._folder.rglob("*")),
        }
        for name, count in files.items():
            self._add("files", name, at_s, 0, count)

    def _processes(self, pids: Iterable[int], at_s: float) -> list[int]:
        whole, seen = 0.0, []
        for pid in pids:
            if not (role := role_of(pid, self._main)):
                continue
            with contextlib.suppress(OSError):
                threads = len(os.listdir(f"/proc/{pid}/task"))
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
                self._add("memory, MiB", role, at_s, pid, anonymous_mb(pid))
                self._add("threads", role, at_s, pid, threads)
                self._add("descriptors", role, at_s, pid, descriptors)
                whole += pss_mb(pid)
                seen.append(pid)
        self._add(PSS, "all", at_s, 0, whole)
        self._add("processes", "all", at_s, 0, len(seen))
        return seen

    def _add(self, quantity: str, name: str, at_s: float, pid: int, value: float) -> None:
        self.series.setdefault((quantity, name), []).append(Sample(at_s, pid, value))


def _memfds(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += "memfd:" in os.readlink(entry.path)
    return count


# --- trends -------------------------------------------------------------------------------------


class Trend(NamedTuple):
    """The trend of a series.

    Attributes:
        level: The median.
        per_hour: The slope.
        low, high: Its interval of 95 %.
        verdict: "flat", "grows", "falls", or "unsure" where the interval has both.
    """

    level: float
    per_hour: float
    low: float
    high: float
    verdict: str


def trend(samples: Sequence[Sample], warm_s: float, least: float, share: float = 0.02) -> Trend:
    """Return the trend of a series.

    Args:
        samples: The series.
        warm_s: Seconds of the series, and of each process, that don't count.
        least: Growth per hour that doesn't matter.
        share: The same, as a share of the level, if that is more.
    """
    first: dict[int, float] = {}
    for each in samples:
        first.setdefault(each.pid, each.at_s)
    used = [each for each in samples if each.at_s >= max(first[each.pid], 0) + warm_s]
    values = np.array([each.value for each in used])
    level = float(np.median(values)) if len(used) else float("nan")
    if len(used) < 4 * BLOCKS:
        return Trend(level, float("nan"), float("nan"), float("nan"), "unsure")
    hours = np.array([each.at_s for each in used]) / 3600
    lives = np.array([each.pid for each in used])
    slope = _slope(hours, values, lives)
    edges = np.quantile(hours, np.linspace(0, 1, BLOCKS + 1))
    places = np.clip(np.searchsorted(edges, hours, side="right") - 1, 0, BLOCKS - 1)
    without = []
    for block in range(BLOCKS):
        keep = places != block
        without.append(_slope(hours[keep], values[keep], lives[keep]))
    error = float(np.sqrt((BLOCKS - 1) / BLOCKS * np.sum((without - np.mean(without)) ** 2)))
    low, high = slope - T_OF_BLOCKS * error, slope + T_OF_BLOCKS * error
    allowed = max(least, share * level)
    if low > allowed:
        verdict = "grows"
    elif high < -allowed:
        verdict = "falls"
    else:
        verdict = "flat" if -allowed <= low and high <= allowed else "unsure"
    return Trend(level, slope, low, high, verdict)


def _slope(hours: Any, values: Any, lives: Any) -> float:
    """Return the common slope within lives (least squares, each life with a level of its own)."""
    x, y = hours.copy(), values.astype(float).copy()
    for life in np.unique(lives):
        mine = lives == life
        x[mine] -= x[mine].mean()
        y[mine] -= y[mine].mean()
    spread = float(x @ x)
    return float(x @ y) / spread if spread else 0.0


LEAST = {"memory, MiB": 2.0, "Redis, MiB": 1.0, "Redis, keys": 20.0}
"""Growth per hour that doesn't matter; of counts it is 1."""


def trends(watch: Watch, warm_s: float) -> dict[str, dict[str, Any]]:
    """Return the trend of each series, by its name."""
    found = {}
    for (quantity, name), samples in sorted(watch.series.items()):
        if quantity == PSS:
            continue
        result = trend(samples, warm_s, LEAST.get(quantity, 1.0))
        found[f"{quantity}: {name}"] = {
            key: value if isinstance(value, str) else None if math.isnan(value) else round(value, 3)
            for key, value in result._asdict().items()
        }
    return found
