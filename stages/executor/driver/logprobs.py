"""Logprobs: log-softmax over the full vocabulary, in float32, and their messages.

The caller chooses the logits; docs/sampling.md has what is reported.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....bus.messages import TopLogprobs
from ....config import ModelError
from ..runner.interface import IntArray, cpu, elementwise

BLOCK = 512
"""Tokens of the vocabulary in one partial sum; see `block_sums`."""

LOWEST = torch.finfo(torch.float32).min
"""The logprob of an impossible token: JSON has no minus infinity."""

ROWS = 64
"""Rows per pass, so that a long prompt needs no second copy of its logits."""


class ScaledLogits(msgspec.Struct, frozen=True):
    """Scaled logits, the common base of sampling and logprobs.

    Weights are exp of the scaled logits; the largest of a row is 1.

    Attributes:
        logits: `[batch, vocab]` float32.
        sums: `[batch, blocks]` float64, the weights' `block_sums`.
        largest: `[batch]` float32, the largest logit.
        first_largest: `[batch]`, the first token that has it.
        divisors: `[batch]` float32, the temperature, 1 where that is 0.
        logs: `[batch]` float64, the logarithm of the total, if our kernel computed it.
    """

    logits: Tensor
    sums: Tensor
    largest: Tensor
    first_largest: Tensor
    divisors: Tensor
    logs: Tensor | None = None

    def weights(self, token_ids: Tensor | None = None) -> Tensor:
        """Return the weights of all tokens, `[batch, vocab]`, or of some, `[batch, k]`; float32."""
        logits = self.logits if token_ids is None else self.logits.gather(1, token_ids)
        return _weights(logits, self.largest, self.divisors, kernels=self.logs is not None)

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Return the logprobs of some tokens of each row, `[batch, k]` to float32 `[batch, k]`."""
        logits = self.logits.gather(1, token_ids)
        scaled = (logits - self.largest[:, None]) / self.divisors[:, None]
        logs = self.sums.sum(dim=-1).log() if self.logs is None else self.logs
        return (scaled - logs[:, None]).float()


def scale_logits(
    logits: Tensor, temperatures: Tensor, *, kernels: bool = False, checked: bool = True
) -> ScaledLogits:
    """Divide by the temperature (1 where it is 0) and take exp, without overflow.

    Args:
        logits: `[batch, vocab]` float32.
        temperatures: `[batch]`, 0 or more.
        kernels: Compute the sums by our kernel (CPU), whose bits don't depend on other rows.
        checked: Check for broken logits, which waits for the device. Otherwise the logprobs of such
            a row are NaN.

    Raises:
        ModelError: A row's largest logit is not finite: the model's output is broken.
    """
    # (torch.where with a number would copy it to the device, and wait.)
    divisors = temperatures.masked_fill(temperatures == 0, 1.0).to(torch.float32)
    logs = None
    if kernels:
        largest, first_largest, sums, logs = cpu.softmax_sums(logits, divisors, BLOCK)
    else:
        largest, first_largest = logits.amax(dim=-1), logits.argmax(dim=-1)
    if checked and not bool(torch.isfinite(largest).all()):
        raise broken_output()
    if not kernels:
        sums = block_sums(_weights(logits, largest, divisors))
    return ScaledLogits(logits, sums, largest, first_largest, divisors, logs)


def broken_output(what: str = "logits") -> ModelError:
    """Return the error for output that is not finite, such as a row's largest logit."""
    return ModelError(
        f"the model's {what} are not finite; its weights or its KV cache are damaged, or its dtype "
        "can't hold them (float16 overflows where bfloat16 does not)",
        remedy="set engine.dtype to bfloat16 or float32, or copy the model again",
    )


def _weights(logits: Tensor, largest: Tensor, divisors: Tensor, *, kernels: bool = False) -> Tensor:
    # Subtract before the division, so that no temperature can overflow.
    scaled = (logits - largest[:, None]).div_(divisors[:, None])
    return elementwise(torch.exp, scaled) if kernels else scaled.exp_()


def block_sums(weights: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return sums over blocks of the vocabulary, `[batch, blocks]` float64.

    Inside a block float32 is exact enough to sample; across blocks it would not be. `dtype`: of the
    sums inside a block.
    """
    batch, vocab = weights.shape
    whole = vocab // BLOCK * BLOCK
    sums = weights[:, :whole].view(batch, -1, BLOCK).sum(dim=-1, dtype=dtype).double()
    if whole < vocab:
        rest = weights[:, whole:].sum(dim=-1, keepdim=True, dtype=dtype).double()
        sums = torch.cat((sums, rest), dim=-1)
    return sums


@torch.no_grad()
def gather_logprobs(
    logits: Tensor, temperatures: Tensor, token_ids: Tensor, *, kernels: bool = False
) -> Tensor:
    """Return log_softmax(logits / temperature) of given tokens, over the full vocabulary.

    Args:
        logits: `[batch, vocab]`, any float dtype.
        temperatures: `[batch]`; 0 counts as 1.
        token_ids: `[batch, k]` int64.
        kernels: As in `scale_logits`.

    Returns:
        `[batch, k]` float32; float32's lowest number for an impossible token.

    Raises:
        ModelError: As `scale_logits`.
    """
    logprobs = torch.empty(token_ids.shape, dtype=torch.float32, device=logits.device)
    for first in range(0, len(logits), ROWS):
        rows = slice(first, first + ROWS)
        scaled = scale_logits(logits[rows].float(), temperatures[rows], kernels=kernels)
        logprobs[rows] = scaled.logprobs(token_ids[rows])
    return logprobs.clamp_(min=LOWEST)


@torch.no_grad()
def top_token_ids(logits: Tensor, count: int) -> Tensor:
    """Return the top tokens of each row, likeliest first, equal ones in the order of their ids.

    Args:
        logits: `[batch, vocab]`.
        count: From 1 to vocab.

    Returns:
        `[batch, count]` int64.
    """
    smallest = logits.topk(count, dim=-1).values[:, -1:]
    chosen = logits >= smallest
    # topk leaves ties open: of tokens equal to the last one, take the first by id.
    surplus = (chosen.sum(dim=-1) > count).nonzero()[:, 0]
    if surplus.numel():
        equal = logits[surplus] == smallest[surplus]
        larger = chosen[surplus] & ~equal
        room = count - larger.sum(dim=-1, keepdim=True)
        chosen[surplus] = larger | (equal & (equal.cumsum(dim=-1) <= room))
    ids = chosen.nonzero()[:, 1].view(-1, count)
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def report_top_logprobs(
    logits: Tensor, temperatures: Tensor, counts: IntArray, *, kernels: bool = False
) -> tuple[TopLogprobs, ...]:
    """Return the top tokens of each row with their logprobs (`gather_logprobs`).

    Args:
        logits: `[batch, vocab]` float32.
        temperatures: `[batch]`.
        counts: `[batch]`, top tokens of each row.
        kernels: As in `scale_logits`.

    Returns:
        `[batch]`, empty for a count of 0; empty if all counts are 0.
    """
    if not counts.any():
        return ()
    tops: list[TopLogprobs] = [()] * len(counts)
    wanting = np.flatnonzero(counts)
    for first in range(0, len(wanting), ROWS):
        rows = wanting[first : first + ROWS]
        places = torch.from_numpy(rows).to(logits.device)
        part = logits[places]
        token_ids = top_token_ids(part, int(counts[rows].max()))
        logprobs = gather_logprobs(part, temperatures[places], token_ids, kernels=kernels)
        for row, ids, values in zip(
            rows.tolist(), token_ids.tolist(), logprobs.tolist(), strict=True
        ):
            tops[row] = tuple(zip(ids[: counts[row]], values, strict=False))
    return tuple(tops)
