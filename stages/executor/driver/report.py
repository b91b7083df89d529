"""Logprobs as messages: the likeliest tokens beside sampled ones, and those of prompts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....bus.messages import PromptLogprobs, TopLogprobs
from ..runner.interface import IntArray, flatten_rows
from .logprobs import gather_logprobs, top_token_ids
from .sequences import SequenceTable

_ROWS = 64
"""Rows searched together, so that a long prompt needs little more memory than its logits."""


def report_top_logprobs(
    logits: Tensor, temperatures: Tensor, counts: IntArray, *, kernels: bool = False
) -> tuple[TopLogprobs, ...]:
    """For each row its likeliest tokens with their logprobs (`gather_logprobs`).

    Args:
        logits: `[batch, vocab]` float32.
        temperatures: `[batch]`.
        counts: `[batch]`, how many of them each row wants.
        kernels: As in `scale_logits`.

    Returns:
        `[batch]`, empty for a row that wants none; empty when no row wants any.
    """
    if not counts.any():
        return ()
    tops: list[TopLogprobs] = [()] * len(counts)
    wanting = np.flatnonzero(counts)
    for first in range(0, len(wanting), _ROWS):
        rows = wanting[first : first + _ROWS]
        places = torch.from_numpy(rows).to(logits.device)
        part = logits[places]
        token_ids = top_token_ids(part, int(counts[rows].max()))
        logprobs = gather_logprobs(part, temperatures[places], token_ids, kernels=kernels)
        for row, ids, values in zip(
            rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True
        ):
            tops[row] = tuple(zip(ids[: counts[row]], values, strict=False))
    return tuple(tops)


def score_prompts(
    logits: Tensor,
    table: SequenceTable,
    rows: IntArray,
    num_scored: IntArray,
    *,
    raw: bool,
    kernels: bool = False,
) -> tuple[PromptLogprobs, ...]:
    """The logprobs of prompt tokens, given those before them.

    Args:
        logits: `[sum(num_scored), vocab]` float32 of the model: row by row, those that predict
            the token behind each of the first `num_scored` tokens that this step computes.
        table: The sequences, as they were before this step.
        rows: `[batch]`.
        num_scored: `[batch]`, `table.num_to_score`.
        raw: Leaves the temperature out. Penalties and bias are left out in any case: they belong
            to sampling, and no token of a prompt was sampled.
        kernels: As in `scale_logits`.
    """
    if not num_scored.any():
        return ()
    scored = num_scored > 0
    rows, counts = rows[scored], num_scored[scored]
    starts = table.num_computed[rows] + 1
    place_row, positions = flatten_rows(starts, counts)
    row_of_place = rows[place_row]
    token_ids = torch.from_numpy(table.tokens[row_of_place, positions]).to(logits.device)
    temperatures = torch.from_numpy(table.temperature[row_of_place]).to(logits.device)
    if raw:
        temperatures = torch.ones_like(temperatures)
    logprobs = gather_logprobs(logits, temperatures, token_ids[:, None], kernels=kernels)
    counts_of_places = table.prompt_logprobs[row_of_place]
    tops = report_top_logprobs(logits, temperatures, counts_of_places, kernels=kernels)
    values = logprobs[:, 0].tolist()
    reports = []
    ends = np.cumsum(counts)
    for seq_id, start, first, end in zip(
        table.ids_of(rows).tolist(),
        starts.tolist(),
        (ends - counts).tolist(),
        ends.tolist(),
        strict=True,
    ):
        top = tops[first:end]
        reports.append(
            PromptLogprobs(seq_id, start, tuple(values[first:end]), top if any(top) else ())
        )
    return tuple(reports)
