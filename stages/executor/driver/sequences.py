"""The sequence table: one fixed row of arrays for each sequence, and no objects.

A step over many sequences is a constant number of numpy operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from ....bus.messages import DEFAULT_SCOPE, CacheScope, RequestInfo
from ....bus.parts.speculation import Prediction
from ....bus.steps import AUDIT_SEQ_ID, NewSequence, StartedSequence, StepPlan
from ....config import Constraint, SamplingParams
from ..runner.interface import NO_ADAPTER, IntArray

BoolArray = npt.NDArray[np.bool_]

_NO_SEQUENCE = -1


class Places(msgspec.Struct, frozen=True):
    """Places to sample at, `[places]` each.

    Attributes:
        rows: Rows of the SequenceTable.
        ahead: Drafted tokens before the place, which the table holds after the known ones; 0 for
            the place after the known tokens.
    """

    rows: IntArray
    ahead: IntArray

    @classmethod
    def next_of(cls, rows: IntArray) -> Places:
        """Return the place after the known tokens of each row."""
        return cls(rows, np.zeros_like(rows))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: npt.NDArray[Any]) -> Places:
        """Select places by a mask or by indices."""
        return Places(self.rows[which], self.ahead[which])


class SequenceTable:
    """The executor's sequences.

    The arrays are indexed by row number; `rows_of` finds it. Rows are used again, so a row number
    holds only until its sequence is removed.

    Attributes:
        block_size: Tokens per block.
        tokens: `[rows, max_model_len]`, prompt and generated tokens, then drafted ones while a step
            verifies them.
        blocks: `[rows, blocks]`, the block tables.
        num_blocks: Valid entries of `blocks`.
        num_known: Valid entries of `tokens`.
        num_computed: Leading tokens whose KV is in the cache.
        num_generated: Generated tokens at the end, those of earlier runs included.
        max_tokens: Generation ends when `num_generated` reaches this.
        finished: The sequence has ended, perhaps before a plan says so.
        temperature, top_k, top_p, min_p, seed: Sampling parameters.
        repetition_penalty, presence_penalty, frequency_penalty, min_tokens: More of them.
        adjusted: Whether penalties, a bias or `min_tokens` change the logits.
        limited: Whether top_k, top_p or min_p restricts the choice.
        restricted: Whether there are limits, masks to report, or forced tokens.
        plain: Whether tokens are sampled from the full vocabulary, with nothing else reported.
        simple: Whether they are but for limits.
        num_logprobs: Top tokens to report beside each sampled one.
        masks: Whether the sampling mask of each token is reported.
        num_forced: The number of forced tokens.
        forced: Per row, the forced tokens.
        scores: Whether logits at positions of the prompt are still to be read for logprobs.
        prompt_logprobs: Likewise for the prompt, -1 if its logprobs are not requested; valid while
            `scores`, as the next two.
        score_start: The first position whose logits are read for the prompt's logprobs.
        targets: Per row, its Targets; None without any.
        supports: Per row, the sampling masks of the prompt's last tokens.
        routes: Whether the experts of each token are reported.
        routes_from: The first position of the prompt whose experts are reported; -1 if an earlier
            run or another sample reports the prompt's.
        stop_ids: Per row, the token ids that end it.
        logit_bias: Per row, the bias by token id.
        constrained: Whether the text must follow a grammar.
        constraint: Per row, its constraint.
        info: Per row, its request; None before the first.
        incomplete: Whether the sequence ends before the end of its grammar.
        adapter: The adapter's slot, from `AdapterTable.slot_of`.
        pools: Whether the prompt's vector is requested, and no token.
        prediction: Per row, the client's predicted output, after its forced tokens.
        scope: Per row; drafts come only from sequences of the same scope.
        images: Per row, where they are, for SequenceImages; only valid if `images_end` is above 0.
        images_end: One past the last token of an image; 0 for none.
        position_shift: Rotary position of a token after the images, less its index.
    """

    def __init__(self, rows: int, max_model_len: int, block_size: int) -> None:
        self._max_model_len = max_model_len
        self.block_size = block_size
        # Pages of zeros take memory only when they are written.
        self.tokens: IntArray = np.zeros((rows, max_model_len), np.int64)
        self.blocks: IntArray = np.zeros((rows, -(-max_model_len // block_size)), np.int64)
        self.num_blocks: IntArray = np.zeros(rows, np.int64)
        self.num_known: IntArray = np.zeros(rows, np.int64)
        self.num_computed: IntArray = np.zeros(rows, np.int64)
        self.num_generated: IntArray = np.zeros(rows, np.int64)
        self.max_tokens: IntArray = np.zeros(rows, np.int64)
        self.finished: BoolArray = np.zeros(rows, np.bool_)
        self.temperature: npt.NDArray[np.float32] = np.zeros(rows, np.float32)
        self.top_k: IntArray = np.zeros(rows, np.int64)
        self.top_p: npt.NDArray[np.float64] = np.zeros(rows, np.float64)
        self.min_p: npt.NDArray[np.float64] = np.zeros(rows, np.float64)
        self.seed: npt.NDArray[np.uint64] = np.zeros(rows, np.uint64)
        self.repetition_penalty: npt.NDArray[np.float32] = np.zeros(rows, np.float32)
        self.presence_penalty: npt.NDArray[np.float32] = np.zeros(rows, np.float32)
        self.frequency_penalty: npt.NDArray[np.float32] = np.zeros(rows, np.float32)
        self.min_tokens: IntArray = np.zeros(rows, np.int64)
        self.adjusted: BoolArray = np.zeros(rows, np.bool_)
        self.limited: BoolArray = np.zeros(rows, np.bool_)
        self.restricted: BoolArray = np.zeros(rows, np.bool_)
        self.plain: BoolArray = np.zeros(rows, np.bool_)
        self.simple: BoolArray = np.zeros(rows, np.bool_)
        self.num_logprobs: IntArray = np.zeros(rows, np.int64)
        self.masks: BoolArray = np.zeros(rows, np.bool_)
        self.num_forced: IntArray = np.zeros(rows, np.int64)
        self.forced: list[tuple[int, ...]] = [()] * rows
        self.scores: BoolArray = np.zeros(rows, np.bool_)
        self.prompt_logprobs: IntArray = np.zeros(rows, np.int64)
        self.score_start: IntArray = np.zeros(rows, np.int64)
        self.targets: list[Any] = [None] * rows
        self.supports: list[Any] = [()] * rows
        self.routes: BoolArray = np.zeros(rows, np.bool_)
        self.routes_from: IntArray = np.zeros(rows, np.int64)
        self.stop_ids: list[frozenset[int]] = [frozenset()] * rows
        self.logit_bias: list[dict[int, float]] = [{}] * rows
        self.constrained: BoolArray = np.zeros(rows, np.bool_)
        self.constraint: list[Constraint | None] = [None] * rows
        self.info: list[RequestInfo | None] = [None] * rows
        self.incomplete: BoolArray = np.zeros(rows, np.bool_)
        self.adapter: IntArray = np.full(rows, NO_ADAPTER)
        self.pools: BoolArray = np.zeros(rows, np.bool_)
        self.prediction: list[tuple[int, ...]] = [()] * rows
        self.scope: list[CacheScope] = [DEFAULT_SCOPE] * rows
        self.images: list[Any] = [None] * rows
        self.images_end: IntArray = np.zeros(rows, np.int64)
        self.position_shift: IntArray = np.zeros(rows, np.int64)
        self._seq_ids: IntArray = np.zeros(rows, np.int64)
        self.clear()

    def __len__(self) -> int:
        return len(self._row_of)

    def clear(self) -> None:
        """Drop all sequences."""
        self._row_of: dict[int, int] = {}
        self._seq_ids[:] = _NO_SEQUENCE
        self._free = list(range(len(self.num_blocks) - 1, -1, -1))

    def add(self, new: NewSequence, adapter: int = NO_ADAPTER) -> None:
        """Add a sequence, with the slot of its adapter.

        Raises:
            ValueError: The id is in use, or the sequence is inconsistent.
        """
        count = len(new.token_ids)
        if new.seq_id in self._row_of:
            raise ValueError(f"sequence {new.seq_id} is already here")
        if not 0 <= new.num_cached <= count or not 0 < count <= self._max_model_len:
            raise ValueError(
                f"sequence {new.seq_id} has {count} tokens, {new.num_cached} of them cached; it "
                f"needs one, and at most {self._max_model_len} fit"
            )
        if not self._free:
            self._enlarge()
        row = self._free.pop()
        self._row_of[new.seq_id] = row
        self._seq_ids[row] = new.seq_id
        self.tokens[row, :count] = new.token_ids
        self.num_blocks[row] = 0
        self.append_blocks(new.seq_id, new.block_ids)
        self.num_known[row] = count
        self.num_computed[row] = new.num_cached
        self.num_generated[row] = new.num_generated
        room = self._max_model_len - (count - new.num_generated)
        # A planned sequence gets a token, also at the end of the context.
        self.max_tokens[row] = max(min(new.sampling.max_tokens, room), new.num_generated + 1)
        self.finished[row] = False
        self.adapter[row] = adapter
        self.pools[row] = new.info.pooling is not None
        expected = Prediction.find(new.parts)
        prediction = expected.token_ids if expected is not None else ()
        self.prediction[row] = new.sampling.forced_tokens + prediction
        self.info[row] = new.info
        self.scope[row] = new.cache_scope
        self.images_end[row] = self.position_shift[row] = 0
        self._set_sampling(row, new)

    def _set_sampling(self, row: int, new: NewSequence) -> None:
        sampling = new.sampling
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = new.sample.seed & 0xFFFF_FFFF_FFFF_FFFF
        self.stop_ids[row] = sampling.stop_token_ids
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.logit_bias[row] = sampling.logit_bias
        self.min_tokens[row] = sampling.min_tokens if sampling.stop_token_ids else 0
        self.adjusted[row] = bool(
            sampling.repetition_penalty != 1
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.logit_bias
            or self.min_tokens[row]
        )
        self.constraint[row] = sampling.constraint
        self.constrained[row] = sampling.constraint is not None
        self.incomplete[row] = False
        self.num_logprobs[row] = sampling.logprobs
        self.limited[row] = limited = sampling.is_limited
        self.masks[row] = masks = sampling.return_sampling_mask
        self.forced[row] = forced = sampling.forced_tokens
        self.num_forced[row] = len(forced)
        self.restricted[row] = bool(limited or masks or forced)
        changed = self.adjusted[row] or self.constrained[row]
        self.simple[row] = simple = not (changed or masks or forced or sampling.logprobs)
        self.plain[row] = simple and not limited
        # The first sample reports the prompt for all, before it samples.
        speaks = new.sample.sample_index == 0 and new.num_generated == 0
        self.scores[row] = scores = speaks and sampling.scores_prompt
        if scores:
            self._set_scores(row, sampling)
        self.routes[row] = routes = sampling.return_routed_experts
        if routes:
            self.routes_from[row] = sampling.routed_experts_prompt_start if speaks else -1

    def _set_scores(self, row: int, sampling: SamplingParams) -> None:
        from .targets import Targets

        start, targets = sampling.prompt_logprob_start, sampling.prompt_logprob_token_ids
        wanted = sampling.prompt_logprobs
        self.prompt_logprobs[row] = -1 if wanted is None else wanted
        self.score_start[row] = start
        self.targets[row] = None if targets is None else Targets.of(targets, start)
        self.supports[row] = sampling.prompt_sampling_masks or ()

    def change_adapter(self, before: int, after: int) -> None:
        """Move all sequences from one adapter's slot to another."""
        if before >= 0:
            self.adapter[self.adapter == before] = after

    def remove(self, seq_id: int) -> None:
        """Drop a sequence. Unknown ids are ignored."""
        row = self._row_of.pop(seq_id, None)
        if row is not None:
            self._seq_ids[row] = _NO_SEQUENCE
            self._free.append(row)

    def append_blocks(self, seq_id: int, block_ids: Sequence[int]) -> None:
        """Extend a sequence's block table.

        Raises:
            KeyError: The sequence is unknown.
            ValueError: The table is longer than any sequence can be.
        """
        row = self._row_of[seq_id]
        start = int(self.num_blocks[row])
        stop = start + len(block_ids)
        if stop > self.blocks.shape[1]:
            raise ValueError(f"{stop} blocks are more than the longest sequence can fill")
        self.blocks[row, start:stop] = block_ids
        self.num_blocks[row] = stop

    def rows_of(self, seq_ids: Sequence[int]) -> IntArray:
        """Return the row numbers of sequences, `[len(seq_ids)]`.

        Raises:
            KeyError: One is unknown.
        """
        return np.array(list(map(self._row_of.__getitem__, seq_ids)), np.int64)

    def row_of(self, seq_id: int) -> int | None:
        """Return the row number of a sequence; None if unknown."""
        return self._row_of.get(seq_id)

    def ids_of(self, rows: IntArray) -> IntArray:
        """Return the sequences in these rows, `[rows]`."""
        return self._seq_ids[rows]

    def write_tokens(self, rows: IntArray, places: IntArray, token_ids: IntArray) -> None:
        """Set one token in each row. Positions beyond the longest sequence are ignored."""
        room = places < self._max_model_len
        self.tokens[rows[room], places[room]] = token_ids[room]

    def holds(self, rows: IntArray, seq_ids: IntArray) -> BoolArray:
        """Return which rows still belong to these sequences, `[rows]`."""
        held: BoolArray = self._seq_ids[rows] == seq_ids
        return held

    def at_limit(self, rows: IntArray) -> BoolArray:
        """Return which rows have reached their limit, `[rows]`."""
        return self.num_generated[rows] >= self.max_tokens[rows]

    def cut_off(self, row: int) -> None:
        """Make a row's next token its last one, with an incomplete text."""
        self.max_tokens[row] = self.num_generated[row] + 1
        self.incomplete[row] = True

    def must_go_on(self, places: Places) -> BoolArray:
        """Return where stop tokens are not allowed yet, `[places]`."""
        return self.num_generated[places.rows] + places.ahead < self.min_tokens[places.rows]

    def is_last(self, places: Places) -> BoolArray:
        """Return where the token is the last one of the sequence, `[places]`."""
        generated = self.num_generated[places.rows] + places.ahead + 1
        return generated >= self.max_tokens[places.rows]

    def forced_at(self, places: Places) -> tuple[IntArray, IntArray]:
        """Return the indices of the places of forced tokens, and these tokens."""
        positions = self.num_generated[places.rows] + places.ahead
        which = np.flatnonzero(positions < self.num_forced[places.rows])
        pairs = zip(places.rows[which].tolist(), positions[which].tolist(), strict=True)
        return which, np.array([self.forced[row][position] for row, position in pairs], np.int64)

    def _enlarge(self) -> None:
        """Double the number of rows."""
        old = len(self.num_blocks)
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
            elif isinstance(column, list):
                column += [None] * old  # `add` sets them
        self._free = list(range(2 * old - 1, old - 1, -1))

    def complain(self, row: int, num_tokens: int) -> NoReturn:
        """Raise ValueError for a plan that computes too many tokens of a row."""
        (seq_id,) = self.ids_of(np.array([row])).tolist()
        raise ValueError(
            f"the plan computes {num_tokens} tokens of sequence {seq_id}, which has "
            f"{self.num_computed[row]} computed, {self.num_known[row]} known and "
            f"{self.num_blocks[row]} blocks"
        )


def started_sequences(plan: StepPlan, executed_ns: int) -> tuple[StartedSequence, ...]:
    """Return entries for the new sequences of a plan that belong to requests."""
    return tuple(
        StartedSequence(
            seq_id=new.seq_id,
            sample_index=new.sample.sample_index,
            request_id=new.info.request_id,
            entry_id=new.info.entry_id,
            num_cached=new.num_cached,
            num_generated=new.num_generated,
            executed_ns=executed_ns,
            queued=new.info.queued,
            handed_over=new.handed_over,
            hands_over=new.hands_over,
            parts=new.onward,
        )
        for new in plan.new
        if new.seq_id != AUDIT_SEQ_ID
    )
