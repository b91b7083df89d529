"""Logprobs at positions of prompts: of the prompt's tokens, and of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ....bus.messages import TopLogprobs
from ....bus.parts.scoring import PromptLogprobs, PromptScores, TargetLogprobs
from ..runner.interface import IntArray
from .logprobs import gather_logprobs, report_top_logprobs, top_token_ids
from .sequences import SequenceTable
from .targets import ScoredPlaces, Targets

if TYPE_CHECKING:
    from .support import Support


def take_scored(table: SequenceTable, rows: IntArray, num_tokens: IntArray) -> ScoredPlaces | None:
    """Return the positions of prompts whose logits a step of so many tokens reads, for logprobs of
    the tokens after them; None without any. Each position is returned once."""
    which, positions = [], []
    for index in np.flatnonzero(table.scores[rows]).tolist():
        row = rows[index]
        last = int(table.num_known[row] - table.num_generated[row]) - 1
        start = int(table.num_computed[row])
        end = start + int(num_tokens[index])
        table.scores[row] = end <= last
        if table.prompt_logprobs[row] >= 0:
            found = np.arange(max(start, int(table.score_start[row])), min(end, last))
        else:
            targets: Targets = table.targets[row]
            found = targets.positions[targets.within(start, min(end, last))]
        if len(found):
            which.append(index)
            positions.append(found)
    if not which:
        return None
    counts = np.array([*map(len, positions)], np.int64)
    where = np.array(which, np.int64)
    return ScoredPlaces(where, rows[where], counts, np.concatenate(positions))


def score_prompts(
    table: SequenceTable, logits: Tensor, places: ScoredPlaces, *, raw: bool, kernels: bool
) -> PromptScores:
    """Return the logprobs at positions of prompts, given the tokens before each.

    Penalties and bias never apply to a prompt, and raw logprobs ignore the temperature.

    Args:
        table: The sequences.
        logits: `[places, vocab]` float32 of the model.
        places: From `take_scored`.
        raw: Whether logprobs are of the model's own output.
        kernels: As in `scale_logits`.
    """
    row_of_place = np.repeat(places.rows, places.counts)
    temperatures = torch.from_numpy(table.temperature[row_of_place]).to(logits.device)
    if raw:
        temperatures = torch.ones_like(temperatures)
    prompts: list[PromptLogprobs] = []
    targets: list[TargetLogprobs] = []
    seq_ids, end = table.ids_of(places.rows).tolist(), 0
    for seq_id, row, count in zip(
        seq_ids, places.rows.tolist(), places.counts.tolist(), strict=True
    ):
        start, end = end, end + count
        own = slice(start, end)
        positions = places.positions[own]
        about = logits[own], temperatures[own]
        support = None
        if masks := table.supports[row]:
            from .support import given_support

            # A position's logits are of the token after it.
            num_prompt = int(table.num_known[row] - table.num_generated[row])
            after = positions + 1 + len(masks) - num_prompt
            support = given_support(masks, after, *about, kernels=kernels)
        if (number := int(table.prompt_logprobs[row])) >= 0:
            token_ids = torch.from_numpy(table.tokens[row, positions + 1]).to(logits.device)
            found = _score(number, token_ids, *about, support, kernels=kernels)
            prompts.append(PromptLogprobs(seq_id, int(positions[0]) + 1, *found))
        if (wanted := table.targets[row]) is not None:
            scored = _score_targets(seq_id, wanted, positions, *about, support, kernels=kernels)
            targets += [] if scored is None else [scored]
    return PromptScores(tuple(prompts), tuple(targets))


def _score(
    number: int,
    token_ids: Tensor,
    logits: Tensor,
    temperatures: Tensor,
    support: Support | None,
    *,
    kernels: bool,
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...], tuple[int, ...]]:
    """Return the logprobs of tokens, so many of the likeliest, and the tokens' ranks."""
    column = token_ids[:, None]
    logprobs = gather_logprobs(logits, temperatures, column, kernels=kernels)
    if support is not None:
        logprobs = support.within(logprobs, column)
        logits_within = logits.masked_fill(~support.allowed, float("-inf"))
        ids = top_token_ids(logits_within, max(number, 1))
        values = gather_logprobs(logits, temperatures, ids, kernels=kernels)
        tops = support.tops(values, ids, number)
        logits = logits_within
    else:
        counts = np.full(len(logits), number)
        tops = report_top_logprobs(logits, temperatures, counts, kernels=kernels)
    ranks = _ranks(logits, token_ids, tops) if tops else ()
    return tuple(logprobs[:, 0].tolist()), tops, ranks


def _ranks(logits: Tensor, token_ids: Tensor, tops: Sequence[TopLogprobs]) -> tuple[int, ...]:
    """Return the rank of a token of each row, `[rows]`, in the order of the top tokens: equal
    logits in the order of ids."""
    ranks = [
        next((rank for rank, (other, _) in enumerate(top, 1) if other == token_id), 0)
        for token_id, top in zip(token_ids.tolist(), tops, strict=True)
    ]
    for row in [row for row, rank in enumerate(ranks) if not rank]:
        others, token_id = logits[row], token_ids[row]
        own = others[token_id]
        ranks[row] = 1 + int((others > own).sum() + (others[:token_id] == own).sum())
    return tuple(ranks)


def _score_targets(
    seq_id: int,
    targets: Targets,
    positions: IntArray,
    logits: Tensor,
    temperatures: Tensor,
    support: Support | None,
    *,
    kernels: bool,
) -> TargetLogprobs | None:
    """Return the logprobs of targets at positions that follow each other in the prompt, or in
    `targets.positions`; None if there are no targets."""
    rows = targets.within(int(positions[0]), int(positions[-1]) + 1)
    offsets = targets.offsets[rows.start : rows.stop + 1]
    if offsets[0] == offsets[-1]:
        return None
    counts = np.diff(offsets)
    # Rows are filled up with token 0, whose logprob is dropped.
    columns = np.arange(counts.max())
    real = columns < counts[:, None]
    token_ids = np.zeros(real.shape, np.int64)
    token_ids[real] = targets.token_ids[offsets[0] : offsets[-1]]
    places = np.searchsorted(positions, targets.positions[rows])
    at = torch.from_numpy(places).to(logits.device)
    ids = torch.from_numpy(token_ids).to(logits.device)
    logprobs = gather_logprobs(logits[at], temperatures[at], ids, kernels=kernels)
    if support is not None:
        logprobs = support.of(at).within(logprobs, ids)
    found = logprobs.cpu().numpy()[real].astype("<f4")
    return TargetLogprobs(seq_id, int(offsets[0]), found.tobytes())
