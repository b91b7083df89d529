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
from ..state.segments import Segments


class ReferenceOperators:
    """The operators for any device."""

    code = ""

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
            seen = torch.cat((window[slot], x[first:end].to(weight.dtype)))
            wide = seen.float()
            # No fused product and sum, which would round otherwise in a vector's remainder.
            total = wide[: end - first] * taps[0]
            for tap in range(1, width):
                total = total + wide[tap : tap + end - first] * taps[tap]
            sums[first:end] = total
            _keep(window, slot, save, seen[end - first :])
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
        queries, keys = (_of_heads(each, v.shape[1])[..., None] for each in (q, k))
        values, rates = v.float(), beta.float()[..., None]
        decays = g[..., None] if g.dim() == 3 else g[..., None, None]

        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            query, key = queries[token], keys[token]
            if l2norm:
                query, key = _normalised(query), _normalised(key)
            after = before * decays[token].exp()
            change = (values[token] - (after * key).sum(-2)) * rates[token]
            after = after + key * change[:, None]
            return (after * (query * scale)).sum(-2), after

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
        times, inputs = dt.float()[..., None, None], x.float()
        writes, reads = (_of_heads(each, x.shape[1])[..., None] for each in (B, C))
        logs, skip = A[:, None, None], None if D is None else D.float()[:, None]

        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            after = before * (times[token] * logs).exp()
            after = after + writes[token] * (inputs[token] * times[token][..., 0])[:, None]
            output = (after * reads[token]).sum(-2)
            return (output if skip is None else output + inputs[token] * skip), after

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
        times, inputs, writes, reads = dt.float()[..., None], x.float(), B.float(), C.float()

        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            time, value = times[token], inputs[token]
            after = before * (time * A).exp() + (time * writes[token]) * value[:, None]
            output = (after * reads[token]).sum(-1)
            return (output if D is None else output + value * D), after

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
        queries, keys = q.float()[..., None], k.float()[..., None]
        values, decays = v.float()[:, :, None], decay[:, None, None]

        def step(token: int, before: Tensor) -> tuple[Tensor, Tensor]:
            after = before * decays + keys[token] * values[token]
            return (after * queries[token]).sum(-2), after

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


def _of_heads(each: Tensor, heads: int) -> Tensor:
    """Repeat `[tokens, few, dim]` to `[tokens, heads, dim]`, in float32."""
    return each.float().repeat_interleave(heads // each.shape[1], dim=1)


def _normalised(each: Tensor) -> Tensor:
    """Normalise `[heads, dim, 1]`."""
    return each * torch.rsqrt((each * each).sum(-2, keepdim=True) + 1e-6)
