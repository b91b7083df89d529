"""One sample in the making, as the scheduler sees it."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from ...bus.messages import RequestInfo, SequenceSpec
from ...config import SamplingParams
from .cache import Lease


class SequenceStatus(Enum):
    """Waiting for its first (or, after a preemption, next) step, or set aside; running; done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Mutable state of one sample.

    Plans are made ahead of results, so there are three counts of tokens:

        num_computed  <=  num_scheduled  <=  num_tokens + num_pending

    `num_computed` have their KV in the cache, `num_scheduled` will have it once all plans sent so
    far are done, and `num_pending` more tokens than those known will have been sampled by then.

    Attributes:
        token_ids: Prompt and generated tokens, as far as results are back.
        block_ids: The block table; the list is the lease's, which extends it.
        lease: What the sequence has of the prefix cache.
        num_to_prefill: Tokens that were known when it started.
        rank: As in Dispatch; those with a smaller one go first, and are preempted last.
        next_commit: When so many tokens are computed, the prefix cache is to be told.
        last_step: Id of the last plan that names the sequence; its blocks are in use until then.
        num_reclaimable: Blocks that preempting it would free; set when blocks are short.
        num_to_allocate: Free blocks that starting it takes; set while it waits.
        num_cached: Leading tokens found in the cache; while it waits, those that would be found.
        order: Sorts those that run, most deserving first.
        leaves_at: The first step of the RunningBatch that is not to have it any more; 0 while it is
            not in step. The counts above and `token_ids` are then as of the steps counted.
        plans_counted: Steps of the RunningBatch whose plans are in `num_scheduled`.
        results_counted: Steps of it whose results are in `num_computed` and `token_ids`.
    """

    __slots__ = (
        "block_ids",
        "info",
        "last_step",
        "lease",
        "leaves_at",
        "next_commit",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_prompt_tokens",
        "num_reclaimable",
        "num_scheduled",
        "num_to_allocate",
        "num_to_prefill",
        "order",
        "plans_counted",
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
        spec: SequenceSpec,
        info: RequestInfo,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        rank: int = 0,
    ) -> None:
        self.seq_id = spec.seq_id
        # The tokens are in `token_ids`; the executor needs them once.
        self.spec = msgspec.structs.replace(spec, generated=()) if spec.generated else spec
        self.info = info
        self.token_ids = [*token_ids, *spec.generated]
        self.num_prompt_tokens = len(token_ids)
        self.sampling = sampling
        self.priority = priority
        self.rank = rank
        self.status = SequenceStatus.WAITING
        self.started = False
        self.block_ids: list[int] = []
        self.lease = Lease(self.token_ids, cache_salt)
        self.lease.may_reuse = not self.scores_prompt
        self.num_cached = 0
        self.num_to_prefill = 0
        self.next_commit = 0
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_pending = 0
        self.last_step = 0
        self.num_reclaimable = 0
        self.num_to_allocate = 0
        self.order = (0, 0, 0)
        self.leaves_at = 0
        self.plans_counted = 0
        self.results_counted = 0

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

    def append_token(self, token_id: int) -> None:
        """Adds a generated token.

        Raises:
            ValueError: The sequence is not running.
        """
        if self.status is not SequenceStatus.RUNNING:
            raise ValueError(f"sequence {self.seq_id} is {self.status.name.lower()}, not running")
        self.token_ids.append(token_id)

    def start(self, num_cached: int) -> None:
        """WAITING to RUNNING: it has blocks for all its tokens, the first `num_cached` computed."""
        self.status = SequenceStatus.RUNNING
        self.started = True
        self.block_ids = self.lease.block_ids
        self.num_cached = self.num_computed = self.num_scheduled = num_cached
        self.num_to_prefill = len(self.token_ids)
        self.next_commit = 0
        self.order = (self.rank, -self.priority, self.seq_id)

    def preempt(self) -> None:
        """RUNNING to WAITING: it keeps its tokens and gives up its blocks; nothing is in flight."""
        self.status = SequenceStatus.WAITING
        self.block_ids = []
        self.lease.may_reuse = not self.scores_prompt
        self.num_computed = self.num_scheduled = self.num_pending = 0
