"""A replica without a device: an executor that samples by rule, and drives the batching core."""

from __future__ import annotations

from collections import deque
from typing import Literal

from nano_inference.bus.control import ReplicaCapacity
from nano_inference.bus.messages import (
    Credit,
    Dispatch,
    NewSequence,
    RequestInfo,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from nano_inference.bus.pooling import PooledPrompt, Pooling
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore

STOP = 7

CacheType = Literal["paged", "radix"]


def next_token(token_ids: list[int]) -> int:
    """The "model": a function of all tokens before, so that a mixed-up prefix shows."""
    value = 17
    for token in token_ids:
        value = (value * 31 + token + 1) % 1009
    return value % 50


class RuleExecutor:
    """Does what a plan says to numbers in place of KV: each slot holds the token written to it.

    Reading a slot that does not hold the sequence's own token at that place is an error, so a
    block that two sequences write, or a hit on a block not computed, can't go unnoticed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.sequences: dict[int, NewSequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.generated: dict[int, int] = {}
        self.done: set[int] = set()
        self.num_computed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.finished:
            self.tokens.pop(seq_id)
            self.done.discard(seq_id)
        if "kv_cache" in plan.release:
            assert not plan.seq_ids
            self.slots = [[-1] * self.block_size for _ in self.slots]
        for new in plan.new:
            assert new.seq_id not in self.tokens
            self.sequences[new.seq_id] = new
            self.tokens[new.seq_id] = list(new.token_ids)
            self.tables[new.seq_id] = list(new.block_ids)
            self.computed[new.seq_id] = new.num_cached
            self.generated[new.seq_id] = new.num_generated
        for seq_id, blocks in plan.grown:
            self.tables[seq_id].extend(blocks)
        for source, destination in plan.copies:
            self.slots[destination] = list(self.slots[source])
        rows = []
        pooled = []
        leader = -1
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if seq_id in self.done:
                continue
            row = self._row(seq_id, count) if count else self._fork(seq_id, leader)
            leader = seq_id if count else leader
            if self.sequences[seq_id].info.pooling is None:
                rows += row
            elif row:
                pooled.append(PooledPrompt(seq_id, b""))
        seq_ids, tokens, reasons = zip(*rows, strict=True) if rows else ((), (), ())
        logprobs = (0.0,) * len(rows)
        return StepResult(
            plan.step_id,
            (),
            seq_ids,
            tokens,
            logprobs,
            reasons,
            plan.ended,
            0,
            0,
            0,
            pooled=tuple(pooled),
        )

    def forget(self) -> None:
        self.tokens.clear()
        self.done.clear()

    def _row(self, seq_id: int, count: int) -> list[tuple[int, int, str]]:
        tokens, table = self.tokens[seq_id], self.tables[seq_id]
        start = self.computed[seq_id]
        assert start + count <= len(tokens)
        for position in range(start, start + count):
            block, offset = divmod(position, self.block_size)
            self.slots[table[block]][offset] = tokens[position]
        self.computed[seq_id] += count
        self.num_computed += count
        # That of a fork is in blocks of its own by now.
        for position in range(start + count):
            block, offset = divmod(position, self.block_size)
            assert self.slots[table[block]][offset] == tokens[position], "a foreign block was read"
        return self._sample(seq_id) if self.computed[seq_id] == len(tokens) else []

    def _fork(self, seq_id: int, leader: int) -> list[tuple[int, int, str]]:
        tokens = self.tokens[seq_id]
        assert self.computed[seq_id] == self.computed[leader] == len(tokens)
        # The leader has sampled already.
        assert self.tokens[leader][:-1] == tokens, "it samples with others' logits"
        return self._sample(seq_id)

    def _sample(self, seq_id: int) -> list[tuple[int, int, str]]:
        tokens = self.tokens[seq_id]
        token = next_token(tokens)
        tokens.append(token)
        self.generated[seq_id] += 1
        sampling = self.sequences[seq_id].sampling
        reason = ""
        if token in sampling.stop_token_ids:
            reason = "stop"
        elif self.generated[seq_id] == sampling.max_tokens:
            reason = "length"
        if reason:
            self.done.add(seq_id)
        return [(seq_id, token, reason)]


class FakeReplica:
    """The batching core and a rule executor, with results that come back late."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_size: int = 8,
        max_tokens_per_batch: int = 32,
        steps_ahead: int = 2,
        cache_type: CacheType = "radix",
        max_draft_tokens: int = 0,
    ) -> None:
        config = EngineConfig(
            cache_type=cache_type,
            block_size=block_size,
            max_tokens_per_batch=max_tokens_per_batch,
            speculation="auto" if max_draft_tokens else "off",
            max_draft_tokens=max_draft_tokens or 16,
        )
        capacity = ReplicaCapacity(
            num_blocks,
            block_size,
            4096,
            50,
            "rule",
            max_batch_size=max_batch_size,
            drafts=max_draft_tokens > 0,
        )
        self.core = BatchingCore(config, capacity, steps_ahead=steps_ahead)
        self.executor = RuleExecutor(num_blocks, block_size)
        self.plans: deque[StepPlan] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.pooled: list[int] = []
        self.ended: list[str] = []
        self.log: list[StepPlan] = []

    def add(
        self,
        prompt: list[int],
        *,
        request_id: str,
        seq_ids: tuple[int, ...],
        max_tokens: int = 8,
        stop: bool = True,
        priority: int = 0,
        prompt_logprobs: int | None = None,
        deadline_ns: int | None = None,
        rank: int = 0,
        pooling: Pooling | None = None,
        adapter: str = "",
    ) -> None:
        """With `pooling` a prompt's vector is wanted: `max_tokens` is 1 then."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=frozenset({STOP} if stop else ()),
            prompt_logprobs=prompt_logprobs,
        )
        info = RequestInfo(
            request_id,
            request_id,
            "m",
            len(seq_ids),
            True,
            (),
            len(prompt),
            "",
            "",
            0,
            adapter=adapter,
            pooling=pooling,
        )
        specs = tuple(SequenceSpec(seq_id, index, 0) for index, seq_id in enumerate(seq_ids))
        dispatch = Dispatch(info, tuple(prompt), sampling, specs, priority, rank=rank)
        self.core.add(dispatch, deadline_ns)

    def plan(self, now_ns: int = 0) -> bool:
        plan = self.core.plan(now_ns)
        if plan is None:
            return False
        self.plans.append(plan)
        self.log.append(plan)
        return True

    def retire(self) -> bool:
        """Executes the oldest plan and gives its result back."""
        if not self.plans:
            return False
        result = self.executor.execute(self.plans.popleft())
        for row, seq_id in enumerate(result.seq_ids):
            self.outputs.setdefault(seq_id, []).append(result.token_ids[row])
            if result.finish_reasons[row]:
                self.reasons[seq_id] = result.finish_reasons[row]
        self.pooled += [prompt.seq_id for prompt in result.pooled]
        self.ended += [cancel.request_id for cancel in result.ended]
        self.core.absorb(result)
        return True

    def retract(self) -> None:
        """The plans under way are lost, and with them all that the executor knew but its slots."""
        self.plans.clear()
        self.executor.forget()
        self.core.forget_plans()

    def check(self) -> None:
        """All conservation checks, those that look through the whole cache included."""
        self.core.check()
        self.core.cache.check_index()

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            while self.plan():
                pass
            if not self.retire():
                return
        raise AssertionError("the replica did not come to rest")


def reported(replica: FakeReplica) -> Credit:
    """What fairness is told; there must be something."""
    report = replica.core.take_report()
    assert report is not None
    return report


def expected(prompt: list[int], max_tokens: int, *, stop: bool = True) -> list[int]:
    """What a sequence must give, whatever runs beside it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if stop and tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]
