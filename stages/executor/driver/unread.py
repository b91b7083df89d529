"""Tokens of steps that are launched, which nobody has read yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import compress
from operator import contains

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from ....bus.messages import RowFinish, TopLogprobs
from ..runner.interface import IntArray
from .feed import Readback, placeholders
from .logprobs import broken_logits
from .sequences import BoolArray, Places, SequenceTable


class Sampled(msgspec.Struct, frozen=True):
    """The part of a StepResult that is about tokens, `[rows]` each."""

    seq_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reasons: tuple[RowFinish, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    adapter_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The rows of one step that sampled, `[rows]` each; one comes once for each token that it got.

    Attributes:
        rows: Of the SequenceTable.
        seq_ids: The sequences in them; a row may get another one before the tokens are read.
        places: Where in the sequences the tokens belong.
        at_limit: Whether the token is the last that the sequence may have.
        readback: The tokens and their logprobs.
        top_logprobs: As in StepResult.
        adapter_versions: As in StepResult.
    """

    rows: IntArray
    seq_ids: IntArray
    places: IntArray
    at_limit: BoolArray
    readback: Readback
    top_logprobs: tuple[TopLogprobs, ...]
    adapter_versions: tuple[int, ...] = ()


class UnreadTokens:
    """The sampled tokens that the SequenceTable counts and does not know, oldest first."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._steps: deque[SampledRows] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Forgets them; their sequences must be gone from the table."""
        self._steps.clear()

    def add(
        self,
        sampled: Places,
        tokens: Tensor,
        logprobs: Tensor,
        top_logprobs: tuple[TopLogprobs, ...],
        *,
        fed: bool,
        adapter_versions: tuple[int, ...] = (),
    ) -> SampledRows:
        """Makes room for tokens, `[places]`, that are on their way.

        Args:
            sampled: Where they were sampled; all places of a row up to its last, in order.
            tokens: On the device.
            logprobs: On the device.
            top_logprobs: As in StepResult.
            fed: Whether a TokenFeed has them too, so that placeholders may stand for them.
            adapter_versions: As in StepResult.
        """
        table, rows = self._table, sampled.rows
        places = table.num_known[rows] + sampled.ahead
        at_limit = table.is_last(sampled)
        if fed:
            table.write_tokens(rows, places, placeholders(rows))
        # Where a row comes several times, its last place decides.
        table.num_known[rows] = places + 1
        table.num_generated[rows] += sampled.ahead + 1
        step = SampledRows(
            rows=rows,
            seq_ids=table.ids_of(rows),
            places=places,
            at_limit=at_limit,
            readback=Readback(tokens, logprobs),
            top_logprobs=top_logprobs,
            adapter_versions=adapter_versions,
        )
        self._steps.append(step)
        return step

    def write(self) -> None:
        """Waits for all of them and puts them into the table, for who must know them at once."""
        for step in self._steps:
            self._write(step)

    def read(self, step: SampledRows) -> Sampled:
        """Takes out the oldest step, and says which of its sequences finish with it.

        Sequences that stopped in an earlier step, or have left since, are left out. So are all of
        them when the step was forgotten.

        Raises:
            ValueError: The step is not the oldest one.
            ModelError: The model's output is broken.
        """
        if step not in self._steps:
            return Sampled()
        if self._steps.popleft() is not step:
            raise ValueError("steps must be finished in the order in which they were launched")
        table = self._table
        tokens, logprobs = self._write(step)
        if not np.isfinite(logprobs).all():
            raise broken_logits()
        rows, seq_ids, at_limit, tops = step.rows, step.seq_ids, step.at_limit, step.top_logprobs
        versions = step.adapter_versions
        kept = table.holds(rows, seq_ids) & ~table.finished[rows]
        if not kept.all():
            tops, versions = tuple(compress(tops, kept)), tuple(compress(versions, kept))
            rows, seq_ids, at_limit = rows[kept], seq_ids[kept], at_limit[kept]
            tokens, logprobs = tokens[kept], logprobs[kept]
        token_ids = tuple(tokens.tolist())
        reasons = self._reasons(rows, token_ids, at_limit)
        return Sampled(
            seq_ids=tuple(seq_ids.tolist()),
            token_ids=token_ids,
            logprobs=tuple(logprobs.tolist()),
            finish_reasons=reasons,
            top_logprobs=tops,
            adapter_versions=versions,
        )

    def _reasons(
        self, rows: IntArray, token_ids: tuple[int, ...], at_limit: BoolArray
    ) -> tuple[RowFinish, ...]:
        """Why each row ends with its token, which the table is told; mostly it does not."""
        table = self._table
        stops = list(map(contains, map(table.stop_ids.__getitem__, rows.tolist()), token_ids))
        reasons: list[RowFinish] = [""] * len(token_ids)
        if at_limit.any() or True in stops:
            stopped = np.array(stops) & ~table.incomplete[rows]
            table.finished[rows] = stopped | at_limit
            for place in np.flatnonzero(stopped | at_limit).tolist():
                reasons[place] = "stop" if stopped[place] else "length"
        return tuple(reasons)

    def _write(self, step: SampledRows) -> tuple[IntArray, npt.NDArray[np.float32]]:
        tokens, logprobs = step.readback.numbers()
        here = self._table.holds(step.rows, step.seq_ids)
        self._table.write_tokens(step.rows[here], step.places[here], tokens[here])
        return tokens, logprobs
