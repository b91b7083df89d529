"""One sample of a request, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, Self

import msgspec

from ...bus.messages import AdmittedRequest, Prompt, RequestInfo, SequenceSpec
from ...bus.steps import NewSequence
from ...config import SamplingParams
from .allocation import UNLIMITED, Allocation


class SequenceStatus(Enum):
    """Waiting for its first step (or its next one, after a preemption); running; paused; done."""

    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()
    FINISHED = auto()


class Sequence:
    """Mutable state of one sample.

    A new sequence waits. `start` lets it run with its blocks, `plan` records the tokens that a step
    computes, `append_token` the token that the step sampled. `preempt` lets the sequence wait
    again. The caller sets the status to FINISHED.

    Plans are made ahead of results, so there are three counts of tokens:

        num_computed  <=  num_scheduled  <=  num_planned

    `num_computed` tokens have their KV in the cache. Once all plans sent so far are done,
    `num_scheduled` tokens will have it, and `num_planned` tokens will be known. Each accepted draft
    adds to all three, at most `num_drafting` in total.

    Attributes:
        token_ids: Prompt and generated tokens, as far as results are back.
        output_logprobs: `[generated]`, of the tokens appended with one. Empty in the pipeline,
            where logprobs go to streaming and not through batching.
        num_prompt_tokens: Tokens of the prompt.
        max_length: Most tokens of prompt and output that are planned here.
        hands_over: Whether another replica continues it after its first token here.
        handed_over: Whether another replica has handed it over.
        left: Whether it has left for another replica, with its first token here.
        cache_scope: As in AdmittedRequest.
        max_drafts: Most drafted tokens that a step may verify; 0 without speculation.
        num_drafting: Drafted tokens that plans in flight may verify.
        first_scored: First position whose logits are read for logprobs of the prompt.
        num_indivisible: Most tokens of its prompt that one step may have to compute as a whole.
        extras: State of optional parts, by a name.
        allocation: The sequence's part of the prefix cache.
        started: Whether the sequence has ever run.
        num_to_prefill: Tokens that were known when the sequence started.
        rank: As in AdmittedRequest; sequences with a smaller rank go first and are preempted last.
        next_commit: Number of computed tokens at which the prefix cache is updated next.
        last_step: Id of the last plan that names the sequence; its blocks are in use until then.
        num_reclaimable: Blocks that preempting the sequence frees, set by the owner of a cache with
            shared blocks. None: all its blocks.
        num_to_allocate: Free blocks that starting the sequence takes, set by the owner of a cache.
            None: one for each `block_size` tokens.
        num_cached: Leading tokens found in the cache; while the sequence waits, as a forecast.
    """

    def __init__(
        self,
        seq_id: int,
        token_ids: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        spec: SequenceSpec | None = None,
        request: AdmittedRequest | None = None,
    ) -> None:
        """Create a sequence that waits.

        Args:
            seq_id: Its name in plans and decisions.
            token_ids: The prompt, at least one token.
            sampling: Its parameters; `max_tokens` limits the plans.
            spec: Its place in its request, and the tokens generated before; the first sample of a
                request if None.
            request: Its request; a request of its own if None.

        Raises:
            ValueError: There is no token.
        """
        prompt = list(token_ids)
        if not prompt:
            raise ValueError(f"sequence {seq_id} has no token; it needs at least one to compute")
        spec = spec or SequenceSpec(seq_id, sample_index=0, seed=0)
        self.sampling = sampling or SamplingParams()
        if request is None:
            request = AdmittedRequest(RequestInfo("", ""), Prompt(()), self.sampling, (), "", 0)
        self.seq_id = seq_id
        # The generated tokens are in `token_ids`; the executor needs them once.
        self.spec = msgspec.structs.replace(spec, generated=()) if spec.generated else spec
        self.info = request.info
        self.token_ids = [*prompt, *spec.generated]
        self.output_logprobs: list[float] = []
        self.num_prompt_tokens = len(prompt)
        self.hands_over = self.handed_over = self.left = False
        self._last_length = len(prompt) + self.sampling.max_tokens
        self.max_length = self._limit()
        self.priority, self.rank = request.priority, request.rank
        self.status = SequenceStatus.WAITING
        self.started = False
        self.cache_scope = request.cache_scope
        self.max_drafts = 0
        self.num_indivisible = 1
        self.extras: dict[str, Any] = {}
        self.first_scored = self.sampling.first_scored if self.scores_prompt else 0
        self.allocation = Allocation(self.token_ids, self.cache_scope, self.max_reuse())
        self.num_planned = len(self.token_ids)
        self.num_computed = self.num_scheduled = self.num_cached = self.num_drafting = 0
        self.num_to_prefill = self.next_commit = self.last_step = 0
        self.num_reclaimable: int | None = None
        self.num_to_allocate: int | None = None

    @classmethod
    def dispatched(cls, request: AdmittedRequest, spec: SequenceSpec) -> Self:
        """Create the sequence of one of a request's samples."""
        return cls(
            spec.seq_id, request.prompt.token_ids, request.sampling, spec=spec, request=request
        )

    def for_executor(self, more: dict[str, Any]) -> NewSequence:
        """Return the message with which the executor starts the sequence; `more`: its sections."""
        sampling = self.sampling
        given = sampling.prompt_logprob_token_ids or sampling.prompt_sampling_masks
        if given and not self.scores_prompt:
            # Another sample scores the prompt: thousands of ids are sent once.
            sampling = msgspec.structs.replace(
                sampling, prompt_logprob_token_ids=None, prompt_sampling_masks=None
            )
        return NewSequence(
            seq_id=self.seq_id,
            token_ids=tuple(self.token_ids),
            num_generated=self.num_generated,
            num_cached=self.num_cached,
            block_ids=tuple(self.block_ids),
            sampling=sampling,
            sample=self.spec,
            info=self.info,
            cache_scope=self.cache_scope,
            handed_over=self.handed_over,
            hands_over=self.hands_over,
            **more,
        )

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of running sequences, the first to be preempted last."""
        return (self.rank, -self.priority, self.seq_id)

    # --- tokens -------------------------------------------------------------------------------

    @property
    def num_generated(self) -> int:
        """Tokens sampled, as far as results are back."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.num_planned - self.num_scheduled

    @property
    def may_sample(self) -> bool:
        """Whether another token may be planned: the length limit is known ahead of results."""
        return self.num_planned < self.max_length

    @property
    def scores_prompt(self) -> bool:
        """Whether the sequence still has to compute logprobs of its prompt.

        The first sample of a request does it for its siblings. The step that samples the first
        token also finds the last of the prompt's logprobs; after a handover that is done.
        """
        return self.sampling.scores_prompt and self._reports_prompt

    @property
    def _reports_prompt(self) -> bool:
        first = self.spec.sample_index == 0 and self.num_generated == 0
        return first and not self.handed_over

    def max_reuse(self) -> int:
        """Return how many leading tokens may come from the cache, which has KV, but no logits or
        hidden states and no experts: those before the first position of which these are needed."""
        pooling = self.info.pooling
        if pooling is not None and pooling.reads_all:
            return 0
        most = self.first_scored if self.scores_prompt else UNLIMITED
        if self.sampling.return_routed_experts and self._reports_prompt:
            most = min(most, self.sampling.routed_experts_prompt_start)
        return most

    @property
    def pools(self) -> bool:
        """Whether the sequence ends with its prompt, whose vector is its result."""
        return self.info.pooling is not None

    @property
    def is_whole(self) -> bool:
        """Whether one step has to compute the whole prompt, without KV (an encoder)."""
        return self.info.pooling is not None and self.info.pooling.whole

    # --- blocks -------------------------------------------------------------------------------

    @property
    def block_ids(self) -> list[int]:
        """The block table; the allocation's own list."""
        return self.allocation.block_ids

    def blocks_to_start(self, block_size: int) -> int:
        """Return the number of free blocks that starting takes, at most."""
        if self.num_to_allocate is not None:
            return self.num_to_allocate
        return -(-len(self.token_ids) // block_size)

    def blocks_to_reclaim(self) -> int:
        """Return the number of blocks that preempting frees."""
        return len(self.block_ids) if self.num_reclaimable is None else self.num_reclaimable

    def needs_block(self, block_size: int) -> bool:
        """Whether the next token needs another block."""
        reach = self.num_scheduled + self.num_drafting + 1
        return min(reach, self.max_length) > len(self.allocation.block_ids) * block_size

    def num_lacking(self, num_drafts: int, block_size: int) -> int:
        """Return the number of blocks to add for the next token and so many drafts after it.

        All drafts in flight are assumed to be accepted.
        """
        reach = min(self.num_scheduled + self.num_drafting + 1 + num_drafts, self.max_length)
        return max(0, -(-reach // block_size) - len(self.block_ids))

    def num_spare(self, block_size: int) -> int:
        """Return the number of drafts that fit after the next token without a further block."""
        blocks = len(self.block_ids) + self.num_lacking(0, block_size)
        return blocks * block_size - self.num_scheduled - self.num_drafting - 1

    def num_draftable(self) -> int:
        """Return the most drafts that the next token may have after it.

        0 in the step that ends the prompt: its siblings share the prefill, and need exactly the
        tokens known now.
        """
        if self.num_scheduled < self.num_to_prefill:
            return 0
        room = self.max_length - self.num_planned - self.num_drafting - 1
        return max(0, min(self.max_drafts, room))

    # --- changes ------------------------------------------------------------------------------

    def start(self, num_cached: int = 0, block_ids: Iterable[int] | None = None) -> None:
        """WAITING to RUNNING.

        Args:
            num_cached: Leading tokens that are computed already; all of them with a shared
                prefill, whose step computes them.
            block_ids: Blocks for all tokens, in order; None if the allocation has them.
        """
        if block_ids is not None:
            self.allocation.block_ids = list(block_ids)
        self.status = SequenceStatus.RUNNING
        self.started = True
        self.num_cached = self.num_computed = self.num_scheduled = num_cached
        self.num_to_prefill = len(self.token_ids)
        self.next_commit = 0

    def plan(self, num_tokens: int, num_drafts: int = 0) -> bool:
        """Record a step that computes the next `num_tokens` tokens, and the drafts it may verify.

        Returns:
            Whether the step samples a token.
        """
        samples = num_tokens == self.num_planned - self.num_scheduled
        self.num_scheduled += num_tokens
        self.num_planned += samples
        self.num_drafting += num_drafts
        return samples

    def settle_drafts(self, num_drafts: int, accepted: Iterable[int]) -> None:
        """Record the result of a step that could verify `num_drafts` drafts.

        Args:
            num_drafts: As planned.
            accepted: The step's tokens but the last one.
        """
        before = len(self.token_ids)
        self.token_ids.extend(accepted)
        num_accepted = len(self.token_ids) - before
        self.num_computed += num_accepted
        self.num_scheduled += num_accepted
        self.num_planned += num_accepted
        self.num_drafting -= num_drafts

    def append_token(self, token_id: int, logprob: float | None = None) -> None:
        """Append a generated token.

        Args:
            token_id: The sampled token.
            logprob: For `output_logprobs`; None if the caller keeps logprobs elsewhere.

        Raises:
            ValueError: The sequence is not running.
        """
        if self.status is not SequenceStatus.RUNNING:
            raise ValueError(f"sequence {self.seq_id} is {self.status.name.lower()}, not running")
        self.token_ids.append(token_id)
        self.num_planned = max(self.num_planned, len(self.token_ids))
        if logprob is not None:
            self.output_logprobs.append(logprob)

    def hand_over_after_first(self) -> None:
        """Plan no more than one token here: another replica continues."""
        self.hands_over = True
        self.max_length = self._limit()

    def set_next_commit(self, block_size: int) -> None:
        """Commit next when a block is full, or the prompt computed."""
        self.next_commit = (self.num_computed // block_size + 1) * block_size
        if self.num_computed < self.num_to_prefill:
            self.next_commit = min(self.next_commit, self.num_to_prefill)

    def preempt(self) -> None:
        """RUNNING to WAITING, with all tokens and without blocks; no plan in flight names it."""
        self.status = SequenceStatus.WAITING
        self.allocation.block_ids = []
        self.allocation.max_reuse = self.max_reuse()
        self.num_planned = len(self.token_ids)
        self.max_length = self._limit()
        self.num_computed = self.num_scheduled = self.num_cached = self.num_drafting = 0
        self.num_to_allocate = self.num_reclaimable = None

    def _limit(self) -> int:
        """Return the tokens after which no more are planned here."""
        if self.hands_over:
            return min(self._last_length, len(self.token_ids) + 1)
        return self._last_length
