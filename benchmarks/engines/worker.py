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

from tokenizers import Tokenizer
from workloads import SHAPES, WORKLOADS, Request, Workload, make_requests

TIMED_START = "TIMED_START"
"""In the environment: the start is measured, and not the memory."""

_STATUS = Path("/proc/self/status")


def weight_format() -> str:
    """Return the format of the weights in the engine's name, after a colon; "" is bfloat16."""
    kind = sys.argv[4].partition(":")[2]
    return "" if kind.startswith("ngram") else kind


def draft_tokens() -> int:
    """Return the most tokens that an engine drafts by n-grams: 5 in `NAME:ngram-5`; 0 is none."""
    return int(sys.argv[4].partition(":ngram-")[2] or 0)


@dataclass
class Times:
    """Times of one run, in seconds.

    Attributes:
        total_s: From the first request to the last token.
        prefill_s: Until every completion has its first token; meaningless with arrivals.
        steps_s: Decode steps after that.
        ttft_s: By request, from its arrival to its first token; with arrivals only.
        tpot_s: By request, per further token; with arrivals only.
        outputs: Generated tokens by sample.
        texts: Texts under a constraint.
        peak_bytes: The process's peak memory so far.
    """

    total_s: float
    prefill_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    peak_bytes: int = 0


class Marks:
    """The times of an engine's steps, from the making of this object on."""

    def __init__(self, workload: Workload, requests: list[Request]) -> None:
        self._samples = len(requests) * workload.samples
        self._start = time.perf_counter()
        self._decode: list[float] = []

    def add(self, begun: int) -> None:
        """Note the end of a step, after which so many samples have a token."""
        if begun == self._samples:
            self._decode.append(time.perf_counter())

    def times(self, outputs: list[list[int]]) -> Times:
        # A step makes at least a token, so that earlier steps are the prompts'.
        decode = self._decode[-max(map(len, outputs)) :]
        return Times(
            total_s=decode[-1] - self._start,
            prefill_s=decode[0] - self._start,
            steps_s=rest_of(decode),
            outputs=outputs,
        )


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
        return not workload.rate and not (workload.constraint and draft_tokens())

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
        check(workload, requests, times.outputs)
        if workload.constraint:
            times.texts = Tokenizer.from_file(str(folder / "tokenizer.json")).decode_batch(
                times.outputs
            )
        times.outputs = []
        times.peak_bytes = peak_bytes()
        print(json.dumps(asdict(times)), file=answers)


def check(workload: Workload, requests: list[Request], outputs: list[list[int]]) -> None:
    """Raise AssertionError unless each sample has its tokens."""
    lengths = [request.new_tokens for request in requests for _ in range(workload.samples)]
    found = [len(output) for output in outputs]
    if workload.whole:
        assert len(found) == len(lengths), f"{len(found)} samples instead of {len(lengths)}"
    else:
        assert sorted(found) == sorted(lengths), f"{found} tokens instead of {lengths}"
    if workload.text:
        assert outputs == [request.answer for request in requests], "another text than the known"


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
