"""One sample in the making, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Self

import msgspec

from ...bus.messages import (
    DEFAULT_SCOPE,
    CacheScope,
    Dispatch,
    NewSequence,
    RequestInfo,
    SequenceSpec,
)
from ...config import SamplingParams
from .cache import Lease


class SequenceStatus(Enum):
    """Waiting for its first (or, after a preemption, next) step, or paused; running; done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Mutable state of one sample.

    Made of an id, a prompt and parameters, it waits. `start` gives it blocks and lets it run;
    `plan` notes what a step computes of it, `append_token` what the step sampled. `preempt` lets it
    wait again, and whoever ends it sets its status to FINISHED.

    Plans are made ahead of results, so there are three counts of tokens:

        num_computed  <=  num_scheduled  <=  num_tokens + num_pending

    `num_computed` have their KV in the cache, `num_scheduled` will have it once all plans sent so
    far are done, and `num_pending` more tokens than those known will have been sampled by then. If
    drafts are accepted, all of these get larger by up to `num_drafting`.

    Attributes:
        token_ids: Prompt and generated tokens, as far as results are back.
        output_logprobs: `[generated]`, of the tokens that `append_token` was given with one.
            Empty in the pipeline, where logprobs go to streaming and not through batching.
        block_ids: The block table; the list is the lease's, which extends it.
        cache_scope: As in Dispatch.
        prediction: As in Dispatch.
        max_drafts: Most drafted tokens that a step may verify; 0 for a sequence without
            speculation.
        num_drafting: Drafted tokens that the plans under way allow, all of which may be accepted.
        lease: What the sequence has of the prefix cache.
        num_to_prefill: Tokens that were known when it started.
        rank: As in Dispatch; those with a smaller one go first, and are preempted last.
        next_commit: When so many tokens are computed, the prefix cache is to be told.
        last_step: Id of the last plan that names the sequence; its blocks are in use until then.
        num_reclaimable: Blocks that preempting it would free, as the prefix cache says; set when
            blocks are short. None for all of its blocks, which is right where none is shared.
        num_to_allocate: Free blocks that starting it takes, as the prefix cache says; set while it
            waits. None for a block for each `block_size` tokens, which nothing cached can exceed.
        num_cached: Leading tokens found in the cache; while it waits, those that would be found.
        order: Sorts those that run, most deserving first.
        leaves_at: The first step of the RunningBatch that is not to have it any more; 0 while it is
            not in step. The counts above and `token_ids` are then as of the steps counted.
        plans_counted: Steps of the RunningBatch whose plans are in `num_scheduled`.
        results_counted: Steps of it whose results are in `num_computed` and `token_ids`.
    """

    __slots__ = (
        "block_ids",
        "cache_scope",
        "info",
        "last_step",
        "lease",
        "leaves_at",
        "max_drafts",
        "next_commit",
        "num_cached",
        "num_computed",
        "num_drafting",
        "num_pending",
        "num_prompt_tokens",
        "num_reclaimable",
        "num_scheduled",
        "num_to_allocate",
        "num_to_prefill",
        "order",
        "output_logprobs",
        "plans_counted",
        "prediction",
        "priority",
        "rank",
        "results_counted",
        "sampling",
        "seq_id",
        "spec",
        "started",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        seq_id: int,
        token_ids: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        spec: SequenceSpec | None = None,
        info: RequestInfo | None = None,
        priority: int = 0,
        cache_scope: CacheScope = DEFAULT_SCOPE,
        rank: int = 0,
        prediction: tuple[int, ...] = (),
        max_drafts: int = 0,
    ) -> None:
        """A sequence that waits.

        Args:
            seq_id: Names it in plans and decisions.
            token_ids: The prompt, at least one token.
            sampling: Its parameters, of which `max_tokens` limits what is planned.
            spec: Its place in its request, and what was generated before; the first sample of one
                when None.
            info: Its request; a request of its own when None.
            priority: Those with a higher one are preempted later.
            cache_scope: Only sequences of the same scope find each other's tokens in a cache.
            rank: As in Dispatch.
            prediction: As in Dispatch.
            max_drafts: Most drafted tokens in a step.

        Raises:
            ValueError: There is no token.
        """
        prompt = list(token_ids)
        if not prompt:
            raise ValueError(f"sequence {seq_id} has no token; it needs at least one to compute")
        spec = spec or SequenceSpec(seq_id, sample_index=0, seed=0)
        self.seq_id = seq_id
        # The tokens are in `token_ids`; the executor needs them once.
        self.spec = msgspec.structs.replace(spec, generated=()) if spec.generated else spec
        self.info = info or RequestInfo("", "", "", 1, False, (), len(prompt), "", "", 0)
        self.token_ids = [*prompt, *spec.generated]
        self.output_logprobs: list[float] = []
        self.num_prompt_tokens = len(prompt)
        self.sampling = sampling or SamplingParams()
        self.priority = priority
        self.rank = rank
        self.status = SequenceStatus.WAITING
        self.started = False
        self.block_ids: list[int] = []
        self.cache_scope = cache_scope
        self.prediction, self.max_drafts = prediction, max_drafts
        self.lease = Lease(self.token_ids, cache_scope)
        self.lease.may_reuse = not self.computes_all
        self.num_cached = self.num_to_prefill = self.next_commit = 0
        self.num_computed = self.num_scheduled = self.num_pending = self.num_drafting = 0
        self.last_step = self.leaves_at = 0
        self.num_reclaimable: int | None = None
        self.num_to_allocate: int | None = None
        self.order = (0, 0, 0)
        self.plans_counted = self.results_counted = 0

    @classmethod
    def dispatched(cls, dispatch: Dispatch, spec: SequenceSpec, max_drafts: int = 0) -> Self:
        """The sequence of one of a dispatch's samples, with at most so many drafts in a step."""
        own = dispatch.sampling.max_draft_tokens
        return cls(
            spec.seq_id,
            dispatch.token_ids,
            dispatch.sampling,
            spec=spec,
            info=dispatch.info,
            priority=dispatch.priority,
            cache_scope=dispatch.cache_scope,
            rank=dispatch.rank,
            prediction=dispatch.prediction,
            max_drafts=max_drafts if own is None else min(own, max_drafts),
        )

    def for_executor(self) -> NewSequence:
        """What the executor is told when the sequence starts."""
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=tuple(self.token_ids),
            num_generated=self.num_generated,
            num_cached=self.num_cached,
            block_ids=tuple(self.block_ids),
            sampling=self.sampling,
            sample=self.spec,
            info=self.info,
            cache_scope=self.cache_scope,
            prediction=self.prediction,
        )

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, as far as results are back."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens to be computed before, and including, the one that samples next."""
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def num_unplanned(self) -> int:
        """Tokens that may still be planned: the length limit is known ahead of results."""
        return self.sampling.max_tokens - self.num_generated - self.num_pending

    @property
    def may_sample(self) -> bool:
        """Whether another token may be planned."""
        return self.num_unplanned > 0

    @property
    def scores_prompt(self) -> bool:
        """Whether its prompt's logprobs are wanted and not all known: then it computes all of it.

        The first sample does it for its siblings. The step that samples the first token is the
        one that finds the last of the prompt's logprobs.
        """
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and self.spec.sample_index == 0 and self.num_generated == 0

    @property
    def computes_all(self) -> bool:
        """Whether it can't begin behind a cached prefix, of which there is KV and nothing else."""
        pooling = self.info.pooling
        return self.scores_prompt or (pooling is not None and pooling.reads_all)

    @property
    def pools(self) -> bool:
        """Whether it ends with its prompt, whose vector is wanted, and samples nothing."""
        return self.info.pooling is not None

    @property
    def is_whole(self) -> bool:
        """Whether one step has to compute all of it; there is no KV then."""
        return self.info.pooling is not None and self.info.pooling.whole

    def blocks_to_start(self, block_size: int) -> int:
        """Free blocks that starting it takes, at most."""
        if self.num_to_allocate is not None:
            return self.num_to_allocate
        return -(-len(self.token_ids) // block_size)

    def blocks_to_reclaim(self) -> int:
        """Blocks that preempting it frees."""
        return len(self.block_ids) if self.num_reclaimable is None else self.num_reclaimable

    def needs_block(self, block_size: int) -> bool:
        """Whether its blocks are full, so that its next token takes another one."""
        return self.num_lacking(0, block_size) > 0

    def num_lacking(self, num_drafts: int, block_size: int) -> int:
        """Blocks that it lacks for its next token and so many drafts behind it, at most.

        That is if all drafts of the plans under way are accepted too.
        """
        reach = self.num_scheduled + self.num_drafting + 1 + num_drafts
        reach = min(reach, self.num_prompt_tokens + self.sampling.max_tokens)
        return max(0, -(-reach // block_size) - len(self.block_ids))

    def num_spare(self, block_size: int) -> int:
        """Drafted tokens that fit into its blocks behind its next token, which may take another."""
        blocks = len(self.block_ids) + self.num_lacking(0, block_size)
        return blocks * block_size - self.num_scheduled - self.num_drafting - 1

    def num_draftable(self) -> int:
        """Most drafted tokens that its next token may have behind it: one more is sampled.

        None before its first one: from the step that ends its prompt others may fork, which need
        just what is known of it.
        """
        if self.num_scheduled < self.num_to_prefill:
            return 0
        return max(0, min(self.max_drafts, self.num_unplanned - self.num_drafting - 1))

    def start(self, num_cached: int = 0, block_ids: Iterable[int] | None = None) -> None:
        """WAITING to RUNNING.

        Args:
            num_cached: Leading tokens that are computed already, or, all of them, will be with
                the step that it starts in.
            block_ids: Blocks for all its tokens, in order; None when its lease has them.
        """
        if block_ids is not None:
            self.lease.block_ids = list(block_ids)
        self.status = SequenceStatus.RUNNING
        self.started = True
        self.block_ids = self.lease.block_ids
        self.num_cached = self.num_computed = self.num_scheduled = num_cached
        self.num_to_prefill = len(self.token_ids)
        self.next_commit = 0
        self.order = (self.rank, -self.priority, self.seq_id)

    def plan(self, num_tokens: int, num_drafts: int = 0) -> bool:
        """A step will compute its next `num_tokens` tokens; returns whether it samples another.

        It may verify so many drafted tokens behind them.
        """
        samples = num_tokens == self.num_remaining
        self.num_scheduled += num_tokens
        self.num_pending += samples
        self.num_drafting += num_drafts
        return samples

    def settle_drafts(self, num_drafts: int, accepted: Iterable[int]) -> None:
        """A step that might verify so many drafts is back, with these tokens before its last one.

        Their KV is computed, and so is that which a later plan counts from.
        """
        before = len(self.token_ids)
        self.token_ids.extend(accepted)
        num_accepted = len(self.token_ids) - before
        self.num_computed += num_accepted
        self.num_scheduled += num_accepted
        self.num_drafting -= num_drafts

    def append_token(self, token_id: int, logprob: float | None = None) -> None:
        """Adds a generated token.

        Args:
            token_id: What was sampled.
            logprob: For `output_logprobs`; None where the caller keeps logprobs elsewhere.

        Raises:
            ValueError: The sequence is not running.
        """
        if self.status is not SequenceStatus.RUNNING:
            raise ValueError(f"sequence {self.seq_id} is {self.status.name.lower()}, not running")
        self.num_pending = max(self.num_pending - 1, 0)
        self.token_ids.append(token_id)
        if logprob is not None:
            self.output_logprobs.append(logprob)

    def set_next_commit(self, block_size: int) -> None:
        """The cache was told of all that is computed: next at a full block, or a full prompt."""
        self.next_commit = (self.num_computed // block_size + 1) * block_size
        if self.num_computed < self.num_to_prefill:
            self.next_commit = min(self.next_commit, self.num_to_prefill)

    def preempt(self) -> None:
        """RUNNING to WAITING: it keeps its tokens and gives up its blocks; nothing is in flight."""
        self.status = SequenceStatus.WAITING
        self.block_ids = []
        self.lease.may_reuse = not self.computes_all
        self.num_computed = self.num_scheduled = self.num_pending = self.num_cached = 0
        self.num_drafting = 0
        self.num_to_allocate = self.num_reclaimable = None
