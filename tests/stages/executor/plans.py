"""Plans made by hand: block tables are allocated once and never freed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from nano_inference.bus.messages import RequestInfo, SequenceSpec
from nano_inference.bus.steps import NewSequence, StepPlan, StepResult
from nano_inference.config import SamplingParams
from nano_inference.stages.executor import ExecutorCore

from ...sections import PLAN, in_parts

INFO = RequestInfo("request", "1-0")
PROMPT = [17, 3, 99, 42, 8, 150, 77, 31, 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8)


def new_sequence(
    seq_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    num_generated: int = 0,
    num_cached: int = 0,
    seed: int = 0,
) -> NewSequence:
    return NewSequence(
        seq_id=seq_id,
        token_ids=tuple(token_ids),
        num_generated=num_generated,
        num_cached=num_cached,
        block_ids=tuple(block_ids),
        sampling=sampling,
        sample=SequenceSpec(seq_id, 0, seed),
        info=INFO,
    )


def step_plan(step_id: int = 1, **parts: object) -> StepPlan:
    """A plan of `parts` alone. `rows` is {seq_id: num_tokens}; sections go by the parts' fields."""
    rows: dict[int, int] = parts.pop("rows", {})  # type: ignore[assignment]
    fields: dict[str, object] = {
        "new": (),
        "seq_ids": tuple(rows),
        "num_tokens": tuple(rows.values()),
        "grown": (),
        "copies": (),
        "finished": (),
        "ended": (),
        "made_ns": 1,
        **in_parts(parts, PLAN),
    }
    return StepPlan(step_id=step_id, **fields)  # type: ignore[arg-type]


@dataclass
class Generation:
    """One sequence as the planner sees it."""

    seq_id: int
    prompt: list[int]
    sampling: SamplingParams
    arrives: int = 0
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    started: bool = False


class Planner:
    """Runs generations together: all that have arrived are in every step, prefills in chunks."""

    def __init__(self, core: ExecutorCore, *, chunk: int = 7, shuffle: int = 0) -> None:
        self.core = core
        self.chunk = chunk
        self.step_id = 0
        self.results: list[StepResult] = []
        self._random = random.Random(shuffle)
        self._free = list(range(core.capacity().num_blocks))
        self._random.shuffle(self._free)

    def run(self, generations: Sequence[Generation]) -> None:
        """Steps until all are finished."""
        while pending := [g for g in generations if not g.reason]:
            active = [g for g in pending if g.arrives <= self.step_id]
            self._random.shuffle(active)
            self._step(active)

    def _step(self, active: list[Generation]) -> None:
        self.step_id += 1
        size = self.core.capacity().block_size
        new, grown, rows = [], [], {}
        for generation in active:
            known = len(generation.prompt) + len(generation.token_ids)
            count = min(self.chunk, known - generation.computed)
            rows[generation.seq_id] = count
            generation.computed += count
            needed = -(-generation.computed // size) - len(generation.blocks)
            added = [self._free.pop() for _ in range(needed)]
            generation.blocks += added
            if not generation.started:
                generation.started = True
                new.append(
                    new_sequence(
                        generation.seq_id,
                        generation.prompt,
                        generation.blocks,
                        generation.sampling,
                        seed=generation.seed,
                    )
                )
            elif added:
                grown.append((generation.seq_id, tuple(added)))
        plan = step_plan(self.step_id, rows=rows, new=tuple(new), grown=tuple(grown))
        result = self.core.execute(plan)
        self.results.append(result)
        by_id = {generation.seq_id: generation for generation in active}
        for seq_id, token, logprob, reason in zip(
            result.seq_ids, result.token_ids, result.logprobs, result.finish_reasons, strict=True
        ):
            generation = by_id[seq_id]
            generation.token_ids.append(token)
            generation.logprobs.append(logprob)
            generation.reason = reason
