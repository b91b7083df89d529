"""Which tokens may come next in samples whose text has to follow a grammar.

A matcher goes on behind the tokens that its sample has by then, however they came there. So samples
that were preempted, resumed after a failure, or that other weights go on with, need nothing more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import llguidance.numpy
import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from ...config import ModelError, RequestError
from ..grammar import GrammarCompiler, allows, is_dead_end, only
from .batch import IntArray, Places
from .kernels.cpu import forbid
from .sequences import BoolArray, SequenceTable


class TokenMasks(NamedTuple):
    """Which tokens some rows of a batch may have next.

    Attributes:
        places: `[masked]`, those rows' indices in the batch.
        allowed: `[masked, ceil(vocab / 32)]`, a bit for each token, of each number the lowest
            first.
        unsure: `[masked]`, at which of them, behind drafted tokens, it is not known what may come.
    """

    places: IntArray
    allowed: npt.NDArray[np.int32]
    unsure: BoolArray

    def apply(self, logits: Tensor, *, kernels: bool = False) -> None:
        """Makes what may not come minus infinity, in place.

        Args:
            logits: `[batch, vocab]` float32, contiguous.
            kernels: Whether our own kernel does it, which does not touch what may come (CPU).
        """
        if kernels:
            forbid(logits, self.places, self.allowed)
            return
        # Eight tokens are a byte, and each becomes one, of 0 or 1.
        eights, vocab = (~self.allowed).view(np.uint8), logits.shape[1]
        ones = np.unpackbits(eights, axis=1, count=vocab, bitorder="little")
        forbidden = torch.from_numpy(ones.view(np.bool_)).to(logits.device)
        if len(self.places) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
            return
        for place, row in zip(self.places.tolist(), forbidden, strict=True):
            logits[place].masked_fill_(row, -torch.inf)


class PendingMasks:
    """Masks that another thread is working out."""

    def __init__(
        self, masks: Future[TokenMasks], now_ns: Callable[[], int], waits_ns: deque[int]
    ) -> None:
        """Args: the clock, and where it is noted how long they were waited for."""
        self._masks = masks
        self._now_ns = now_ns
        self._waits_ns = waits_ns

    def result(self, timeout_s: float | None = None) -> TokenMasks:
        """Waits for them.

        Raises:
            TimeoutError: For longer than that.
        """
        start_ns = self._now_ns()
        masks = self._masks.result(timeout_s)
        self._waits_ns.append(self._now_ns() - start_ns)
        return masks


class _Sample:
    """One sample's place in its grammar; `matcher` is None when it can't be followed."""

    __slots__ = ("consumed", "matcher", "seq_id")

    def __init__(self, seq_id: int, matcher: LLMatcher | None) -> None:
        self.seq_id = seq_id
        self.matcher = matcher
        self.consumed = 0


class Constraints:
    """The matchers of a lane's samples, by the rows of its table."""

    def __init__(
        self,
        table: SequenceTable,
        compiler: GrammarCompiler,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._table = table
        self._compiler = compiler
        self._now_ns = now_ns
        # Those that nobody asked for are not kept for ever.
        self._waits_ns: deque[int] = deque(maxlen=1024)
        self._samples: dict[int, _Sample] = {}
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._parallel: LLExecutor | None = None

    def begin(self, places: Places) -> PendingMasks | None:
        """Begins to work out what may come at some places; None when anything may at all of them.

        Another thread does it, while this one computes the logits. The tokens before them must be
        known.

        Args:
            places: As the batch has them, those of one row in order.
        """
        masked = np.flatnonzero(self._table.constrained[places.rows])
        if not masked.size:
            return None
        masks = self._thread.submit(self._masks, masked, places[masked])
        return PendingMasks(masks, self._now_ns, self._waits_ns)

    def check_draft(self, row: int, draft: tuple[int, ...]) -> int:
        """How many tokens of a draft, from its first on, a row's grammar allows.

        No masks may be under way.
        """
        if not self._table.constrained[row]:
            return len(draft)
        (matcher,) = self._advance(np.array([row]))
        return matcher.validate_tokens(list(draft)) if matcher is not None else 0

    def forced(self, row: int) -> tuple[int, ...]:
        """The tokens that a row's grammar leaves no choice about, as far as they are known.

        No masks may be under way.
        """
        if not self._table.constrained[row]:
            return ()
        (matcher,) = self._advance(np.array([row]))
        return tuple(matcher.compute_ff_tokens()) if matcher is not None else ()

    def take_waits_ns(self) -> list[int]:
        """How long masks were waited for, each time since the last call; any thread may ask."""
        return [self._waits_ns.popleft() for _ in range(len(self._waits_ns))]

    def clear(self) -> None:
        """Forgets all samples."""
        self._samples.clear()

    def close(self) -> None:
        """Lets go of the thread."""
        self._thread.shutdown(wait=False)

    def _masks(self, masked: IntArray, places: Places) -> TokenMasks:
        allowed = llguidance.numpy.allocate_token_bitmask(len(places), self._compiler.vocab_size)
        firsts = np.flatnonzero(places.ahead == 0)
        rows = places.rows[firsts]
        matchers = self._advance(rows)
        asked = [
            (matcher, first, draft)
            for matcher, first, draft in zip(
                matchers, firsts.tolist(), self._drafts(places, firsts), strict=True
            )
            if matcher is not None
        ]
        self._fill(asked, allowed)
        stops = self._compiler.stop_ids
        may_stop = np.any(allows(allowed, stops), axis=1)
        # Whether a text may end behind drafted tokens, or has met a dead end, is asked once they
        # are known.
        unsure = may_stop & (places.ahead > 0)
        for row, first, matcher in zip(rows.tolist(), firsts.tolist(), matchers, strict=True):
            if matcher is None or is_dead_end(matcher, may_stop=bool(may_stop[first])):
                allowed[first] = only(stops, allowed.shape[1])
                self._table.cut_off(row)
        return TokenMasks(masked, allowed, unsure)

    def _drafts(self, places: Places, firsts: IntArray) -> list[list[int]]:
        """The drafted tokens of each row, of which `firsts` are the first places."""
        table = self._table
        counts = np.diff(firsts, append=len(places)) - 1
        drafts = []
        for row, count in zip(places.rows[firsts].tolist(), counts.tolist(), strict=True):
            known = table.num_known[row]
            drafts.append(table.tokens[row, known : known + count].tolist())
        return drafts

    def _fill(
        self, asked: list[tuple[LLMatcher, int, list[int]]], allowed: npt.NDArray[np.int32]
    ) -> None:
        """What each matcher allows, in the mask of that index, and behind each drafted token in
        those that follow."""
        if self._parallel is None:
            self._parallel = LLExecutor()
        plain = [(matcher, place) for matcher, place, draft in asked if not draft]
        drafted = [one for one in asked if one[2]]
        if plain:
            llguidance.numpy.fill_next_token_bitmask_par(self._parallel, plain, allowed)
        if drafted:
            llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(
                self._parallel, drafted, allowed
            )

    def _advance(self, rows: IntArray) -> list[LLMatcher | None]:
        """The matchers of samples in these rows, each behind all tokens that its sample has."""
        table = self._table
        matchers = []
        for row, seq_id, known, generated in zip(
            rows.tolist(),
            table.ids_of(rows).tolist(),
            table.num_known[rows].tolist(),
            table.num_generated[rows].tolist(),
            strict=True,
        ):
            sample = self._samples.get(row)
            if sample is None or sample.seq_id != seq_id:
                sample = self._samples[row] = _Sample(seq_id, self._matcher(row))
            new = table.tokens[row, known - generated + sample.consumed : known].tolist()
            if new and sample.matcher is not None:
                sample.matcher.consume_tokens(new)
            sample.consumed = generated
            matchers.append(sample.matcher)
        return matchers

    def _matcher(self, row: int) -> LLMatcher | None:
        constraint = self._table.constraint[row]
        assert constraint is not None
        try:
            return self._compiler.matcher(constraint)
        # Admission has let it in, perhaps with another version of the library.
        except (RequestError, ModelError):
            return None
