"""Token masks of samples whose text must follow a grammar.

A matcher advances to the sample's present tokens, however they came. So preemption, recovery and
new weights need no special case.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import llguidance.numpy
import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from ....bus.control import Cancel
from ....config import Constraint, ModelError, RequestError
from ....text.grammar import MASK_S, GrammarCompiler, allows, is_dead_end, is_too_costly, only
from ..runner.interface import IntArray, cpu
from .sequences import BoolArray, Places, SequenceTable

_MASK_S = 0.005
"""CPU time per mask. Nearly all take less than 1 ms; the first masks of 128 strict tools take up to
12 ms at 151,936 tokens."""

_EXCESS_S = 0.2
"""The total CPU time beyond that for one sample."""

_SLOW_S = 0.01
"""After a slower step, the next one times each mask by itself."""

_GROWN_S = 0.01
"""Mask time after which a running sample's memory is counted; finding its grammar takes up to a
fraction of a millisecond."""

_TOO_COSTLY = (
    "the constraint is too complex at this position of the text; simplify it: patterns that "
    "must match together, or must not match, multiply their states"
)


class TokenMasks(NamedTuple):
    """The allowed tokens of some rows of a batch.

    Attributes:
        places: `[masked]`, indices of the rows in the batch.
        allowed: `[masked, ceil(vocab / 32)]`, a bit for each token, lowest bit first.
        unsure: `[masked]`, whether the mask, after drafted tokens, is unknown.
    """

    places: IntArray
    allowed: npt.NDArray[np.int32]
    unsure: BoolArray

    def apply(self, logits: Tensor, *, kernels: bool = False) -> None:
        """Set forbidden logits to minus infinity, in place.

        Args:
            logits: `[batch, vocab]` float32, contiguous.
            kernels: Use our kernel, which doesn't touch allowed logits (CPU).
        """
        if kernels:
            cpu.forbid(logits, self.places, self.allowed)
            return
        # One bit per token to one byte per token.
        eights, vocab = (~self.allowed).view(np.uint8), logits.shape[1]
        ones = np.unpackbits(eights, axis=1, count=vocab, bitorder="little")
        forbidden = torch.from_numpy(ones.view(np.bool_)).to(logits.device)
        if len(self.places) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
            return
        for place, row in zip(self.places.tolist(), forbidden, strict=True):
            logits[place].masked_fill_(row, -torch.inf)


class PendingMasks(NamedTuple):
    """Masks that another thread computes.

    Attributes:
        masks: The masks.
        now_ns: The clock.
        waits_ns: The list of waiting times.
    """

    masks: Future[TokenMasks]
    now_ns: Callable[[], int]
    waits_ns: deque[int]

    def result(self, timeout_s: float | None = None) -> TokenMasks:
        """Wait for the masks.

        Raises:
            TimeoutError: The timeout has passed.
        """
        start_ns = self.now_ns()
        masks = self.masks.result(timeout_s)
        self.waits_ns.append(self.now_ns() - start_ns)
        return masks


@dataclass(slots=True)
class _Sample:
    """One sample's state in its grammar.

    Attributes:
        seq_id: The sequence.
        constraint: Its constraint.
        matcher: None if the constraint can't be followed.
        spelled: Tokens that the text shows by their names, by id, with the tokens that spell them
            for the matcher.
        failure: Why its request ends; "" while it runs.
        consumed: Generated tokens to which the matcher has advanced.
        goes_back: Whether the matcher can go back before drafted tokens, None if unknown; not with
            max_tokens or stop in its grammar.
        is_costly: A mask after drafted tokens has hit a work limit.
        excess_s: CPU time of its masks beyond the limit per mask.
        grown_s: Time of its masks whose memory is not counted yet.
    """

    seq_id: int
    constraint: Constraint
    matcher: LLMatcher | None
    spelled: Mapping[int, list[int]] = field(default_factory=dict)
    failure: str = ""
    consumed: int = 0
    goes_back: bool | None = None
    is_costly: bool = False
    excess_s: float = 0.0
    grown_s: float = 0.0

    def consume(self, token_ids: list[int]) -> None:
        """Advance the matcher."""
        matcher = self.matcher
        if matcher is None:
            return
        if self.spelled.keys().isdisjoint(token_ids):
            matcher.consume_tokens(token_ids)
            return
        for token_id in token_ids:
            # A grammar may have the token itself at this place.
            is_own = token_id not in self.spelled or matcher.validate_tokens([token_id])
            matcher.consume_tokens([token_id] if is_own else self.spelled[token_id])

    def shown_after(self, draft: list[int]) -> list[int]:
        """Return the tokens of `spelled` whose names may come after drafted tokens."""
        matcher = self.matcher
        if matcher is None or matcher.is_error():
            return []
        return [
            token_id
            for token_id, spelling in self.spelled.items()
            if matcher.validate_tokens(draft + spelling) == len(draft) + len(spelling)
        ]

    def for_drafts(self, matcher: LLMatcher) -> LLMatcher:
        """Return what computes masks after drafted tokens: a copy of its matcher, unless that can
        go back. Trying fails it for good; and after a thousand tokens a copy takes 0.1 ms."""
        return matcher if self.goes_back else matcher.deep_copy()

    def drafted(self, matcher: LLMatcher) -> None:
        """Note what has become of a matcher of `for_drafts`."""
        self.goes_back = not matcher.is_error()
        self.is_costly = self.is_costly or is_too_costly(matcher)

    def look(self) -> None:
        """Fail the sample if the last mask hit a work limit, or the masks took too long."""
        costly = self.is_costly or self.excess_s > _EXCESS_S
        if self.matcher is not None and (costly or is_too_costly(self.matcher)):
            self.failure, self.matcher = _TOO_COSTLY, None


class _AskedMask(NamedTuple):
    """A sample to mask: at one place, and after each drafted token."""

    sample: _Sample
    matcher: LLMatcher
    place: int
    draft: list[int]


@dataclass(eq=False)
class GrammarMasks:
    """The matchers of constrained samples, by rows of the table.

    Attributes:
        table: The sequences.
        compiler: Compiler of the grammars.
        now_ns: The clock.
        samples: Their state, by row; of samples that are gone until the next `begin`.
    """

    table: SequenceTable
    compiler: GrammarCompiler
    now_ns: Callable[[], int] = time.time_ns

    def __post_init__(self) -> None:
        # Bounded, since nothing may read it.
        self._waits_ns: deque[int] = deque(maxlen=1024)
        self.samples: dict[int, _Sample] = {}
        self._failures: deque[Cancel] = deque()
        self._times_each = False
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._parallel: LLExecutor | None = None

    def begin(self, places: Places) -> PendingMasks | None:
        """Start to compute masks, beside the forward pass, on another thread; None if unneeded.

        The tokens before the places must be known.

        Args:
            places: In batch order, those of one row in order.
        """
        if self.samples:
            self._drop_gone()
        masked = np.flatnonzero(self.table.constrained[places.rows])
        if not masked.size:
            return None
        masks = self._thread.submit(self._masks, masked, places[masked])
        return PendingMasks(masks, self.now_ns, self._waits_ns)

    def check_draft(self, row: int, draft: tuple[int, ...]) -> int:
        """Return how many leading tokens of a draft a row's grammar allows.

        Not while masks are computed.
        """
        if not self.table.constrained[row]:
            return len(draft)
        (sample,) = self._advance(np.array([row]))
        return sample.matcher.validate_tokens(list(draft)) if sample.matcher is not None else 0

    def forced(self, row: int) -> tuple[int, ...]:
        """Return the tokens that a row's grammar forces next, as far as they are known.

        Not while masks are computed.
        """
        if not self.table.constrained[row]:
            return ()
        (sample,) = self._advance(np.array([row]))
        return tuple(sample.matcher.compute_ff_tokens()) if sample.matcher is not None else ()

    def take_waits_ns(self) -> list[int]:
        """Return the waiting times for masks since the last call; from any thread."""
        return [self._waits_ns.popleft() for _ in range(len(self._waits_ns))]

    def take_failures(self) -> tuple[Cancel, ...]:
        """Return cancellations of requests whose constraints failed, each once. Their sequences end
        with their next token."""
        return tuple(self._failures.popleft() for _ in range(len(self._failures)))

    def clear(self) -> None:
        """Drop all samples."""
        self.samples.clear()
        self._failures.clear()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)

    def _drop_gone(self) -> None:
        """Free the matchers of sequences that have left: each may have grown to tens of MB."""
        rows = np.fromiter(self.samples, np.int64, len(self.samples))
        ids = np.array([sample.seq_id for sample in self.samples.values()])
        gone = rows[~self.table.holds(rows, ids)].tolist()
        for row in gone:
            self._charge(self.samples.pop(row))

    def _charge(self, sample: _Sample) -> None:
        if sample.grown_s and not sample.failure:
            self.compiler.charge(sample.constraint, sample.grown_s)
            sample.grown_s = 0.0

    def _masks(self, masked: IntArray, places: Places) -> TokenMasks:
        allowed = llguidance.numpy.allocate_token_bitmask(len(places), self.compiler.vocab_size)
        firsts = np.flatnonzero(places.ahead == 0)
        rows = places.rows[firsts]
        samples = self._advance(rows)
        asked = [
            _AskedMask(sample, sample.matcher, first, draft)
            for sample, first, draft in zip(
                samples, firsts.tolist(), self._drafts(places, firsts), strict=True
            )
            if sample.matcher is not None
        ]
        self._fill(asked, allowed)
        for one in asked:
            if one.sample.spelled:
                for ahead in range(1 + len(one.draft)):
                    shown = one.sample.shown_after(one.draft[:ahead])
                    allowed[one.place + ahead] |= only(shown, allowed.shape[1])
        stops = self.compiler.stop_ids
        may_stop = np.any(allows(allowed, stops), axis=1)
        # After drafted tokens, the end of the text and dead ends are checked once the tokens are
        # known.
        unsure = may_stop & (places.ahead > 0)
        for row, first, sample in zip(rows.tolist(), firsts.tolist(), samples, strict=True):
            sample.look()
            matcher = sample.matcher
            if matcher is None or is_dead_end(matcher, may_stop=bool(may_stop[first])):
                allowed[first] = only(stops, allowed.shape[1])
                self.table.cut_off(row)
            if sample.failure:
                self._fail(row, sample)
        return TokenMasks(masked, allowed, unsure)

    def _fail(self, row: int, sample: _Sample) -> None:
        self.compiler.forget(sample.constraint)
        info = self.table.info[row]
        assert info is not None
        self._failures.append(
            Cancel(info.request_id, info.entry_id, "error", "invalid_constraint", sample.failure)
        )

    def _drafts(self, places: Places, firsts: IntArray) -> list[list[int]]:
        """Return the drafted tokens of each row; `firsts` are the rows' first places."""
        table = self.table
        counts = np.diff(firsts, append=len(places)) - 1
        drafts = []
        for row, count in zip(places.rows[firsts].tolist(), counts.tolist(), strict=True):
            known = table.num_known[row]
            drafts.append(table.tokens[row, known : known + count].tolist())
        return drafts

    def _fill(self, asked: list[_AskedMask], allowed: npt.NDArray[np.int32]) -> None:
        """Fill each matcher's mask at its place, and those after its drafted tokens. After a slow
        step, the next one measures each sample."""
        start_s = time.perf_counter()
        if self._times_each:
            for one in asked:
                # A single mask is computed in this thread.
                cpu_s = time.thread_time()
                self._fill_together([one], allowed)
                mask_s = (time.thread_time() - cpu_s) / (1 + len(one.draft))
                one.sample.excess_s += max(0.0, mask_s - _MASK_S)
        else:
            self._fill_together(asked, allowed)
        took_s = time.perf_counter() - start_s
        self._times_each = took_s > _SLOW_S
        masks = sum(1 + len(one.draft) for one in asked)
        for one in asked:
            one.sample.grown_s += max(0.0, took_s / masks - MASK_S)
            if one.sample.grown_s > _GROWN_S:
                self._charge(one.sample)

    def _fill_together(self, asked: list[_AskedMask], allowed: npt.NDArray[np.int32]) -> None:
        if self._parallel is None:
            self._parallel = LLExecutor()
        plain = [(one.matcher, one.place) for one in asked if not one.draft]
        if plain:
            llguidance.numpy.fill_next_token_bitmask_par(self._parallel, plain, allowed)
        if drafted := [one for one in asked if one.draft]:
            matchers = [one.sample.for_drafts(one.matcher) for one in drafted]
            llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(
                self._parallel,
                [(each, one.place, one.draft) for each, one in zip(matchers, drafted, strict=True)],
                allowed,
            )
            for one, matcher in zip(drafted, matchers, strict=True):
                one.sample.drafted(matcher)

    def _advance(self, rows: IntArray) -> list[_Sample]:
        """Return the samples of these rows, with matchers advanced to their present tokens."""
        table = self.table
        samples = []
        for row, seq_id, known, generated in zip(
            rows.tolist(),
            table.ids_of(rows).tolist(),
            table.num_known[rows].tolist(),
            table.num_generated[rows].tolist(),
            strict=True,
        ):
            sample = self.samples.get(row)
            if sample is None or sample.seq_id != seq_id:
                sample = self.samples[row] = self._begun(row, seq_id)
            new = table.tokens[row, known - generated + sample.consumed : known].tolist()
            if new:
                sample.consume(new)
            sample.consumed = generated
            samples.append(sample)
        return samples

    def _begun(self, row: int, seq_id: int) -> _Sample:
        constraint = self.table.constraint[row]
        assert constraint is not None
        try:
            return _Sample(seq_id, constraint, *self.compiler.begin(constraint))
        # Admission accepted it, perhaps with another version of the library.
        except (RequestError, ModelError) as error:
            return _Sample(seq_id, constraint, None, failure=error.message)
