"""The whole engine under faults that are drawn from a seed, in simulated time; checks every token.

    python -m tests.simulation --seeds 0..999
    python -m tests.simulation --seed 17 --trace

A story that fails is made short and printed. Exit status 1 means that one failed. See
docs/simulation.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from rich.console import Console
from rich.table import Table

from .shrink import settings_of, shrink, table_of, violations_of
from .story import Story, draw
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, metavar="N", help="one simulation")
    which.add_argument("--seeds", type=seeds_in, metavar="A..B", help="default: 0..99")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Hashes of texts decide the order of sets, and are fixed at the start of a process only.
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    seeds = options.seeds or range(100) if options.seed is None else [options.seed]

    console, failed = Console(), 0
    requests, samples, began = 0, 0, time.process_time()
    for number in seeds:
        world = World(draw(number), trace=options.trace)
        world.run()
        requests += len(world.story.requests)
        samples += sum(request.n for request in world.story.requests)
        for line in world.lines or ():
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        if world.violations:
            failed += 1
            console.print(f"seed {number}: {world.violations[0]}", soft_wrap=True, markup=False)
            print_short(console, world.story)
    seconds = time.process_time() - began
    digest = f", digest {world.digest()}" if len(seeds) == 1 else ""
    console.print(
        f"{len(seeds)} seeds, {failed} failed; {requests} requests with {samples} samples in "
        f"{seconds:.1f} s of one processor ({requests / max(seconds, 1e-9):.0f} a second){digest}",
        soft_wrap=True,
    )
    return 1 if failed else 0


def seeds_in(text: str) -> range:
    first, _, last = text.partition("..")
    if not (seeds := range(int(first), int(last) + 1)):
        raise ValueError
    return seeds


def print_short(console: Console, story: Story) -> None:
    short = shrink(story)
    table = Table("ms", "what", "details", title=settings_of(short), box=None)
    for row in table_of(short):
        table.add_row(*row)
    console.print(table)
    for what in violations_of(short):
        console.print(f"  {what}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
