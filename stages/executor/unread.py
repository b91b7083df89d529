"""Steps that are launched, and whose tokens nobody has read yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...bus.messages import PromptLogprobs, RowFinish, StartedSequence, StepPlan, TopLogprobs
from .batch import IntArray
from .feed import Readback, placeholders
from .logprobs import broken_logits
from .sequences import BoolArray, SequenceTable


class Sampled(msgspec.Struct, frozen=True):
    """The part of a StepResult that is about tokens, `[rows]` each."""

    seq_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reasons: tuple[RowFinish, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SampledRows:
    """The rows of one step that sampled, `[rows]` each.

    Attributes:
        rows: Of the SequenceTable.
        seq_ids: The sequences in them; a row may get another one before the tokens are read.
        places: Where in the sequences the tokens belong.
        at_limit: Whether the token is the last that the sequence may have.
        readback: The tokens and their logprobs.
        top_logprobs: As in StepResult.
    """

    rows: IntArray
    seq_ids: IntArray
    places: IntArray
    at_limit: BoolArray
    readback: Readback
    top_logprobs: tuple[TopLogprobs, ...]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is on its way; `ExecutorCore.finish` makes its result."""

    plan: StepPlan
    started: tuple[StartedSequence, ...]
    weight_version: int
    start_ns: int
    sampled: SampledRows | None
    prompts: tuple[PromptLogprobs, ...]

    def wait(self) -> None:
        """Blocks until the device is done. The one method that another thread may call."""
        if self.sampled is not None:
            self.sampled.readback.wait()


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
        rows: IntArray,
        tokens: Tensor,
        logprobs: Tensor,
        top_logprobs: tuple[TopLogprobs, ...],
        *,
        fed: bool,
    ) -> SampledRows:
        """Makes room for tokens, `[rows]`, that are on their way.

        Args:
            rows: Of the table.
            tokens: On the device.
            logprobs: On the device.
            top_logprobs: As in StepResult.
            fed: Whether a TokenFeed has them too, so that placeholders may stand for them.
        """
        table = self._table
        places = table.num_known[rows]
        if fed:
            table.write_tokens(rows, places, placeholders(rows))
        table.num_known[rows] += 1
        table.num_generated[rows] += 1
        step = SampledRows(
            rows=rows,
            seq_ids=table.ids_of(rows),
            places=places,
            at_limit=table.at_limit(rows),
            readback=Readback(tokens, logprobs),
            top_logprobs=top_logprobs,
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
        kept = table.holds(rows, seq_ids) & ~table.finished[rows]
        if not kept.all():
            tops = tuple(tops[index] for index in np.flatnonzero(kept)) if tops else ()
            rows, seq_ids, at_limit = rows[kept], seq_ids[kept], at_limit[kept]
            tokens, logprobs = tokens[kept], logprobs[kept]
        token_ids = tuple(tokens.tolist())
        reasons: list[RowFinish] = []
        for row, token, full in zip(rows.tolist(), token_ids, at_limit.tolist(), strict=True):
            reason: RowFinish = "length" if full else ""
            if token in table.stop_ids[row] and not table.incomplete[row]:
                reason = "stop"
            reasons.append(reason)
        table.finished[rows] = [bool(reason) for reason in reasons]
        return Sampled(
            seq_ids=tuple(seq_ids.tolist()),
            token_ids=token_ids,
            logprobs=tuple(logprobs.tolist()),
            finish_reasons=tuple(reasons),
            top_logprobs=tops,
        )

    def _write(self, step: SampledRows) -> tuple[IntArray, npt.NDArray[np.float32]]:
        tokens, logprobs = step.readback.numbers()
        here = self._table.holds(step.rows, step.seq_ids)
        self._table.write_tokens(step.rows[here], step.places[here], tokens[here])
        return tokens, logprobs
