"""Sampled tokens: on the device, on their way to the host, and in the sequence table."""

from __future__ import annotations

from collections import deque
from itertools import compress
from operator import contains

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....bus.messages import RowFinish, TopLogprobs
from ....bus.parts.columns import NO_COLUMNS, SUPPORT_LOGPROBS, Columns, columns_of
from ..runner.interface import IntArray
from .logprobs import broken_output
from .sampling import Limits, sample_plain, sample_within
from .sequences import BoolArray, Places, SequenceTable

Pooled = tuple[tuple[int, Tensor, int], ...]
"""For each pooled prompt: sequence id, vector `[dimensions]` on the device, adapter version."""


class TokenFeed:
    """The last sampled token of each row of the SequenceTable, on the device.

    Until the host has read a token, the table holds a placeholder of its row. The next step takes
    placeholders as input ids, and `resolve` replaces them on the device.

    Attributes:
        padding_row: The row for the tokens of padding, after the others.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.padding_row = rows
        self._tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    def enlarge(self, rows: int) -> None:
        """Allocate a tensor of more rows, and move the padding row."""
        before, self._tokens = self._tokens, self._tokens.new_zeros(rows + 1)
        self._tokens[: self.padding_row] = before[: self.padding_row]
        self.padding_row = rows

    def put(self, rows: Tensor, tokens: Tensor) -> None:
        """Keep the tokens of rows, `[batch]` int64 each, on the device."""
        self._tokens.index_copy_(0, rows, tokens)

    def choose(
        self, rows: Tensor, logits: Tensor, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample the next token of each row as `sample_plain`, and keep it."""
        tokens, logprobs = sample_plain(logits, temperatures, uniforms)
        self.put(rows, tokens)
        return tokens, logprobs

    def choose_within(
        self, rows: Tensor, logits: Tensor, temperatures: Tensor, uniforms: Tensor, *limits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the next token of each row as `sample_within`, and keep it."""
        chosen = sample_within(logits, temperatures, uniforms, Limits(*limits))
        self.put(rows, chosen[0])
        return chosen

    def resolve(self, input_ids: Tensor) -> Tensor:
        """Return the ids with placeholders replaced by tokens."""
        sampled = self._tokens[(-1 - input_ids).clamp_(min=0)]
        return torch.where(input_ids < 0, sampled, input_ids)


def placeholders(rows: IntArray) -> IntArray:
    """Return the placeholders of rows in the SequenceTable."""
    return -1 - rows


class Readback:
    """Tokens and logprobs of one step, on their way to the host.

    On CUDA the copy is queued after the step, and `numbers` waits for it.

    Attributes:
        shares: Support logprobs, once `numbers` has waited; None if they are not reported.
    """

    shares: Tensor | None = None

    def __init__(self, tokens: Tensor, logprobs: Tensor, shares: Tensor | None = None) -> None:
        """Take `[rows]` int64, `[rows]` float32, and support logprobs if they are reported; the
        next step may overwrite them."""
        self._arrived: torch.cuda.Event | None = None
        if tokens.device.type == "cpu":
            self._host = tokens.clone(), logprobs.clone()
            if shares is not None:
                self.shares = shares.clone()
            return
        # One copy of all, as float64: token ids are exact up to 2**53.
        several = (tokens, logprobs) if shares is None else (tokens, logprobs, shares)
        packed = torch.stack([each.double() for each in several])
        staged = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        staged.copy_(packed, non_blocking=True)
        self._host = staged[0], staged[1]
        if shares is not None:
            self.shares = staged[2]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> None:
        """Block until the step is done. The only method for other threads."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def numbers(self) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Wait, and return tokens and logprobs, `[rows]` each."""
        self.wait()
        tokens, logprobs = self._host
        if self._arrived is None:
            return tokens.numpy(), logprobs.numpy()
        return tokens.numpy().astype(np.int64), logprobs.numpy().astype(np.float32)


class Sampled(msgspec.Struct, frozen=True):
    """The token fields of a StepResult, `[rows]` each.

    Attributes:
        columns: Values of optional features, `[rows]` each: None in a row without the feature.
    """

    seq_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reasons: tuple[RowFinish, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    adapter_versions: tuple[int, ...] = ()
    columns: Columns = {}


class SampledRows(msgspec.Struct, frozen=True, eq=False):
    """The rows of one step that sampled, `[rows]` each, repeated for each token.

    Attributes:
        rows: Rows of the SequenceTable.
        seq_ids: Their sequences; a row may be used again before the tokens are read.
        places: Positions of the tokens in the sequences.
        at_limit: Whether the token is the sequence's last.
        readback: Tokens and logprobs; and support logprobs, of `limited` rows.
        top_logprobs: As in StepResult.
        adapter_versions: As in StepResult.
        columns: As in `Sampled`.
    """

    rows: IntArray
    seq_ids: IntArray
    places: IntArray
    at_limit: BoolArray
    readback: Readback
    top_logprobs: tuple[TopLogprobs, ...]
    adapter_versions: tuple[int, ...] = ()
    columns: Columns = {}
    limited: BoolArray | None = None


class UnreadTokens:
    """Sampled tokens that the SequenceTable counts but doesn't hold yet, oldest first."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._steps: deque[SampledRows] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Drop them; their sequences must have left the table."""
        self._steps.clear()

    def add(
        self,
        sampled: Places,
        tokens: Tensor,
        logprobs: Tensor,
        shares: Tensor | None = None,
        *,
        fed: bool,
        top_logprobs: tuple[TopLogprobs, ...] = (),
        adapter_versions: tuple[int, ...] = (),
        columns: Columns = NO_COLUMNS,
    ) -> SampledRows:
        """Count tokens, `[places]`, that are on their way to the host.

        Args:
            sampled: Their places; all places of a row up to its last, in order.
            tokens: On the device.
            logprobs: On the device.
            shares: On the device, support logprobs, if rows with limits are to report them.
            fed: Whether a TokenFeed holds them too, so that placeholders may replace them.
            top_logprobs: As in StepResult.
            adapter_versions: As in StepResult.
            columns: As in `Sampled`.
        """
        table, rows = self._table, sampled.rows
        places = table.num_known[rows] + sampled.ahead
        at_limit = table.is_last(sampled)
        if fed:
            table.write_tokens(rows, places, placeholders(rows))
        # The last place of a row wins.
        table.num_known[rows] = places + 1
        table.num_generated[rows] += sampled.ahead + 1
        step = SampledRows(
            rows=rows,
            seq_ids=table.ids_of(rows),
            places=places,
            at_limit=at_limit,
            readback=Readback(tokens, logprobs, shares),
            top_logprobs=top_logprobs,
            adapter_versions=adapter_versions,
            columns=columns,
            limited=None if shares is None else table.limited[rows],
        )
        self._steps.append(step)
        return step

    def write(self) -> None:
        """Wait for all of them, and write them to the table."""
        for step in self._steps:
            self._write(step)

    def read(self, step: SampledRows) -> Sampled:
        """Remove the oldest step, and return its tokens and finish reasons.

        Sequences that stopped in an earlier step, or left since, are dropped; after a `clear`, all.

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
            raise broken_output()
        rows, seq_ids, at_limit, tops = step.rows, step.seq_ids, step.at_limit, step.top_logprobs
        versions, columns = step.adapter_versions, step.columns
        if step.limited is not None and (shares := step.readback.shares) is not None:
            values = zip(step.limited.tolist(), shares.tolist(), strict=True)
            found = tuple([value if has else None for has, value in values])
            columns = {**columns, SUPPORT_LOGPROBS: found}
        kept = table.holds(rows, seq_ids) & ~table.finished[rows]
        if not kept.all():
            tops, versions = tuple(compress(tops, kept)), tuple(compress(versions, kept))
            columns = columns_of(columns, kept)
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
            columns=columns,
        )

    def _reasons(
        self, rows: IntArray, token_ids: tuple[int, ...], at_limit: BoolArray
    ) -> tuple[RowFinish, ...]:
        """Return why each row ends with its token, "" if it doesn't; mark it in the table."""
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
