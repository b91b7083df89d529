"""Sampling: tokens from logits. Pure functions; random numbers are arguments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....config import RequestError
from ..runner.interface import cpu
from .logprobs import BLOCK, ScaledLogits, block_sums, broken_output, scale_logits

_CANDIDATES = (64, 1024)
"""Numbers of top tokens in which limits are searched before a full sort."""

_SORTED_ROWS = 32
"""Rows that `sample_within` sorts at a time."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one token: a pure function of seed and position.

    Two rounds of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014), the first over the seed, so that neither successive seeds nor successive positions give
    related numbers. A sample thus depends on no neighbour, preemption or restart.

    Args:
        seed: Seed of the sample; any integer, taken modulo 2**64.
        position: Index of the generated token, from 0.
    """
    return float(uniforms(np.array([seed & _MASK], np.uint64), np.array([position]))[0])


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return `uniform` for `[batch]` seeds and positions."""
    golden = np.uint64(_GOLDEN)
    with np.errstate(over="ignore"):
        steps = (positions.astype(np.uint64) + np.uint64(1)) * golden
        mixed = _mix(_mix(seeds + golden) + steps)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@torch.no_grad()
def sample_with_logprobs(
    logits: Tensor,
    temperatures: Tensor,
    *,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    kernels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sample one token per row, with its logprob under the policy.

    The logprob is log_softmax(logits / temperature) over the full vocabulary, in float32. top_k,
    top_p and min_p restrict the choice and not the logprob ("processed" in docs/sampling.md, with
    penalties, bias and masks already in the logits). At temperature 0 the token is the argmax (the
    first of equal ones), and the logprob is that of temperature 1.

    The limits apply to the probabilities after temperature, likeliest first, equal ones in the
    order of their ids: the first `top_k`; of these, rescaled to sum to 1, as few as reach `top_p`;
    and none below `min_p` times the likeliest. At least one token is always left.

    Args:
        logits: `[batch, vocab]`, any float dtype. Minus infinity is an impossible token.
        temperatures: `[batch]`, 0 or more.
        uniforms: `[batch]` float64 in [0, 1), one per row; from torch's default generator when
            None.
        top_k: `[batch]` integers; 0 is off.
        top_p: `[batch]`; 1 or more is off.
        min_p: `[batch]`; 0 is off.
        kernels: As in `scale_logits`.

    Returns:
        Tokens `[batch]` int64, logprobs `[batch]` float32.

    Raises:
        ModelError: A row's largest logit is not finite: the model's output is broken.
        RequestError: A temperature is negative or not finite, or a shape is wrong.
    """
    limits = Limits(top_k, top_p, min_p)
    columns = {"temperatures": temperatures, "uniforms": uniforms, **limits._asdict()}
    _check_shapes(logits, columns)
    usable = (temperatures >= 0) & temperatures.isfinite()
    if not bool(usable.all()):
        raise RequestError(
            f"a temperature is {temperatures[~usable][0].item()}; it must be 0 (greedy) or above",
            code="invalid_temperature",
        )
    return sample_rows(logits, temperatures, uniforms, limits, kernels=kernels)[:2]


def _check_shapes(logits: Tensor, columns: dict[str, Tensor | None]) -> None:
    """Raises RequestError for wrong shapes, which torch would broadcast."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise RequestError(
            f"logits are {tuple(logits.shape)} {logits.dtype}; they must be [batch, vocab] floats"
        )
    for name, column in columns.items():
        if column is not None and column.shape != logits.shape[:1]:
            raise RequestError(
                f"{name} has the shape {tuple(column.shape)}; with logits of "
                f"{tuple(logits.shape)} it must be ({logits.shape[0]},), one for each row"
            )


class Limits(NamedTuple):
    """Limits of the choice, `[batch]` each, as in `sample_with_logprobs`; None if no row has it."""

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


NO_LIMITS = Limits()


class Choice(NamedTuple):
    """Sampled tokens.

    Attributes:
        tokens: `[batch]` int64.
        logprobs: `[batch]` float32.
        support_logprobs: `[batch]` float32, the log of the probability mass that the limits leave:
            0 in a row without limits, and the token's own logprob at temperature 0. None if no row
            has limits.
        weights: `[batch, vocab]` float32, above 0 for the tokens that can be sampled at a
            temperature above 0; None if they were not to be kept.
    """

    tokens: Tensor
    logprobs: Tensor
    support_logprobs: Tensor | None = None
    weights: Tensor | None = None


class _Restricted(NamedTuple):
    """Weights, 0 outside the limits, `[batch, vocab]`, and the log of their share, `[batch]`."""

    weights: Tensor
    log_shares: Tensor


@torch.no_grad()
def sample_rows(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor | None,
    limits: Limits,
    *,
    kernels: bool,
    keep_weights: bool = False,
) -> Choice:
    """Sample like `sample_with_logprobs`, with checked arguments."""
    whole = kernels and limits == NO_LIMITS and not keep_weights
    if whole and (uniforms is not None or not temperatures.numpy().any()):
        numbers = None if uniforms is None else uniforms.double()
        tokens, logprobs = cpu.sample(logits.float(), temperatures.float(), numbers, BLOCK)
        if not np.isfinite(logprobs.numpy()).all():
            raise broken_output()
        return Choice(tokens, logprobs)
    scaled = scale_logits(logits.float(), temperatures, kernels=kernels)
    greedy = temperatures == 0
    tokens, restricted, weights = scaled.first_largest, None, None
    if not bool(greedy.all()):
        if uniforms is None:
            uniforms = torch.rand(logits.shape[0], dtype=torch.float64, device=logits.device)
        restricted = _restrict(scaled, limits)
        weights = None if restricted is None else restricted.weights
        tokens = torch.where(greedy, tokens, _inverse_cdf(scaled, weights, uniforms))
    logprobs, shares = scaled.logprobs(tokens[:, None])[:, 0], None
    if keep_weights and weights is None:
        weights = scaled.weights()
    if limits != NO_LIMITS:
        shares = torch.zeros_like(logprobs) if restricted is None else restricted.log_shares
        shares = torch.where(greedy, logprobs, shares)
    return Choice(tokens, logprobs, shares, weights if keep_weights else None)


@torch.no_grad()
def sample_plain(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample like `sample_with_logprobs` without limits, and without waiting for the device.

    A row whose largest logit is not finite gets some token with a NaN logprob.

    Args:
        logits: `[batch, vocab]` float32.
        temperatures: `[batch]`, 0 or more.
        uniforms: `[batch]` float64 in [0, 1).
    """
    scaled = scale_logits(logits, temperatures, checked=False)
    sampled = _inverse_cdf(scaled, None, uniforms)
    tokens = torch.where(temperatures == 0, scaled.first_largest, sampled)
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    return tokens, scaled.logprobs(tokens[:, None])[:, 0]


@torch.no_grad()
def sample_within(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, limits: Limits
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample like `sample_rows`, in shapes that depend on no number, and without waiting for the
    device: whole rows are sorted. Broken rows are as in `sample_plain`.

    Returns:
        Tokens, logprobs and support logprobs, `[batch]` each.
    """
    parts = []
    # A few rows at a time, since sorting takes several times their memory.
    for first in range(0, len(logits), _SORTED_ROWS):
        some = slice(first, first + _SORTED_ROWS)
        own = Limits(*(None if each is None else each[some] for each in limits))
        scaled = scale_logits(logits[some], temperatures[some], checked=False)
        bounds = _bounds(scaled, own)
        weights = scaled.weights()
        ordered = weights.sort(dim=-1, descending=True).values
        counts, _ = _count_allowed(ordered, scaled.sums.sum(dim=-1), logits.shape[1], *bounds)
        smallest = ordered.gather(1, counts[:, None] - 1)
        equal, larger = weights == smallest, weights > smallest
        room = counts - larger.sum(dim=-1)
        kept = weights.masked_fill(~(larger | (equal & _first(equal, room))), 0.0)
        shares = (mass_of(kept) / mass_of(weights)).log().float()
        greedy = temperatures[some] == 0
        sampled = _inverse_cdf(scaled, kept, uniforms[some])
        tokens = torch.where(greedy, scaled.first_largest, sampled)
        tokens = tokens.clamp_(max=logits.shape[1] - 1)
        logprobs = scaled.logprobs(tokens[:, None])[:, 0]
        parts.append((tokens, logprobs, torch.where(greedy, logprobs, shares)))
    tokens, logprobs, shares = map(torch.cat, zip(*parts, strict=True))
    return tokens, logprobs, shares


def _inverse_cdf(scaled: ScaledLogits, restricted: Tensor | None, uniforms: Tensor) -> Tensor:
    """Return the first tokens whose running sum of weights exceeds uniform * total, `[batch]`.

    In two levels: first the block, then the token in it. A running sum over a whole vocabulary in
    float32 would lose the tail (at 151,936 tokens the rounding errors exceed most probabilities),
    and in float64 it would take twice the memory traffic.

    A token of weight 0 is never chosen, since the running sum doesn't grow there.

    Args:
        scaled: The weights.
        restricted: Weights to use instead, `[batch, vocab]`.
        uniforms: `[batch]`.
    """
    vocab = scaled.logits.shape[1]
    sums = scaled.sums if restricted is None else block_sums(restricted)
    running = sums.cumsum(dim=-1)
    targets = _below(uniforms.double() * running[:, -1], running[:, -1])
    # NaN sums lead past the end.
    block = torch.searchsorted(running, targets[:, None], right=True)
    block = block.clamp_(max=running.shape[1] - 1)
    before = running.gather(1, block) - sums.gather(1, block)
    ids = block * BLOCK + torch.arange(BLOCK, device=block.device)
    there = ids.clamp(max=vocab - 1)
    inside = scaled.weights(there) if restricted is None else restricted.gather(1, there)
    inside = inside.double().masked_fill_(ids >= vocab, 0.0)
    running = inside.cumsum(dim=-1)
    # The block's sum and this running sum differ by rounding: the target may lie just outside.
    targets = _below((targets[:, None] - before)[:, 0], running[:, -1])
    place = torch.searchsorted(running, targets[:, None], right=True)
    place = place.clamp_(max=BLOCK - 1)
    return ids.gather(1, place)[:, 0]


def _below(targets: Tensor, totals: Tensor) -> Tensor:
    """Clamp targets to 0 and strictly below their totals."""
    largest = torch.nextafter(totals, torch.zeros_like(totals))
    return torch.minimum(targets.clamp_(min=0.0), largest)


def _restrict(scaled: ScaledLogits, limits: Limits) -> _Restricted | None:
    """Return the weights within the limits; None if no row has a limit."""
    if limits == NO_LIMITS:
        return None
    k, p, m = _bounds(scaled, limits)
    limited = ((k < scaled.logits.shape[1]) | (p < 1) | (m > 0)).nonzero()[:, 0]
    if not limited.numel():
        return None
    weights = scaled.weights()
    totals = scaled.sums.sum(dim=-1)
    rows = weights[limited]
    counts, smallest = _find_smallest(rows, totals[limited], k[limited], p[limited], m[limited])
    allowed = rows >= smallest
    # Of tokens equal to the smallest allowed one, keep the first by id, up to the count.
    surplus = (allowed.sum(dim=-1) > counts).nonzero()[:, 0]
    if surplus.numel():
        equal = rows[surplus] == smallest[surplus]
        room = counts[surplus] - (rows[surplus] > smallest[surplus]).sum(dim=-1)
        allowed[surplus] &= ~equal | _first(equal, room)
    # Both sums are in float64 and in one order: a row that keeps everything has exactly log 1.
    log_shares = weights.new_zeros(len(weights))
    mass = mass_of(rows)
    weights[limited] = rows = rows.masked_fill_(~allowed, 0.0)
    log_shares[limited] = (mass_of(rows) / mass).log().float()
    return _Restricted(weights, log_shares)


def _bounds(scaled: ScaledLogits, limits: Limits) -> tuple[Tensor, Tensor, Tensor]:
    """Return the limits of each row, `[batch]`: at most k tokens, p of the sum, m at least."""
    top_k, top_p, min_p = limits
    batch, vocab = scaled.logits.shape
    off = torch.zeros(batch, dtype=torch.float64, device=scaled.logits.device)
    k = off.long() if top_k is None else top_k.long()
    k = k.masked_fill((k <= 0) | (k > vocab), vocab)
    p = off + 1 if top_p is None else top_p.double()
    m = off.float() if min_p is None else min_p.float()
    return k, p, m


def _first(equal: Tensor, room: Tensor) -> Tensor:
    """Return where at most `room` of the true places are passed, each row for itself."""
    return equal.cumsum(dim=-1) <= room[:, None]


def mass_of(weights: Tensor) -> Tensor:
    """Return each row's sum, `[rows]` float64, whose bits don't depend on other rows."""
    return block_sums(weights, dtype=torch.float64).sum(dim=-1)


def _find_smallest(
    weights: Tensor, totals: Tensor, k: Tensor, p: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many tokens the limits allow, `[rows]`, and the smallest weight, `[rows, 1]`.

    Only rows that the first candidates don't decide are searched further, so a row's result does
    not depend on the others.
    """
    vocab = weights.shape[1]
    counts = torch.ones_like(k)
    smallest = weights.new_ones(len(counts), 1)
    unsure = torch.arange(len(counts), device=weights.device)
    for width in (*(c for c in _CANDIDATES if c < vocab), vocab):
        part = weights[unsure]
        if width < vocab:
            ordered = part.topk(width, dim=-1).values
        else:
            ordered = part.sort(dim=-1, descending=True).values
        allowed, certain = _count_allowed(
            ordered, totals[unsure], vocab, k[unsure], p[unsure], m[unsure]
        )
        counts[unsure] = allowed
        smallest[unsure] = ordered.gather(1, allowed[:, None] - 1)
        unsure = unsure[~certain]
        if not unsure.numel():
            break
    return counts, smallest


def _count_allowed(
    ordered: Tensor, totals: Tensor, vocab: int, k: Tensor, p: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many of the top tokens the limits allow, `[rows]` each.

    Args:
        ordered: `[rows, candidates]`, the largest weights, falling; the very largest is 1.
        totals: `[rows]`, sums over the full vocabulary.
        vocab: Its size.
        k: Most tokens.
        p: Share of the sum to reach.
        m: Least weight.

    Returns:
        The counts, at least 1, and whether the candidates were enough to decide.
    """
    running = ordered.double().cumsum(dim=-1)
    width = ordered.shape[1]
    last = running.gather(1, (k.clamp(max=width) - 1)[:, None])[:, 0]
    # The sum of the first k, known if k lies within the candidates.
    base = torch.where(k <= width, last, totals)
    unneeded = (running - ordered) >= (p * base)[:, None]
    by_p = torch.where(p < 1, width - unneeded.sum(dim=-1), k)
    by_m = torch.where(m > 0, (ordered >= m[:, None]).sum(dim=-1), k)
    counts = torch.minimum(torch.minimum(by_p, by_m), k)
    certain = (k <= width) | ((counts < width) & ((p >= 1) | (k >= vocab)))
    return counts.clamp(min=1, max=width), certain
