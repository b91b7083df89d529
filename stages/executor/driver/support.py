"""Sampling masks: the support of each position, the tokens that can be sampled there, as ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....bus.messages import TopLogprobs
from ....bus.parts.columns import MASK_DTYPE
from ..runner.interface import IntArray
from .logprobs import LOWEST, ROWS, scale_logits
from .sampling import Choice, mass_of
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


class Support(NamedTuple):
    """The given supports of some positions of a prompt.

    Attributes:
        allowed: `[positions, vocab]`, which tokens belong to it.
        log_shares: `[positions]` float32, the log of its probability mass.
    """

    allowed: Tensor
    log_shares: Tensor

    def within(self, logprobs: Tensor, token_ids: Tensor) -> Tensor:
        """Return logprobs within the supports of tokens, `[positions, k]`, from those of the full
        distribution. Other tokens are impossible."""
        outside = ~self.allowed.gather(1, token_ids) | self.log_shares.isinf()[:, None]
        return (logprobs - self.log_shares[:, None]).masked_fill_(outside, LOWEST)

    def tops(self, logprobs: Tensor, token_ids: Tensor, number: int) -> tuple[TopLogprobs, ...]:
        """Return so many of the likeliest tokens within the supports, fewer if these are smaller;
        arguments as for `within`, likeliest first."""
        if not number:
            return ()
        values = self.within(logprobs, token_ids).tolist()
        return tuple(
            tuple((token, value) for token, value in zip(ids, row, strict=True) if value > LOWEST)
            for ids, row in zip(token_ids.tolist(), values, strict=True)
        )

    def of(self, rows: Tensor) -> Support:
        """Return the supports of some positions."""
        return Support(self.allowed[rows], self.log_shares[rows])


def given_support(
    masks: Sequence[bytes],
    indices: IntArray,
    logits: Tensor,
    temperatures: Tensor,
    *,
    kernels: bool,
) -> Support | None:
    """Return the supports of positions; None if all of these have the whole vocabulary.

    The sums are those of a sampled token's log S, in the same order: equal masks have equal bits.

    Args:
        masks: As in SamplingParams, packed.
        indices: `[positions]`, the mask of each; below 0 for none.
        logits: `[positions, vocab]` float32.
        temperatures: `[positions]`.
        kernels: As in `scale_logits`.
    """
    own = [masks[index] if index >= 0 else b"" for index in indices.tolist()]
    if not any(own):
        return None
    device = logits.device
    sizes = np.array([len(mask) // 4 for mask in own])
    ids = np.frombuffer(b"".join(own), MASK_DTYPE).astype(np.int64)
    allowed = torch.zeros(logits.shape, dtype=torch.bool, device=device)
    rows = torch.from_numpy(np.repeat(np.arange(len(own)), sizes)).to(device)
    allowed[rows, torch.from_numpy(ids).to(device)] = True
    allowed[torch.from_numpy(sizes == 0).to(device)] = True
    shares = torch.zeros(len(own), dtype=torch.float32, device=device)
    for first in range(0, len(own), ROWS):
        part = slice(first, first + ROWS)
        weights = scale_logits(logits[part], temperatures[part], kernels=kernels).weights()
        mass = mass_of(weights)
        shares[part] = (mass_of(weights.masked_fill_(~allowed[part], 0.0)) / mass).log().float()
    return Support(allowed, shares)
