"""Reports of routed experts: of prompts, and of each sampled token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ....bus.parts.columns import Columns
from ....bus.parts.experts import EXPERTS_DTYPE, PromptExperts
from ..runner.interface import IntArray
from .sequences import Places, SequenceTable


class RoutedPass(NamedTuple):
    """The tokens of a pass whose experts are reported, by their places in the batch.

    Attributes:
        sampled_from: `[samples]`, the token that gives each sample's logits.
        prompts: For each prompt: its sequence, position of the first token, place of that token,
            number of tokens, and whether the prompt ends with the step.
    """

    sampled_from: IntArray
    prompts: tuple[tuple[int, int, int, int, bool], ...]


def plan_routing(
    table: SequenceTable,
    rows: IntArray,
    starts: IntArray,
    num_tokens: IntArray,
    last_token: IntArray,
    sampled_from: IntArray,
) -> RoutedPass:
    """Return which tokens' experts a pass reports; its rows as of `_Pass`, `[rows]` each.

    A prompt's last token counts for the first sampled one: its experts are in that one's column.
    """
    prompts = []
    wanted = np.flatnonzero(table.routes[rows] & (table.routes_from[rows] >= 0))
    for index in wanted.tolist():
        row, start = int(rows[index]), int(starts[index])
        last = int(table.num_known[row] - table.num_generated[row]) - 1
        if start > last:
            continue
        end = start + int(num_tokens[index])
        first = max(start, int(table.routes_from[row]))
        place = int(last_token[index]) - int(num_tokens[index]) + 1 + first - start
        (seq_id,) = table.ids_of(rows[index : index + 1]).tolist()
        prompts.append((seq_id, first, place, max(min(end, last) - first, 0), end > last))
    return RoutedPass(sampled_from, tuple(prompts))


def report_prompts(routed: RoutedPass, experts: Tensor) -> tuple[PromptExperts, ...]:
    """Return the reports of a pass's prompts; `experts`: `[tokens, layers, top_k]`."""
    layers, top_k = experts.shape[1:]
    numbers = experts.numpy().astype(EXPERTS_DTYPE)
    return tuple(
        PromptExperts(seq_id, first, layers, top_k, numbers[place : place + count].tobytes(), ended)
        for seq_id, first, place, count, ended in routed.prompts
    )


def routed_columns(
    table: SequenceTable, places: Places, sampled_from: IntArray, experts: Tensor
) -> Columns:
    """Return the column of places, `[places]` each; None where experts are not reported."""
    numbers = experts.numpy()[sampled_from].astype(EXPERTS_DTYPE)
    wanted = table.routes[places.rows].tolist()
    own = (each.tobytes() if wants else None for each, wants in zip(numbers, wanted, strict=True))
    return {"routed_experts": tuple(own)}
