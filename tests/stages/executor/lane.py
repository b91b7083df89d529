"""Batching and executor together on a real model, in a loop as `InferenceEngine` runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nano_inference.bus.messages import Dispatch, RequestInfo, SequenceSpec, StepPlan, StepResult
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore, LoadedModel

from ..batching.index import check_index

MOST_STEPS = 5_000


@dataclass
class Answer:
    """What one prompt gave.

    Attributes:
        num_cached: Prompt tokens found in the cache when it first started.
    """

    prompt: list[int]
    num_cached: int = -1
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class Counts:
    """What happened in the steps of a lane.

    Attributes:
        computed: Tokens that went through the model.
        part_rows: Rows that computed a part of a prompt and did not sample.
        largest_row: Most tokens of one row.
        preempted: Sequences taken out by force.
        flushed: How often the cache was emptied meanwhile.
    """

    steps: int = 0
    computed: int = 0
    part_rows: int = 0
    largest_row: int = 0
    preempted: int = 0
    flushed: int = 0


class Lane:
    """Runs prompts greedily, all queued at once.

    Args:
        model: What to run.
        preempt_every: After each so many steps the last running sequence must give up its blocks,
            with nothing under way, as when blocks run out. 0 is never.
        flush_every: After each so many of these the cache is emptied too, so that the victim really
            computes all of its tokens again, and does not find them. 0 is never.
        settings: Of the EngineConfig.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        preempt_every: int = 0,
        flush_every: int = 0,
        block_size: int = 16,
        cache_type: Literal["radix", "paged"] = "radix",
        max_batch_size: int = 8,
        max_tokens_per_batch: int = 2048,
        kernels: Literal["auto", "off"] = "auto",
    ) -> None:
        config = EngineConfig(
            block_size=block_size,
            cache_type=cache_type,
            max_batch_size=max_batch_size,
            max_tokens_per_batch=max_tokens_per_batch,
            kv_cache_bytes=1 << 23,
            kernels=kernels,
        )
        self.executor = ExecutorCore(config, model=model)
        self.batching = BatchingCore(config, self.executor.capacity(), steps_ahead=1)
        self.counts = Counts()
        self._preempt_every = preempt_every
        self._flush_every = flush_every
        self._next_id = 0

    def run(
        self, prompts: Sequence[list[int]], max_tokens: int, adapters: Sequence[str] = ()
    ) -> list[Answer]:
        """Completes the prompts; the cache stays warm for the next run.

        `adapters`: of each, "" for none; no prompt has one when empty.
        """
        self.counts = Counts()
        self.batching.set_adapters(self.executor.capacity().adapters)
        answers = {
            self._add(prompt, max_tokens, adapter): Answer(prompt)
            for prompt, adapter in zip(prompts, adapters or [""] * len(prompts), strict=True)
        }
        while (plan := self.batching.plan(0)) is not None:
            assert self.counts.steps < MOST_STEPS, "the lane does not come to rest"
            result = self.executor.execute(plan)
            self.batching.absorb(result.summary())
            self._record(answers, plan, result)
            if self._preempt_every and self.counts.steps % self._preempt_every == 0:
                self._preempt_last()
        self.batching.check()
        check_index(self.batching.cache)
        return list(answers.values())

    def _add(self, prompt: list[int], max_tokens: int, adapter: str) -> int:
        self._next_id += 1
        name = f"r{self._next_id}"
        info = RequestInfo(name, name, adapter=adapter)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        spec = SequenceSpec(self._next_id, 0, seed=0)
        self.batching.add(Dispatch(info, tuple(prompt), sampling, (spec,), priority=0))
        return self._next_id

    def _record(self, answers: dict[int, Answer], plan: StepPlan, result: StepResult) -> None:
        counts = self.counts
        counts.steps += 1
        counts.computed += sum(plan.num_tokens)
        counts.part_rows += len(plan.seq_ids) - len(result.seq_ids)
        counts.largest_row = max(counts.largest_row, *plan.num_tokens)
        for new in plan.new:
            answer = answers[new.seq_id]
            if answer.num_cached < 0:
                answer.num_cached = new.num_cached
        for seq_id, token, logprob, reason in zip(
            result.seq_ids, result.token_ids, result.logprobs, result.finish_reasons, strict=True
        ):
            answers[seq_id].token_ids.append(token)
            answers[seq_id].logprobs.append(logprob)
            answers[seq_id].finish_reason = reason

    def _preempt_last(self) -> None:
        running = list(self.batching._running)
        if not running:
            return
        self.batching._give_up(running[-1])
        self.counts.preempted += 1
        if self._flush_every and self.counts.preempted % self._flush_every == 0:
            self.batching.cache.flush()
            self.counts.flushed += 1
