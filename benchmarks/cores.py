"""Parts of the engine without the pipeline: rows of an executor, batching, random requests.

    python benchmarks/cores.py [--rows 1,16,64] [--steps 100] [--threads 1] [--json FILE]

Prints the microseconds of each stage's core in a decode step of the bundled model, means of all
steps after the first four: fairness counts the reported tokens, batching plans the step and absorbs
it, the executor computes it, streaming makes every row's chunk. No message is encoded or sent.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from harness import options, print_table, record
from workloads import Request, Workload

from nano_inference import GenerateRequest, SamplingParams
from nano_inference.bus.messages import (
    AdmittedRequest,
    Credit,
    Prompt,
    RequestInfo,
    RequestOpened,
    SequenceSpec,
)
from nano_inference.bus.public import Completion, CompletionChunk
from nano_inference.bus.steps import NewSequence, StepPlan
from nano_inference.config import EngineConfig, FairnessConfig
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.driver.step import LaunchedStep
from nano_inference.stages.executor.runner.fast_modules.calls import join_weights
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.streaming.core import StreamingCore
from nano_inference.text.tokenizer import load_tokenizer

MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16


class Followed(NamedTuple):
    """One request's time to its first text at the client, if streamed, total time, and end."""

    first_s: float | None
    total_s: float
    start_ns: int
    completion: Completion


async def follow(client: Any, request: Any) -> Followed:
    """Submit a request, and read its stream to the end.

    Raises:
        RuntimeError: It has not been completed.
    """
    start_ns, start, first = time.time_ns(), time.perf_counter(), None
    async for output in client.submit(request):
        if isinstance(output, CompletionChunk):
            if first is None and output.text:
                first = time.perf_counter() - start
        elif output.status != "done":
            raise RuntimeError(f"a request failed: {output.error}")
        else:
            return Followed(first, time.perf_counter() - start, start_ns, output)
    raise RuntimeError("the output ended without a completion")


def random_requests(
    count: int, tokens: int, lengths: tuple[int, int], seed: int, *, stream: bool = False
) -> list[GenerateRequest]:
    """Return greedy requests with prompts of these lengths (bounds included)."""
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [
        GenerateRequest(
            prompt_token_ids=tuple(rng.randrange(3, 250) for _ in range(rng.randint(*lengths))),
            sampling=sampling,
            stream=stream,
        )
        for _ in range(count)
    ]


# --- an executor alone ----------------------------------------------------------------------------


def blocks_for(tokens: int) -> int:
    """Return the number of blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def new_sequence(
    seq_id: int,
    row: int,
    token_ids: Sequence[int],
    block_ids: Iterable[int],
    sampling: SamplingParams,
    *,
    num_cached: int = 0,
    adapter: str = "",
) -> NewSequence:
    """Return a sequence for an executor; `row` is its seed."""
    return NewSequence(
        seq_id=seq_id,
        token_ids=tuple(token_ids),
        num_generated=0,
        num_cached=num_cached,
        block_ids=tuple(block_ids),
        sampling=sampling,
        sample=SequenceSpec(row, 0, seed=row),
        info=RequestInfo("request", "1-0", adapter=adapter),
    )


def step_plan(
    step_id: int,
    seq_ids: tuple[int, ...],
    num_tokens: int,
    new: tuple[NewSequence, ...] = (),
    finished: tuple[int, ...] = (),
) -> StepPlan:
    """Return a step in which each sequence computes `num_tokens` tokens, and samples one."""
    return StepPlan(
        step_id=step_id,
        new=new,
        seq_ids=seq_ids,
        num_tokens=(num_tokens,) * len(seq_ids),
        grown=(),
        copies=(),
        finished=finished,
        ended=(),
        made_ns=0,
    )


class Lane(ABC):
    """An executor alone, with the same number of rows of each kind.

    Attributes:
        core: The executor.
        rows: Rows of each kind.
    """

    def __init__(self, core: ExecutorCore, rows: int, kinds: Iterable[str], prompt: int) -> None:
        self.core, self.rows = core, rows
        self._kinds, self._prompt = list(kinds), prompt
        self._ids: dict[str, tuple[int, ...]] = {}
        self._next_ids = itertools.count()
        self._steps = itertools.count(1)

    @abstractmethod
    def new_row(self, rng: random.Random, kind: str, row: int, seq_id: int) -> NewSequence:
        """Return a new sequence; `rng` is the same for all kinds."""

    def begin(self, seed: int) -> None:
        """Replace all rows by new ones, and compute their prompts."""
        finished = tuple(itertools.chain.from_iterable(self._ids.values()))
        for kind in self._kinds:
            rng = random.Random(seed)
            new = tuple(
                self.new_row(rng, kind, row, next(self._next_ids)) for row in range(self.rows)
            )
            self._ids[kind] = tuple(one.seq_id for one in new)
            self.run(kind, self._prompt - new[0].num_cached, new, finished)
            finished = ()

    def run(
        self,
        kind: str,
        num_tokens: int = 1,
        new: tuple[NewSequence, ...] = (),
        finished: tuple[int, ...] = (),
    ) -> float:
        """Run a step of the rows of a kind; return its milliseconds."""
        start = time.perf_counter()
        plan = step_plan(next(self._steps), self._ids[kind], num_tokens, new, finished)
        result = self.core.execute(plan)
        took_ms = (time.perf_counter() - start) * 1e3
        if len(result.token_ids) != self.rows or any(result.finish_reasons):
            raise AssertionError(f"{kind}: {result.finish_reasons}")
        return took_ms

    def turns(self, seconds: float, *, steps: int, warm: int) -> Iterator[dict[str, float]]:
        """Yield the milliseconds of each kind's step, turn by turn, for so many seconds.

        Each kind follows each other kind equally often. Rows are replaced after `steps` turns; the
        first `warm` turns don't count.
        """
        orders = itertools.cycle(itertools.permutations(self._kinds))
        self.begin(0)
        for order in itertools.islice(orders, warm):
            for kind in order:
                self.run(kind)
        until = time.monotonic() + seconds
        for number in itertools.count(1):
            self.begin(number)
            for order in itertools.islice(orders, steps):
                if time.monotonic() > until:
                    return
                yield {kind: self.run(kind) for kind in order}


# --- batching and an executor ---------------------------------------------------------------------


@dataclass
class Outcome:
    """One run of a workload: by sequence, seconds since the start; and seconds of decode steps."""

    seconds: float = 0.0
    first_s: dict[int, float] = field(default_factory=dict)
    last_s: dict[int, float] = field(default_factory=dict)
    arrival_s: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    steps_s: list[float] = field(default_factory=list)


class Ours:
    """Batching and an executor, one step launched ahead of the one read, and a model of its own."""

    def __init__(self, module: Any, *, graphs: bool = True, max_batch_size: int = 256) -> None:
        self.config = EngineConfig(
            max_batch_size=max_batch_size,
            max_tokens_per_batch=8192,
            max_model_len=MAX_MODEL_LEN,
            cuda_graphs="auto" if graphs else "off",
        )
        started = time.perf_counter()
        model = replace(wrap_model(module, MAX_MODEL_LEN), is_shared=False)
        if model.device.type == "cuda":
            join_weights(module)  # as of a model that is loaded
        self.core = ExecutorCore(self.config, model=model)
        self.start_s = time.perf_counter() - started

    def run(self, requests: list[Request], workload: Workload) -> Outcome:
        self.core.reset()
        ahead = 2 if self.core.runs_ahead else 1
        batching = BatchingCore(self.config, self.core.capacity(), steps_ahead=ahead)
        waiting, launched = deque(enumerate(requests)), deque[LaunchedStep]()
        outcome, start, before = Outcome(), time.perf_counter(), 0.0
        while waiting or not batching.idle:
            now = time.perf_counter() - start
            while waiting and waiting[0][1].arrival_s <= now:
                self._add(batching, *waiting.popleft(), workload, outcome)
            while (plan := batching.plan(0)) is not None:
                launched.append(self.core.launch(plan))
            if not launched:
                if waiting:
                    time.sleep(max(waiting[0][1].arrival_s - now, 0.0))
                continue
            step = launched.popleft()
            result = self.core.finish(step)
            batching.absorb(result.summary())
            now = time.perf_counter() - start
            for seq_id, token, logprob in zip(
                result.seq_ids, result.token_ids, result.logprobs, strict=True
            ):
                outcome.first_s.setdefault(seq_id, now)
                outcome.last_s[seq_id] = now
                outcome.tokens[seq_id].append(token)
                outcome.logprobs[seq_id].append(logprob)
            if set(step.plan.num_tokens) == {1}:
                outcome.steps_s.append(now - before)
            before = now
        outcome.seconds = time.perf_counter() - start
        return outcome

    def _add(
        self,
        batching: BatchingCore,
        index: int,
        request: Request,
        workload: Workload,
        outcome: Outcome,
    ) -> None:
        ids = range(index * workload.samples, (index + 1) * workload.samples)
        name = f"r{index}"
        info = RequestInfo(name, name)
        sampling = SamplingParams(
            temperature=workload.temperature,
            top_p=workload.top_p,
            max_tokens=request.new_tokens,
            ignore_eos=True,
        )
        specs = tuple(SequenceSpec(each, each - ids[0], seed=each) for each in ids)
        for each in ids:
            outcome.tokens[each], outcome.logprobs[each] = [], []
            outcome.arrival_s[each] = request.arrival_s
        prompt = Prompt(tuple(request.token_ids))
        batching.add(AdmittedRequest(info, prompt, sampling, specs, "", 0))


# --- the cores of one step ------------------------------------------------------------------------


def time_cores(config: EngineConfig, rows: int, steps: int) -> dict[str, float]:
    """Return the mean microseconds of each core in a step in which so many rows decode."""
    executor, fairness = ExecutorCore(config), FairnessCore(FairnessConfig())
    batching = BatchingCore(config, executor.capacity())
    streaming = StreamingCore(load_tokenizer(config.model_folder))
    sampling = SamplingParams(temperature=0, max_tokens=2 * steps, ignore_eos=True)
    fairness.absorb(Credit(rows, kv_free=1 << 20), 0)
    for row in range(rows):
        name, prompt = f"r{row}", (300 + row, 40, 41, 42)
        streaming.open(RequestOpened(name, name, "tiny", 1, True, (), prompt), 0)
        specs = (SequenceSpec(row, 0, 0),)
        request = AdmittedRequest(
            RequestInfo(name, name), Prompt(prompt), sampling, specs, "tenant", 0
        )
        fairness.push(request, 0)
    while (dispatched := fairness.pop(0)) is not None:
        batching.add(dispatched.message)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        clock = [time.perf_counter()]
        plan = batching.plan(0)
        clock.append(time.perf_counter())
        result = executor.execute(plan)
        clock.append(time.perf_counter())
        batching.absorb(result.summary())
        report = batching.take_report()
        clock.append(time.perf_counter())
        if report is not None:
            fairness.absorb(report, 0)
        clock.append(time.perf_counter())
        streaming.absorb(result, 0)
        clock.append(time.perf_counter())
        assert len(result.seq_ids) == rows
        planned, computed, absorbed, counted, streamed = (
            (after - before) * 1e6 for before, after in itertools.pairwise(clock)
        )
        times["fairness"].append(counted)
        times["batching"].append(planned + absorbed)
        times["executor"].append(computed)
        times["streaming"].append(streamed)
    return {core: statistics.fmean(each[4:]) for core, each in times.items()}


def main() -> None:
    parser = options(__doc__, rows=[1, 16, 64], steps=100, threads=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = {
        f"{rows} rows": time_cores(EngineConfig(), rows, arguments.steps) for rows in arguments.rows
    }
    columns = {core: f"{{{core}:,.0f}}" for core in found[f"{arguments.rows[0]} rows"]}
    print_table(columns, found, "µs per step")
    record(arguments, found=found)


if __name__ == "__main__":
    main()
