"""From what the model says to what is sampled from: applies each sequence's own penalties.

The order is docs/sampling.md's: repetition, presence, frequency, bias, stop tokens kept out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..runner.interface import IntArray
from .penalties import (
    apply_frequency_penalty,
    apply_logit_bias,
    apply_presence_penalty,
    apply_repetition_penalty,
    mask_tokens,
)
from .sequences import BoolArray, Places, SequenceTable


def adjust_logits(logits: Tensor, table: SequenceTable, places: Places) -> Tensor:
    """The logits after everything that comes before the temperature.

    Rows that use none of it are returned as they are, bit for bit, and cost nothing when there
    are no others.

    Args:
        logits: `[batch, vocab]` float32; not changed.
        table: The sequences, which know all tokens before each place.
        places: `[batch]`, where each row of logits is.
    """

    def adjust(part: Tensor, chosen: Places) -> Tensor:
        part = _repetition(part, table, chosen)
        part = _presence_and_frequency(part, table, chosen)
        part = _bias(part, table, chosen.rows)
        return _on_some(part, chosen, table.must_go_on(chosen), mask)

    def mask(part: Tensor, chosen: Places) -> Tensor:
        stop_ids, _ = _pad([sorted(table.stop_ids[row]) for row in chosen.rows])
        return mask_tokens(part, _upload(stop_ids, part))

    return _on_some(logits, places, table.adjusted[places.rows], adjust)


def _on_some(
    logits: Tensor,
    places: Places,
    involved: BoolArray,
    change: Callable[[Tensor, Places], Tensor],
) -> Tensor:
    """Changes the rows of logits that are involved."""
    if not involved.any():
        return logits
    if involved.all():
        return change(logits, places)
    chosen = _upload(np.flatnonzero(involved), logits)
    return logits.index_copy(0, chosen, change(logits[chosen], places[involved]))


def _repetition(logits: Tensor, table: SequenceTable, places: Places) -> Tensor:
    rows = places.rows
    penalties = table.repetition_penalty[rows]
    used = penalties != 1
    if not used.any():
        return logits
    # One token is enough of a row with a penalty of 1, which changes nothing.
    stops = np.where(used, table.num_known[rows] + places.ahead, 1)
    token_ids, _ = _tokens_between(table, rows, np.zeros_like(stops), stops)
    return apply_repetition_penalty(logits, _upload(token_ids, logits), _upload(penalties, logits))


def _presence_and_frequency(logits: Tensor, table: SequenceTable, places: Places) -> Tensor:
    rows = places.rows
    presence, frequency = table.presence_penalty[rows], table.frequency_penalty[rows]
    starts = table.num_known[rows] - table.num_generated[rows]
    ends = table.num_known[rows] + places.ahead
    used = (presence != 0) | (frequency != 0)
    if not (used & (starts < ends)).any():
        return logits
    token_ids, valid = _tokens_between(table, rows, starts, np.where(used, ends, starts))
    on_device = _upload(token_ids, logits), _upload(valid, logits)
    if presence.any():
        logits = apply_presence_penalty(logits, *on_device, _upload(presence, logits))
    if frequency.any():
        logits = apply_frequency_penalty(logits, *on_device, _upload(frequency, logits))
    return logits


def _bias(logits: Tensor, table: SequenceTable, rows: IntArray) -> Tensor:
    biases = [table.logit_bias[row] for row in rows]
    if not any(biases):
        return logits
    token_ids, valid = _pad([list(bias) for bias in biases])
    values = np.zeros(token_ids.shape, np.float32)
    values[valid] = [value for bias in biases for value in bias.values()]
    return apply_logit_bias(logits, _upload(token_ids, logits), _upload(values, logits))


def _tokens_between(
    table: SequenceTable, rows: IntArray, starts: IntArray, stops: IntArray
) -> tuple[IntArray, BoolArray]:
    """Tokens of each row from `starts` up to `stops`, `[batch, longest]`, and which are real.

    Padding repeats the row's first; in a row without any it is some token or other.
    """
    columns = starts[:, None] + np.arange((stops - starts).max())
    valid = columns < stops[:, None]
    last = table.tokens.shape[1] - 1
    columns = np.minimum(np.where(valid, columns, starts[:, None]), last)
    # What stands behind a row's tokens may be a placeholder of the sequence before it.
    return np.maximum(table.tokens[rows[:, None], columns], 0), valid


def _pad(lists: Sequence[Sequence[int]]) -> tuple[IntArray, BoolArray]:
    """Token ids as `[batch, longest]`, and which are real; padding is the row's first, or 0."""
    padded = np.zeros((len(lists), max(map(len, lists))), np.int64)
    valid = np.zeros(padded.shape, np.bool_)
    for row, values in enumerate(lists):
        if values:
            padded[row] = values[0]
            padded[row, : len(values)] = values
            valid[row, : len(values)] = True
    return padded, valid


def _upload(array: npt.NDArray[Any], beside: Tensor) -> Tensor:
    return torch.from_numpy(array).to(beside.device)
