"""Operators in torch, token by token: the definition, and what runs where there are no kernels.

Each token is computed by the same torch calls on the same shapes, so that its bits depend on
nothing but itself and the state before it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..fixed_tiles import elementwise
from .operators import Segments


class ReferenceOperators:
    """The operators for any device."""

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        window: Tensor,
        segments: Segments,
    ) -> Tensor:
        width = weight.shape[-1]
        taps = weight.float().T
        sums = x.new_empty(x.shape, dtype=torch.float32)
        for first, end, slot, save in segments.each():
            seen = torch.cat((window[slot].T, x[first:end].to(weight.dtype)))
            wide = seen.float()
            # No fused product and sum, which would round otherwise in a vector's remainder.
            total = wide[: end - first] * taps[0]
            for tap in range(1, width):
                total = total + wide[tap : tap + end - first] * taps[tap]
            sums[first:end] = total
            _keep(window, slot, save, seen[end - first :].T)
        if bias is not None:
            sums = sums + bias.float()
        output = sums.to(weight.dtype)
        if activation is not None:
            output = elementwise(ACT2FN[activation], output)
        return output.to(x.dtype)

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        l2norm: bool,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        heads = v.shape[1]

        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            query, key = (_heads(each[token].float(), heads) for each in (q, k))
            if l2norm:
                query, key = _normalised(query), _normalised(key)
            decay = g[token].float().exp()
            decay = decay[..., None] if decay.dim() == 2 else decay[:, None, None]
            after = before * decay
            known = (after * key[..., None]).sum(-2)
            change = (v[token].float() - known) * beta[token].float()[:, None]
            after = after + key[..., None] * change[:, None]
            return (after * (query * scale)[..., None]).sum(-2), after

        return _scan(torch.empty_like(v, dtype=torch.float32), state, segments, step).to(q.dtype)

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        heads = x.shape[1]

        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            time, inputs = dt[token].float(), x[token].float()
            write, read = (_heads(each[token].float(), heads)[:, None] for each in (B, C))
            after = before * (time * A).exp()[:, None, None]
            after = after + (inputs * time[:, None])[..., None] * write
            output = (after * read).sum(-1)
            return (output if D is None else output + inputs * D.float()[:, None]), after

        return _scan(torch.empty_like(x, dtype=torch.float32), state, segments, step)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            time, inputs = dt[token].float()[:, None], x[token].float()
            after = before * (time * A).exp() + (time * B[token].float()) * inputs[:, None]
            output = (after * C[token].float()).sum(-1)
            return (output if D is None else output + inputs * D.float()), after

        return _scan(torch.empty_like(x, dtype=torch.float32), state, segments, step)

    def lightning(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            written = k[token].float()[..., None] * v[token].float()[:, None]
            after = before * decay[:, None, None] + written
            return (after * q[token].float()[..., None]).sum(-2), after

        return _scan(torch.empty_like(v, dtype=torch.float32), state, segments, step).to(q.dtype)


def _scan(
    output: Tensor,
    state: Tensor,
    segments: Segments,
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Compute all tokens by `step`, from a token and the state before it to output and state."""
    for first, end, slot, save in segments.each():
        after = state[slot]
        for token in range(first, end):
            output[token], after = step(token, after)
        _keep(state, slot, save, after)
    return output


def _keep(state: Tensor, slot: int, save: int, after: Tensor) -> None:
    state[slot] = after
    if save >= 0:
        state[save] = after


def _heads(each: Tensor, heads: int) -> Tensor:
    """Repeat `[few, dim]` to `[heads, dim]`."""
    return each.repeat_interleave(heads // each.shape[0], dim=0)


def _normalised(each: Tensor) -> Tensor:
    return each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6)
