"""The choice of operators: the kernels, if this machine has them and they agree with the
definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..kernels.compile import KernelsUnavailable
from ..state.segments import Segments
from .operators import Operators
from .reference import ReferenceOperators

_TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""The largest difference by dtype, relative to the largest number."""

_TOKENS, _SLOTS = 7, 4

_Call = Callable[[Operators, Tensor], Tensor]


def choose_operators(dtype: torch.dtype, device: torch.device) -> tuple[Operators, str]:
    """Return the operators for activations of a dtype on a device.

    Returns:
        The kernels and ""; or the definition in torch, and why it is not the kernels.
    """
    from ..kernels.mixers import KernelOperators

    reference = ReferenceOperators()
    if device.type != "cpu":
        return reference, f"there are none for {device.type}"
    try:
        kernels = KernelOperators(dtype)
    except KernelsUnavailable as error:
        return reference, str(error)
    for name, call, state in _calls(dtype):
        states = state.clone(), state.clone()
        found, wanted = call(kernels, states[0]), call(reference, states[1])
        for ours, theirs in ((found, wanted), states):
            if not _close(ours, theirs):
                return reference, f"{name} computes something else on this machine"
    return kernels, ""


def _close(ours: Tensor, theirs: Tensor) -> bool:
    bound = _TOLERANCES[ours.dtype] * theirs.abs().max()
    same = ours.dtype is theirs.dtype and ours.shape == theirs.shape
    return same and bool((ours.float() - theirs.float()).abs().max() <= bound)


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, _Call, Tensor]]:
    """Yield each operator: its name, a call of it on random numbers with a state, the state."""
    random = torch.Generator().manual_seed(0)
    count = np.array([1, 4, 2])
    segments = Segments(np.cumsum(count) - count, count, np.array([2, 0, 0]), np.array([-1, 3, -1]))

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=random)

    heads, keys, values = 2, 40, 72
    q, k, v = normal(_TOKENS, 1, keys), normal(_TOKENS, 1, keys), normal(_TOKENS, heads, values)
    qs, ks = normal(_TOKENS, heads, keys), normal(_TOKENS, heads, keys)
    steps, rates = uniform(_TOKENS, heads), uniform(heads)
    state = normal(_SLOTS, heads, keys, values, dtype=torch.float32)
    learning = steps.to(dtype)

    def delta(g: Tensor) -> _Call:
        return lambda ops, s: ops.gated_delta(q, k, v, g, learning, 0.2, True, s, segments)

    yield "gated_delta", delta(-steps), state
    yield "gated_delta", delta(-uniform(_TOKENS, heads, keys)), state
    yield "ssd", lambda ops, s: ops.ssd(v, steps, -rates, q, k, rates, s, segments), state
    yield "lightning", lambda ops, s: ops.lightning(qs, ks, v, rates, s, segments), state
    x, b, c = normal(_TOKENS, keys), normal(_TOKENS, 16), normal(_TOKENS, 16)
    times, decay = uniform(_TOKENS, keys), -uniform(keys, 16)
    yield (
        "selective_scan",
        lambda ops, s: ops.selective_scan(x, times, decay, b, c, times[0], s, segments),
        normal(_SLOTS, keys, 16, dtype=torch.float32),
    )
    for width in (3, 4):
        yield (
            "conv",
            _conv(x, normal(keys, width), normal(keys), segments),
            normal(_SLOTS, width - 1, keys),
        )


def _conv(x: Tensor, weight: Tensor, bias: Tensor, segments: Segments) -> _Call:
    return lambda ops, s: ops.conv(x, weight, bias, "silu", s, segments)
