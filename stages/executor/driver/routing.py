"""Reports of routed experts: of prompts, and of each sampled token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ....bus.parts.columns import Columns
from ....bus.parts.experts import EXPERTS_DTYPE, PromptExperts
from ..runner.interface import IntArray, StepOutput
from .sequences import Places, SequenceTable

if TYPE_CHECKING:
    from ..runner.interface import Routers


class RoutedPass(NamedTuple):
    """The routed experts of a pass, and the tokens whose experts are reported.

    Attributes:
        experts: `[tokens, layers, top_k]`, in batch order.
        sampled_from: `[samples]`, the token that gives each sample's logits.
        parts: For each prompt: its sequence, position of the first token, place of that token in
            the batch, number of tokens, and whether the prompt ends with the step.
    """

    experts: npt.NDArray[np.uint16]
    sampled_from: IntArray
    parts: tuple[tuple[int, int, int, int, bool], ...]

    def prompts(self) -> tuple[PromptExperts, ...]:
        """Return the reports of prompts."""
        layers, top_k = self.experts.shape[1:]
        return tuple(
            PromptExperts(
                seq_id,
                first,
                layers,
                top_k,
                self.experts[place : place + count].tobytes(),
                ended,
            )
            for seq_id, first, place, count, ended in self.parts
        )

    def columns(self, table: SequenceTable, places: Places, logits_of: IntArray | None) -> Columns:
        """Return the column of places, `[places]`; None where experts are not reported.

        `logits_of`: the logits of each place; None if they are in its order.
        """
        tokens = self.sampled_from if logits_of is None else self.sampled_from[logits_of]
        wanted = table.routes[places.rows].tolist()
        own = zip(self.experts[tokens], wanted, strict=True)
        return {"routed_experts": tuple(each.tobytes() if wants else None for each, wants in own)}


def start_routed(
    routers: Routers | None,
    start: Callable[[], StepOutput],
    table: SequenceTable,
    rows: IntArray,
    starts: IntArray,
    num_tokens: IntArray,
    last_token: IntArray,
    sampled_from: IntArray,
) -> StepOutput:
    """Start a pass that reports the experts of its tokens, all of which are read.

    A prompt's last token counts for the first sampled one: its experts are in that one's column.

    Args:
        routers: The model's.
        start: Starts the pass.
        table: The sequences.
        rows, starts, num_tokens: The rows of the pass, as of `_Pass`.
        last_token: `[rows]`, the index of each row's last token in the batch.
        sampled_from: As in RoutedPass.

    Raises:
        ValueError: The model reports no experts.
    """
    if routers is None:
        raise ValueError("the plan has a sequence with routed experts, and the model reports none")
    found: list[Tensor] = []
    with routers.watched(found):
        output = start()
    parts = []
    wanted = np.flatnonzero(table.routes[rows] & (table.routes_from[rows] >= 0))
    for index in wanted.tolist():
        row, at = int(rows[index]), int(starts[index])
        last = int(table.num_known[row] - table.num_generated[row]) - 1
        if at > last:
            continue
        end = at + int(num_tokens[index])
        first = max(at, int(table.routes_from[row]))
        place = int(last_token[index]) - int(num_tokens[index]) + 1 + first - at
        (seq_id,) = table.ids_of(rows[index : index + 1]).tolist()
        parts.append((seq_id, first, place, max(min(end, last) - first, 0), end > last))
    experts = found[0].numpy().astype(EXPERTS_DTYPE)
    output.experts = RoutedPass(experts, sampled_from, tuple(parts))
    return output
