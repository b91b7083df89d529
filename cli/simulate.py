"""`nano-inference simulate`: the whole engine in one thread, in simulated time, from a seed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ..config import ConfigError
from .options import option
from .terminal import stdout

if TYPE_CHECKING:
    from ..simulation.story import Story


def simulate(
    seed: Annotated[int | None, option("--seed N", "One simulation.", min=0)] = None,
    seeds: Annotated[str, option("--seeds A..B", "Those from A to B.")] = "0..99",
    trace: Annotated[bool, option("--trace", "Print all that happens; with --seed.")] = False,
) -> None:
    """Simulate the whole engine under faults, drawn from a seed, and check every token.

    nano-inference simulate --seeds 0..999

    Time, delays, the order of tasks, Redis and the model are simulated; the stages, the bus and the
    client are real. The same seed runs the same way, byte for byte. A story that fails is made
    short and printed. Exit status 1 means that one failed. See docs/simulation.md.
    """
    first, last = (seed, seed) if seed is not None else _range(seeds)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Hashes of texts decide the order of sets, and are fixed at the start of a process only.
        wanted = ["--seeds", f"{first}..{last}", *(["--trace"] if trace else [])]
        command = [sys.executable, "-m", "nano_inference", "simulate", *wanted]
        raise typer.Exit(subprocess.call(command, env={**os.environ, "PYTHONHASHSEED": "0"}))
    from ..simulation.story import draw
    from ..simulation.world import World

    console, failed = stdout(), 0
    requests, samples, began = 0, 0, time.process_time()
    for number in range(first, last + 1):
        world = World(draw(number), trace=trace)
        world.run()
        requests += len(world.story.requests)
        samples += sum(request.n for request in world.story.requests)
        for line in world.lines or ():
            console.print(line, soft_wrap=True)
        if world.violations:
            failed += 1
            console.print(f"seed {number}: {world.violations[0]}", soft_wrap=True)
            _print_short(world.story)
    seconds = time.process_time() - began
    digest = f", digest {world.digest()}" if first == last else ""
    console.print(
        f"{last - first + 1} seeds, {failed} failed; {requests} requests with {samples} samples in "
        f"{seconds:.1f} s of one processor ({requests / max(seconds, 1e-9):.0f} a second){digest}",
        soft_wrap=True,
    )
    if failed:
        raise typer.Exit(1)


def _range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not (dots and first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(
            f"--seeds must be A..B, two numbers of which B is not smaller; got {text}"
        )
    return int(first), int(last)


def _print_short(story: Story) -> None:
    from ..simulation.shrink import settings_of, shrink, table_of, violations_of

    short = shrink(story)
    table = Table("ms", "what", "details", title=settings_of(short), box=None)
    for row in table_of(short):
        table.add_row(*row)
    console = stdout()
    console.print(table)
    for what in violations_of(short):
        console.print(f"  {what}", soft_wrap=True)
