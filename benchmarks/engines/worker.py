"""The common part of the engines' programs.

    ENGINE.py FOLDER SHAPE THREADS NAME

first writes a line of JSON with its version and memory, and then answers each line `[workload,
seed]` with a `Times`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from workloads import SHAPES, WORKLOADS, Request, Workload, make_requests

_STATUS = Path("/proc/self/status")


def weight_format() -> str:
    """Return the format of the weights in the engine's name, after a colon; "" is bfloat16."""
    return sys.argv[4].partition(":")[2]


@dataclass
class Times:
    """Times of one run, in seconds.

    Attributes:
        total_s: From the first request to the last token.
        prefill_s: Until every completion has its first token; meaningless with arrivals.
        steps_s: Decode steps after that.
        ttft_s: By request, from its arrival to its first token; with arrivals only.
        tpot_s: By request, per further token; with arrivals only.
        tokens: Generated tokens.
        peak_bytes: The process's peak memory so far.
    """

    total_s: float
    prefill_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: int = 0
    peak_bytes: int = 0


class Engine(ABC):
    """An engine with a loaded model.

    Attributes:
        version: Its name and version, for the table.
        held_bytes: Size of weights and KV cache, if known.
    """

    version: str
    held_bytes: int = 0

    @abstractmethod
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        """Load the model in `folder` (Transformers' format), or its conversion beside it."""

    def can(self, workload: Workload) -> bool:
        """Return whether the engine supports this workload."""
        return not workload.rate

    @abstractmethod
    def run(self, workload: Workload, requests: list[Request]) -> Times:
        """Run the requests from an empty prefix cache."""


def serve(kind: type[Engine]) -> None:
    """Answer until the input ends."""
    # Answers have a separate channel, since libraries print to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder, shape, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    about = {"before_bytes": peak_bytes(), "imported_at": time.time()}
    engine = kind(folder, shape, threads)
    about |= {"version": engine.version, "held_bytes": engine.held_bytes}
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
    """Return the program's peak memory in bytes.

    Not `ru_maxrss` on Linux, which includes the peak of the process that started this one.
    """
    if _STATUS.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rest_of(marks: list[float]) -> list[float]:
    """Return the differences between successive times."""
    return [later - sooner for sooner, later in itertools.pairwise(marks)]
