"""Which tokens may come next in samples whose text has to follow a grammar.

A matcher goes on behind the tokens that its sample has by then, however they came there. So samples
that were preempted, resumed after a failure, or that other weights go on with, need nothing more.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import llguidance.numpy
import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher
from torch import Tensor

from ...config import ModelError, RequestError
from ..grammar import GrammarCompiler, is_dead_end
from .batch import IntArray
from .sequences import SequenceTable


class TokenMasks(NamedTuple):
    """Which tokens some rows of a batch may not have next.

    Attributes:
        places: `[masked]`, those rows' indices in the batch.
        forbidden: `[masked, vocab]`.
    """

    places: IntArray
    forbidden: npt.NDArray[np.bool_]

    def apply(self, logits: Tensor) -> None:
        """Makes the logits, `[batch, vocab]`, of what may not come minus infinity."""
        forbidden = torch.from_numpy(self.forbidden).to(logits.device)
        if len(self.places) == len(logits):
            logits.masked_fill_(forbidden, -torch.inf)
            return
        for place, row in zip(self.places.tolist(), forbidden, strict=True):
            logits[place].masked_fill_(row, -torch.inf)


class _Sample:
    """One sample's place in its grammar; `matcher` is None when it can't be followed."""

    __slots__ = ("consumed", "matcher", "seq_id")

    def __init__(self, seq_id: int, matcher: LLMatcher | None) -> None:
        self.seq_id = seq_id
        self.matcher = matcher
        self.consumed = 0


class Constraints:
    """The matchers of a lane's samples, by the rows of its table."""

    def __init__(self, table: SequenceTable, compiler: GrammarCompiler) -> None:
        self._table = table
        self._compiler = compiler
        self._samples: dict[int, _Sample] = {}
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._parallel: LLExecutor | None = None

    def begin(self, rows: IntArray) -> Future[TokenMasks] | None:
        """Begins to work out what may come next in some rows; None when anything may in all.

        Another thread does it, while this one computes the logits. The rows' tokens must be known.

        Args:
            rows: Of the table, as the batch has them.
        """
        places = np.flatnonzero(self._table.constrained[rows])
        if not places.size:
            return None
        return self._thread.submit(self._masks, places, rows[places].tolist())

    def clear(self) -> None:
        """Forgets all samples."""
        self._samples.clear()

    def close(self) -> None:
        """Lets go of the thread."""
        self._thread.shutdown(wait=False)

    def _masks(self, places: IntArray, rows: list[int]) -> TokenMasks:
        vocab = self._compiler.vocab_size
        bits = llguidance.numpy.allocate_token_bitmask(len(rows), vocab)
        samples = [self._advance(row) for row in rows]
        if self._parallel is None:
            self._parallel = LLExecutor()
        asked = [(each.matcher, place) for place, each in enumerate(samples) if each.matcher]
        if asked:
            llguidance.numpy.fill_next_token_bitmask_par(self._parallel, asked, bits)
        np.invert(bits, out=bits)
        # Eight tokens are a byte, and each becomes one, of 0 or 1.
        ones = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
        forbidden = ones.view(np.bool_)
        stops = self._compiler.stop_ids
        for place, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            matcher = sample.matcher
            if matcher is None or is_dead_end(matcher, ~forbidden[place, stops]):
                forbidden[place] = True
                forbidden[place, stops] = False
                self._table.cut_off(row)
        return TokenMasks(places, forbidden)

    def _advance(self, row: int) -> _Sample:
        """The sample in a row, its matcher behind all tokens that it has."""
        table = self._table
        (seq_id,) = table.ids_of(np.array([row])).tolist()
        sample = self._samples.get(row)
        if sample is None or sample.seq_id != seq_id:
            constraint = table.constraint[row]
            assert constraint is not None
            try:
                matcher = self._compiler.matcher(constraint)
            # Admission has let it in, perhaps with another version of the library.
            except (RequestError, ModelError):
                matcher = None
            sample = self._samples[row] = _Sample(seq_id, matcher)
        known, generated = int(table.num_known[row]), int(table.num_generated[row])
        new = table.tokens[row, known - generated + sample.consumed : known]
        if sample.matcher is not None and new.size:
            sample.matcher.consume_tokens(new.tolist())
        sample.consumed = generated
        return sample
