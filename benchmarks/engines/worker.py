"""What each engine's program has in common: it is told a workload per line, and answers with times.

    ENGINE.py FOLDER SHAPE THREADS

reads lines of JSON `[workload, seed]` and writes lines of JSON, a `Times` each. It first writes a
line with its version and what it holds in memory.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from workloads import SHAPES, WORKLOADS, Request, Workload, make_requests

_STATUS = Path("/proc/self/status")


@dataclass
class Times:
    """Of one run, in seconds.

    Attributes:
        total_s: From the first request to the last token.
        prefill_s: Until every completion had its first token; meaningless with arrivals.
        steps_s: Of the decode steps after that.
        ttft_s: Of each request, from its arrival to its first token, with arrivals only.
        tpot_s: Of each request, per further token, likewise.
        tokens: Generated.
        peak_bytes: Most memory that the process has held so far.
    """

    total_s: float
    prefill_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0
    peak_bytes: int = 0


class Engine(ABC):
    """One way to run a model.

    Attributes:
        version: What it is, for the table.
        held_bytes: Weights and KV cache, where known.
    """

    version: str
    held_bytes: int = 0

    @abstractmethod
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        """Loads the model in Transformers' format in `folder`, or what it makes of it beside it."""

    def can(self, workload: Workload) -> bool:
        """Whether it has a way to run this."""
        return not workload.rate

    @abstractmethod
    def run(self, workload: Workload, requests: list[Request]) -> Times:
        """Runs the requests, and forgets what it cached of earlier ones before."""


def serve(kind: type[Engine]) -> None:
    """Answers until the input ends."""
    # Libraries print what they like; the answers have a channel of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder, shape, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    before = peak_bytes()
    engine = kind(folder, shape, threads)
    about = {"version": engine.version, "held_bytes": engine.held_bytes, "before_bytes": before}
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        name, seed = json.loads(line)
        workload = WORKLOADS[name]
        if not engine.can(workload):
            print(json.dumps(None), file=answers)
            continue
        requests = make_requests(workload, SHAPES[shape]["vocab_size"], seed)
        times = engine.run(workload, requests)
        wanted = workload.samples * sum(request.new_tokens for request in requests)
        assert times.tokens == wanted, f"{times.tokens} tokens instead of {wanted}"
        times.peak_bytes = peak_bytes()
        print(json.dumps(asdict(times)), file=answers)


def peak_bytes() -> int:
    """Most memory that this program has held, in bytes.

    On Linux not `ru_maxrss`, which begins at what the process that started this one held.
    """
    if _STATUS.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rest_of(marks: list[float]) -> list[float]:
    """Differences of moments."""
    return [later - sooner for sooner, later in itertools.pairwise(marks)]
