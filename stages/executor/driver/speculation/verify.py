"""Which of the tokens sampled at a step's places count: those behind accepted drafts."""

from __future__ import annotations

import numpy as np

from ...runner.interface import IntArray
from ..sequences import BoolArray, Places, SequenceTable


def accept(
    table: SequenceTable, places: Places, tokens: IntArray, unsure: BoolArray | None
) -> BoolArray:
    """Which places count, `[places]`: the first of each row, and each behind one that counts where
    the token sampled there is the drafted one and the sequence goes on behind it.

    So what counts is what would have been sampled without drafts.

    Args:
        table: The sequences, with drafted tokens behind those that are known.
        places: Those of one row are one behind the other, in order.
        tokens: `[places]`, what was sampled.
        unsure: `[places]`, where it is not known what may come behind the drafted tokens; None
            where it is known everywhere.
    """
    counts: BoolArray = places.ahead == 0
    behind = np.flatnonzero(~counts)
    if not behind.size:
        return counts
    before = behind - 1
    rows, drafted = places.rows[behind], places.ahead[behind] - 1
    holds = tokens[before] == table.tokens[rows, table.num_known[rows] + drafted]
    holds &= ~table.is_last(places[before])
    if unsure is not None:
        holds &= ~unsure[behind]
    for place, row, held in zip(behind.tolist(), rows.tolist(), holds.tolist(), strict=True):
        goes_on = held and counts[place - 1]
        counts[place] = goes_on and int(tokens[place - 1]) not in table.stop_ids[row]
    return counts
