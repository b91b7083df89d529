"""The running sequences, of which those that decode go in step.

Most plans are like the one before: everything that runs computes one token and samples the next.
So a sequence that decodes is a member of a batch whose steps are counted, not written down for each
member: what it has scheduled, computed and sampled follows from how many plans the batch has made
and how many results are back, and its tokens stay where they came, one table for each of the last
steps, until they are asked for. To write a member back is to write all of this down.

A member costs something when it joins or leaves, and when a block of it is full, which is known
ahead: all take one place in each step, so who needs a block now needs the next one `block_size`
steps later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter, itemgetter

from .sequence import Sequence

ORDER = attrgetter("order")


class RunningBatch:
    """The running sequences, most deserving first.

    Attributes:
        others: Those that are not in step, in order: they compute their prompt, or a step may give
            them several tokens (speculation), or they have all the tokens that they may have and
            wait for the last of them.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.others: list[Sequence] = []
        self._prefilling: dict[int, Sequence] = {}
        self._members: list[Sequence] = []
        self._ids: list[int] = []
        # Whether there may be members that speculate.
        self._have_speculating = False
        # Members that came with more blocks than their tokens filled.
        self._have_spare: set[int] = set()
        # Steps are numbered from 0: so many have been planned, and the results of so many taken.
        self._planned = 0
        self._absorbed = 0
        self._step_id = 0
        # Members by the steps that begin a block of theirs, modulo the block size.
        self._begins: list[list[Sequence]] = [[] for _ in range(self._block_size)]
        # Members by the step in which they can't be any more, because of `max_tokens`.
        self._limits: dict[int, list[Sequence]] = {}
        # By step: who has left since it was planned.
        self._left: dict[int, list[Sequence]] = {}
        # The tokens of the last steps, by sequence. No member is not written back for longer.
        self._tokens: deque[Mapping[int, int]] = deque(maxlen=self._block_size)

    def __len__(self) -> int:
        return len(self._members) + len(self.others)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted([*self._members, *self.others], key=ORDER))

    @property
    def in_step(self) -> tuple[int, ...]:
        """The members' ids, in order."""
        return tuple(self._ids)

    def clear(self) -> list[Sequence]:
        """Takes out all sequences, written back and in order; plans under way are forgotten."""
        everyone = list(self)
        for seq in everyone:
            self.remove(seq)
        self._left.clear()
        self._tokens.clear()
        self._absorbed = self._planned
        return everyone

    def add(self, seq: Sequence) -> None:
        """A sequence has started."""
        insort(self.others, seq, key=ORDER)
        self._prefilling[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """A sequence runs no more; it is written back."""
        self._prefilling.pop(seq.seq_id, None)
        if seq.leaves_at:
            self._leave(seq)
        else:
            self.others.remove(seq)

    def prefilling(self) -> Iterable[Sequence]:
        """Those whose prompt is not computed, as far as results are back."""
        for seq in list(self._prefilling.values()):
            if seq.num_computed >= seq.num_to_prefill:
                del self._prefilling[seq.seq_id]
        return self._prefilling.values()

    # --- for plans ----------------------------------------------------------------------------

    def gather(self, *, drafts: bool = True) -> bool:
        """Brings all that decode in step, and takes out those that may have no further token.

        Args:
            drafts: Those that speculate stay out, or leave. Else they come too, once no plan under
                way may give them several tokens.

        Returns:
            Whether that could be. It could not where one of them has yet to compute the last token
            of its prompt, since its blocks reach further than its tokens: then nobody is in step.
        """
        for seq in self._limits.get(self._planned, [])[:]:
            self._part(seq)
        if drafts and self._have_speculating:
            for seq in [seq for seq in self._members if seq.max_drafts]:
                self._part(seq)
            self._have_speculating = False
        decoding = [
            seq
            for seq in self.others
            if seq.num_remaining == 1
            and seq.may_sample
            and not (seq.max_drafts and (drafts or seq.num_drafting))
        ]
        if any(seq.num_scheduled < seq.num_to_prefill for seq in decoding):
            for seq in self._members[:]:
                self._part(seq)
            return False
        for seq in decoding:
            self._join(seq)
            self._have_speculating |= seq.max_drafts > 0
        if decoding:
            self.others = [seq for seq in self.others if not seq.leaves_at]
        return True

    def decoding_apart(self) -> list[Sequence]:
        """Those that compute one token out of step, since drafts may give them more, in order."""
        return [
            seq
            for seq in self.others
            if seq.max_drafts and seq.num_remaining == 1 and seq.may_sample
        ]

    def growing(self) -> list[Sequence]:
        """Members that need a block for the next step, in order.

        Where drafts were not accepted, a member may have blocks that it has not come to yet.
        """
        due = self._begins[self._planned % self._block_size]
        return [seq for seq in due if self._is_full(seq)] if self._have_spare else due

    def advance(self, step_id: int) -> list[Sequence]:
        """A plan has all members, with one token each; returns those that need a block for it."""
        growing = self.growing()
        self._planned += 1
        self._step_id = step_id
        return growing

    def write_back_all(self) -> None:
        """Writes down what all members have scheduled, computed and sampled."""
        for seq in self._members:
            self._write_back(seq)

    # --- for results --------------------------------------------------------------------------

    def absorb(self, tokens: Mapping[int, int], ended: Iterable[Sequence]) -> list[Sequence]:
        """The result of the oldest step is in.

        Args:
            tokens: What was sampled, by sequence; not to be changed any more.
            ended: The sequences that end with it.

        Returns:
            Those whose row in the step is to be taken by hand, in order, since their block is full
            with it, or they end, or have left. All before this step is written back.
        """
        step = self._absorbed
        full = self._begins[(step + 1) % self._block_size]
        present = [seq for seq in (*full, *ended) if seq.leaves_at and seq.results_counted <= step]
        taken = dict.fromkeys(present)
        for seq in taken:
            self._write_back(seq)
            seq.results_counted += 1
        self._absorbed += 1
        self._tokens.append(tokens)
        return sorted([*self._left.pop(step, ()), *taken], key=ORDER)

    def check(self) -> None:
        """Holds the books against each other.

        Raises:
            AssertionError: A sequence is in one of them only, or its place in a block is wrong.
        """
        assert self._ids == [seq.seq_id for seq in self._members], "an id is lost, or a member"
        in_step = set(self._ids)
        for book in (self._begins, self._limits.values()):
            assert {seq.seq_id for seqs in book for seq in seqs} == in_step, "a member is not due"
        assert in_step.isdisjoint(seq.seq_id for seq in self.others), "a member is in two places"
        for seq in self._members:
            assert seq in self._begins_of(seq), "a member is due when its block is not full"
        assert all(step >= self._absorbed for step in self._left), "a step was forgotten"

    # --- inside -------------------------------------------------------------------------------

    def _join(self, seq: Sequence) -> None:
        index = bisect_left(self._members, seq.order, key=ORDER)
        self._members.insert(index, seq)
        self._ids.insert(index, seq.seq_id)
        seq.plans_counted = seq.results_counted = self._planned
        seq.leaves_at = self._planned + seq.num_unplanned
        self._limits.setdefault(seq.leaves_at, []).append(seq)
        insort(self._begins_of(seq), seq, key=ORDER)
        if len(seq.block_ids) * self._block_size >= seq.num_scheduled + self._block_size:
            self._have_spare.add(seq.seq_id)

    def _leave(self, seq: Sequence) -> None:
        """Settles a member and takes it out; of the steps under way it becomes one by hand."""
        self._write_back(seq)
        index = bisect_left(self._members, seq.order, key=ORDER)
        del self._members[index], self._ids[index]
        self._begins_of(seq).remove(seq)
        self._have_spare.discard(seq.seq_id)
        self._limits[seq.leaves_at].remove(seq)
        if not self._limits[seq.leaves_at]:
            del self._limits[seq.leaves_at]
        for step in range(seq.results_counted, self._planned):
            self._left.setdefault(step, []).append(seq)
        seq.leaves_at = 0

    def _part(self, seq: Sequence) -> None:
        self._leave(seq)
        insort(self.others, seq, key=ORDER)

    def _begins_of(self, seq: Sequence) -> list[Sequence]:
        return self._begins[(seq.plans_counted - seq.num_scheduled) % self._block_size]

    def _is_full(self, seq: Sequence) -> bool:
        num_scheduled = seq.num_scheduled + self._planned - seq.plans_counted
        return num_scheduled >= len(seq.block_ids) * self._block_size

    def _write_back(self, seq: Sequence) -> None:
        plans = self._planned - seq.plans_counted
        if plans:
            seq.plans_counted = self._planned
            seq.num_scheduled += plans
            seq.num_pending += plans
            seq.last_step = self._step_id
        results = self._absorbed - seq.results_counted
        if results > 0:
            seq.results_counted = self._absorbed
            seq.num_computed += results
            seq.num_pending -= results
            tokens = islice(self._tokens, len(self._tokens) - results, None)
            seq.token_ids.extend(map(itemgetter(seq.seq_id), tokens))
