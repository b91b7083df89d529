"""Phases of a handover between two replicas, and a replica that sends SIGKILL when it reaches one.

As a script this file is `nano-inference` with these phases marked, and with its state written to
a file at SIGUSR1: `kill_phases.py FOLDER ROLE ARGUMENTS...`.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nano_inference.bus.control import TiersChanged
from nano_inference.bus.steps import StepSummary
from nano_inference.stages.batching.core import BatchingCore
from nano_inference.stages.batching.parts.handover.arrivals import Arrivals
from nano_inference.stages.batching.parts.handover.departures import Departures
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers
from nano_inference.stages.batching.plans import PlanDraft

BY_GIVER = ("before the offer", "offered", "first token", "handing over")
IN_FAIRNESS = ("reported to fairness",)
BY_TAKER = (
    "announced",
    "awaiting a step",
    "reading",
    "between two blocks",
    "read and not loaded",
    "decoding",
)
PHASES = (*BY_GIVER, *IN_FAIRNESS, *BY_TAKER)
"""In order. Each is reached by the side that is named."""


def lay(folder: Path, phase: str, pid: int) -> None:
    """Have a process killed once some process reaches a phase."""
    (folder / "new").write_text(str(pid))
    (folder / "new").rename(folder / phase)


def sprung(folder: Path, phase: str) -> bool:
    """Whether the process that `lay` named has been killed."""
    return (folder / f"{phase}, sprung").exists()


def reach(folder: Path, phase: str) -> None:
    """Kill the process that `lay` named for this phase, once."""
    taken = folder / f"{phase}, sprung"
    try:
        (folder / phase).rename(taken)
    except FileNotFoundError:
        return
    os.kill(int(taken.read_text()), signal.SIGKILL)


def wrap(owner: Any, method: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around(original, self, *args)`."""
    original = getattr(owner, method)
    setattr(owner, method, lambda *args, **kwargs: around(original, *args, **kwargs))


def mark_phases(folder: Path) -> None:
    """Call `reach` wherever this process reaches a phase."""
    # The executor's parts import torch, so only processes that run one come here.
    from nano_inference.stages.executor import stage as executor_stage
    from nano_inference.stages.executor.runner.tiers.host_slots import HostSlots
    from nano_inference.stages.executor.runner.tiers.transports.peers import Peers
    from nano_inference.stages.executor.runner.tiers.transports.slots import SlotMemory

    def offer(original: Any, self: Departures, draft: PlanDraft) -> None:
        if any(seq.hands_over and seq.num_planned > len(seq.token_ids) for seq in draft.seqs):
            reach(folder, "before the offer")
        original(self, draft)

    def offered(original: Any, self: HostSlots, moves: Any) -> None:
        original(self, moves)
        reach(folder, "offered")

    def arrive(original: Any, self: Arrivals, message: Any, *rest: Any) -> Any:
        reach(folder, "announced")
        return original(self, message, *rest)

    def wait(original: Any, self: Peers, *args: Any) -> None:
        reach(folder, "awaiting a step")
        original(self, *args)

    def absorb_handovers(original: Any, self: Departures, *args: Any) -> Any:
        leaving = original(self, *args)
        if leaving:
            reach(folder, "handing over")
        return leaving

    def first_tokens(original: Any, *args: Any) -> Any:
        handovers = [*original(*args)]
        if handovers:
            reach(folder, "first token")
        return handovers

    def read(original: Any, self: SlotMemory, wanted: Any) -> Any:
        reach(folder, "reading")
        whole = original(self, wanted[:1])
        reach(folder, "between two blocks")
        return whole + original(self, wanted[1:])

    def changed(original: Any, self: KVTiers, changes: TiersChanged) -> None:
        original(self, changes)
        if changes.fetched:
            reach(folder, "read and not loaded")

    def absorb(original: Any, self: BatchingCore, result: StepSummary) -> None:
        original(self, result)
        if any(len(seq.token_ids) > seq.num_prompt_tokens + 2 for seq in self.index.values()):
            reach(folder, "decoding")

    wrap(Departures, "planned", offer)
    wrap(HostSlots, "offer", offered)
    wrap(executor_stage, "first_tokens", first_tokens)
    wrap(Departures, "absorb", absorb_handovers)
    wrap(Arrivals, "receive", arrive)
    wrap(Peers, "wait", wait)
    wrap(SlotMemory, "read", read)
    wrap(KVTiers, "changed", changed)
    wrap(BatchingCore, "absorb", absorb)


def write_state_when_asked(path: Path) -> None:
    """At SIGUSR1 write what this process's batching core holds. Beforehand write the process's id
    beside it."""
    cores: list[BatchingCore] = []

    def remember(original: Any, self: BatchingCore, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        cores[:] = [self]

    def write() -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(state_of(cores[0]) if cores else {}))
        new.rename(path)

    def asked(number: int, frame: Any) -> None:
        # Between two callbacks: a signal comes in the middle of a core's work, too.
        try:
            asyncio.get_running_loop().call_soon_threadsafe(write)
        except RuntimeError:  # none runs yet
            write()

    wrap(BatchingCore, "__init__", remember)
    signal.signal(signal.SIGUSR1, asked)
    path.with_suffix(".pid").write_text(str(os.getpid()))


def state_of(core: BatchingCore) -> dict[str, int]:
    """Return what a batching core with tiers holds for sequences; nothing at rest."""
    tiers = core.part("tiers").blocks
    arrivals, departures = core.part("arrivals"), core.part("departures")
    core.check()
    return {
        "sequences": len(core.index),
        "blocks": core.cache.num_blocks - core.cache.num_free_blocks(),
        "offers": len(tiers._offers)
        + (len(departures._leavers) if departures is not None else 0)
        + (len(arrivals._arrivals) if arrivals is not None else 0),
        "pinned": len(tiers._pinned),
        "fetches": len(tiers._fetching) + len(tiers._receiving),
        "different": tiers.difference is not None,
    }


def main() -> None:
    folder, role = Path(sys.argv[1]), sys.argv[2]
    mark_phases(folder)
    write_state_when_asked(folder / f"{role}.json")
    sys.argv = ["nano-inference", *sys.argv[3:]]
    runpy.run_module("nano_inference", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
