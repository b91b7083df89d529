"""Logprobs of chosen tokens: log-softmax over the full vocabulary, in float32.

Which logits they are of is the caller's business; docs/sampling.md says what is reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....config import ModelError
from ..runner.interface import elementwise, softmax_sums

BLOCK = 512
"""Tokens of the vocabulary whose weights are summed together; see `block_sums`."""

LOWEST = torch.finfo(torch.float32).min
"""Reported for a token that can't be chosen: JSON has no minus infinity."""

_ROWS = 64
"""Rows that are scaled together, so that a long prompt needs no second copy of its logits."""


@dataclass(frozen=True, slots=True)
class ScaledLogits:
    """What sampling and logprobs have in common.

    Weights are exp of the scaled logits; the largest of a row is 1.

    Attributes:
        logits: `[batch, vocab]` float32.
        sums: `[batch, blocks]` float64, the weights' `block_sums`.
        largest: `[batch]` float32, the largest logit.
        first_largest: `[batch]`, the first token that has it.
        divisors: `[batch]` float32, the temperature, 1 where that is 0.
        logs: `[batch]` float64, the logarithm of the sums' total, where our own kernel has computed
            it; None elsewhere.
    """

    logits: Tensor
    sums: Tensor
    largest: Tensor
    first_largest: Tensor
    divisors: Tensor
    logs: Tensor | None = None

    def weights(self, token_ids: Tensor | None = None) -> Tensor:
        """Of all tokens, `[batch, vocab]`, or of some of each row, `[batch, k]`; float32."""
        logits = self.logits if token_ids is None else self.logits.gather(1, token_ids)
        return _weights(logits, self.largest, self.divisors, kernels=self.logs is not None)

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Of some tokens of each row, `[batch, k]` to float32 `[batch, k]`."""
        logits = self.logits.gather(1, token_ids)
        scaled = (logits - self.largest[:, None]) / self.divisors[:, None]
        logs = self.sums.sum(dim=-1).log() if self.logs is None else self.logs
        return (scaled - logs[:, None]).float()


def scale_logits(
    logits: Tensor, temperatures: Tensor, *, kernels: bool = False, checked: bool = True
) -> ScaledLogits:
    """Divides by the temperature (1 where it is 0) and takes exp, without overflow.

    Args:
        logits: `[batch, vocab]` float32.
        temperatures: `[batch]`, 0 or more.
        kernels: Whether our own kernel computes the sums (CPU), and a row's numbers are the same
            bits whatever the others are.
        checked: Whether to look for broken logits, which waits for the device. Otherwise the
            logprobs of such a row are not numbers.

    Raises:
        ModelError: A row's largest logit is not a finite number: the model's output is broken.
    """
    # (torch.where with a number would copy it to the device, and wait.)
    divisors = temperatures.masked_fill(temperatures == 0, 1.0).to(torch.float32)
    logs = None
    if kernels:
        largest, first_largest, sums, logs = softmax_sums(logits, divisors, BLOCK)
    else:
        largest, first_largest = logits.amax(dim=-1), logits.argmax(dim=-1)
    if checked and not bool(torch.isfinite(largest).all()):
        raise broken_logits()
    if not kernels:
        sums = block_sums(_weights(logits, largest, divisors))
    return ScaledLogits(logits, sums, largest, first_largest, divisors, logs)


def broken_logits() -> ModelError:
    """What is raised when a row's largest logit is not a finite number."""
    return ModelError(
        "the model produced logits that are not finite numbers; its weights are damaged, or "
        "its dtype can't hold them (float16 overflows where bfloat16 does not)"
    )


def _weights(logits: Tensor, largest: Tensor, divisors: Tensor, *, kernels: bool = False) -> Tensor:
    # The largest is taken off before the division, so that no temperature can overflow.
    scaled = (logits - largest[:, None]).div_(divisors[:, None])
    return elementwise(torch.exp, scaled) if kernels else scaled.exp_()


def block_sums(weights: Tensor) -> Tensor:
    """Sums over blocks of the vocabulary, `[batch, blocks]` float64, the last block maybe shorter.

    Each sum has few terms, so float32 is exact enough inside; across blocks it would not be.
    """
    batch, vocab = weights.shape
    whole = vocab // BLOCK * BLOCK
    sums = weights[:, :whole].view(batch, -1, BLOCK).sum(dim=-1).double()
    if whole < vocab:
        rest = weights[:, whole:].sum(dim=-1, keepdim=True).double()
        sums = torch.cat((sums, rest), dim=-1)
    return sums


@torch.no_grad()
def gather_logprobs(
    logits: Tensor, temperatures: Tensor, token_ids: Tensor, *, kernels: bool = False
) -> Tensor:
    """The logprobs of given tokens: log_softmax(logits / temperature) over the full vocabulary.

    Args:
        logits: `[batch, vocab]`, any float dtype.
        temperatures: `[batch]`; 0 counts as 1.
        token_ids: `[batch, k]` int64.
        kernels: As in `scale_logits`.

    Returns:
        `[batch, k]` float32; a token that can't be chosen has float32's lowest number.

    Raises:
        ModelError: As `scale_logits`.
    """
    logprobs = torch.empty(token_ids.shape, dtype=torch.float32, device=logits.device)
    for first in range(0, len(logits), _ROWS):
        rows = slice(first, first + _ROWS)
        scaled = scale_logits(logits[rows].float(), temperatures[rows], kernels=kernels)
        logprobs[rows] = scaled.logprobs(token_ids[rows])
    return logprobs.clamp_(min=LOWEST)


@torch.no_grad()
def top_token_ids(logits: Tensor, count: int) -> Tensor:
    """The likeliest tokens of each row, likeliest first, equal ones in the order of their ids.

    Args:
        logits: `[batch, vocab]`.
        count: From 1 to vocab.

    Returns:
        `[batch, count]` int64.
    """
    smallest = logits.topk(count, dim=-1).values[:, -1:]
    chosen = logits >= smallest
    # topk says nothing about ties: of those equal to the last one, the first by id are taken.
    surplus = (chosen.sum(dim=-1) > count).nonzero()[:, 0]
    if surplus.numel():
        equal = logits[surplus] == smallest[surplus]
        larger = chosen[surplus] & ~equal
        room = count - larger.sum(dim=-1, keepdim=True)
        chosen[surplus] = larger | (equal & (equal.cumsum(dim=-1) <= room))
    ids = chosen.nonzero()[:, 1].view(-1, count)
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
