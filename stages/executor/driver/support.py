"""Sampling masks: the support of each position, the tokens that can be sampled there, as ids."""

from __future__ import annotations

import numpy as np
import torch

from ....bus.parts.columns import MASK_DTYPE
from .sampling import Choice
from .sequences import BoolArray


def sampling_masks(
    choice: Choice, wanted: BoolArray, greedy: BoolArray, most: int
) -> tuple[bytes | None, ...]:
    """Return the mask of each row, as in CompletionSample; None where it is not wanted.

    Args:
        choice: With its weights.
        wanted: `[batch]`, which rows need a mask.
        greedy: `[batch]`, which rows have temperature 0: their support is the token.
        most: Most ids of a mask. A larger one is empty.
    """
    assert choice.weights is not None, "the weights are kept for masks"
    device = choice.weights.device
    rows = torch.from_numpy(np.flatnonzero(wanted)).to(device)
    kept = choice.weights[rows] > 0
    alone = torch.from_numpy(np.flatnonzero(greedy[wanted])).to(device)
    if len(alone):
        kept[alone] = False
        kept[alone, choice.tokens[rows[alone]]] = True
    kept &= kept.sum(dim=-1, keepdim=True) <= most
    counts = kept.sum(dim=-1).cpu().numpy()
    ids = kept.nonzero()[:, 1].cpu().numpy().astype(MASK_DTYPE)
    parts = np.split(ids, np.cumsum(counts)[:-1])
    found = iter([part.tobytes() for part in parts])
    return tuple([next(found) if each else None for each in wanted.tolist()])
