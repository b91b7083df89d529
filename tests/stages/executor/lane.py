"""Batching and executor together on a real model, in a loop as `InferenceEngine` runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from nano_inference.bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore, SequenceStatus
from nano_inference.stages.executor import ExecutorCore, LoadedModel
from nano_inference.stages.executor.driver.step import LaunchedStep

from ..batching.index import check_index

MOST_STEPS = 5_000


class StepLane:
    """Batching and executor, with steps in flight.

    Attributes:
        steps: Their number.
        most_in_flight: The most steps in flight.
        preempted: Preemptions by `preempt_every`.
        flushed: How often the cache was emptied.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: ExecutorCore,
        *,
        steps_ahead: int = 1,
        preempt_every: int = 0,
        flush_every: int = 0,
    ) -> None:
        """Take the executor.

        Args:
            config: The settings.
            core: The executor.
            steps_ahead: The most steps in flight.
            preempt_every: After each so many steps, and those in flight, the last running sequence
                must give up its blocks, as when blocks run out. 0 is never.
            flush_every: After each so many preemptions the cache is emptied, so that the victim
                computes all of its tokens again. 0 is never.
        """
        self.core = core
        self.batching = BatchingCore(config, core.capacity(), steps_ahead=steps_ahead)
        self.steps = self.most_in_flight = self.preempted = self.flushed = 0
        self._preempt_every, self._flush_every = preempt_every, flush_every
        self._in_flight: deque[tuple[StepPlan, LaunchedStep | StepResult]] = deque()

    def add(
        self, seq_id: int, sampling: SamplingParams, prompt: Sequence[int], adapter: str = ""
    ) -> None:
        name = f"r{seq_id}"
        info, spec = RequestInfo(name, name, adapter=adapter), SequenceSpec(seq_id, 0, seed=seq_id)
        admitted = AdmittedRequest(info, Prompt(tuple(prompt)), sampling, (spec,), "", 0)
        self.batching.add(admitted)

    def turn(self) -> bool:
        """Run all steps that can be planned, then take the result of the oldest step."""
        while (plan := self.batching.plan(0)) is not None:
            self._in_flight.append((plan, self.begin(plan)))
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if not self._in_flight:
            return False
        self._take_oldest()
        self.steps += 1
        if self._preempt_every and self.steps % self._preempt_every == 0:
            while self._in_flight:
                self._take_oldest()
            self._preempt_last()
        return True

    def finish(self) -> None:
        """Run until all sequences have ended."""
        for _ in range(MOST_STEPS):
            if not self.turn():
                self.batching.check()
                check_index(self.batching.cache)
                assert self.batching.idle
                return
        raise AssertionError("the lane does not come to rest")

    def begin(self, plan: StepPlan) -> LaunchedStep | StepResult:
        """Launch a plan, or run it."""
        run = self.core.launch if self.core.runs_ahead else self.core.execute
        return run(plan)

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Handle a result."""

    def _take_oldest(self) -> None:
        plan, oldest = self._in_flight.popleft()
        result = oldest if isinstance(oldest, StepResult) else self.core.finish(oldest)
        self.batching.absorb(result.summary())
        self.record(plan, result)

    def _preempt_last(self) -> None:
        if running := list(self.batching.running):
            self.batching._leave(running[-1], SequenceStatus.WAITING, "preemption")
            self.preempted += 1
            if self._flush_every and self.preempted % self._flush_every == 0:
                self.batching.cache.flush()
                self.flushed += 1


@dataclass
class Answer:
    """The output of one prompt.

    Attributes:
        num_cached: Prompt tokens found in the cache when it first started.
    """

    prompt: list[int]
    num_cached: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


class Lane(StepLane):
    """Runs prompts greedily, all queued at once.

    Attributes:
        computed: Tokens that went through the model, in the last run.
        part_rows: Rows that computed a part of a prompt and did not sample.
        largest_row: Most tokens of one row.
    """

    _ids = count(1)

    def run(
        self, prompts: Sequence[list[int]], max_tokens: int, adapters: Sequence[str] = ()
    ) -> list[Answer]:
        """Completes the prompts; the cache stays warm for the next run.

        `adapters`: of each, "" for none; no prompt has one when empty.
        """
        self.steps = self.preempted = self.flushed = 0
        self.computed = self.part_rows = self.largest_row = 0
        self.batching.restart(self.core.capacity())
        self._answers = {next(self._ids): Answer(prompt) for prompt in prompts}
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for (seq_id, answer), adapter in zip(
            self._answers.items(), adapters or [""] * len(prompts), strict=True
        ):
            self.add(seq_id, sampling, answer.prompt, adapter)
        self.finish()
        return list(self._answers.values())

    def record(self, plan: StepPlan, result: StepResult) -> None:
        self.computed += sum(plan.num_tokens)
        self.part_rows += len(plan.seq_ids) - len(result.seq_ids)
        self.largest_row = max(self.largest_row, *plan.num_tokens)
        for new in plan.new:
            answer = self._answers[new.seq_id]
            if answer.num_cached < 0:
                answer.num_cached = new.num_cached
        for seq_id, token, logprob, reason in zip(
            result.seq_ids, result.token_ids, result.logprobs, result.finish_reasons, strict=True
        ):
            answer = self._answers[seq_id]
            answer.token_ids.append(token)
            answer.logprobs.append(logprob)
            answer.finish_reason = reason


def lane_of(
    model: LoadedModel, *, preempt_every: int = 0, flush_every: int = 0, **settings: Any
) -> Lane:
    """A lane of a model; the settings are of the EngineConfig."""
    config = EngineConfig(**{"max_batch_size": 8, "kv_cache_bytes": 1 << 23, **settings})
    core = ExecutorCore(config, model=model)
    return Lane(config, core, preempt_every=preempt_every, flush_every=flush_every)
