"""Calls of operators as Transformers' mixers make them: one sequence, the batch flattened.

Each function has Transformers' name and arguments, and its first argument gives the state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..fixed_tiles import elementwise
from ..state.segments import Segments
from .operators import Operators


class Pass(Protocol):
    """A mixer in a pass over the model.

    Attributes:
        module: The mixer's module.
        operators: The operators.
        segments: The segments of the step.
    """

    module: Any
    operators: Operators
    segments: Segments

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the state tensor of the next operator, `[slots, *shape]`."""


def causal_conv1d_fn(
    mixer: Pass,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Convolution, `[1, channels, tokens]`."""
    window = mixer.state((weight.shape[1] - 1, weight.shape[0]), weight.dtype)
    rows = hidden_states[0].T.contiguous()
    output = mixer.operators.conv(
        rows, weight.contiguous(), bias, activation, window, mixer.segments
    )
    return output.T[None]


def torch_chunk_gated_delta_rule(
    mixer: Pass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Gated delta rule, `[1, tokens, heads, dim]`."""
    state = mixer.state((value.shape[2], key.shape[3], value.shape[3]), torch.float32)
    q, k, v, decay, rate = (each[0].contiguous() for each in (query, key, value, g.float(), beta))
    output = mixer.operators.gated_delta(
        q,
        k,
        v,
        decay,
        rate,
        query.shape[3] ** -0.5,
        use_qk_l2norm_in_kernel,
        state,
        mixer.segments,
    )
    return output[None], None


def mamba2_chunk_scan(
    mixer: Pass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *_: Any,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **__: Any,
) -> Tensor:
    """Mamba-2, `[1, tokens, heads, dim]`."""
    heads, width = hidden_states.shape[2:]
    state = mixer.state((heads, B.shape[3], width), torch.float32)
    x, b, c = (each[0].contiguous() for each in (hidden_states, B, C))
    time = torch.clamp(_times(dt[0], dt_bias, softplus=dt_softplus), *dt_limit).contiguous()
    return mixer.operators.ssd(x, time, A.float(), b, c, D, state, mixer.segments)[None]


def mamba_selective_scan(
    mixer: Pass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """Mamba-1, `[1, channels, tokens]`."""
    state = mixer.state((hidden_states.shape[1], A.shape[1]), torch.float32)
    x, b, c = (each[0].T.contiguous() for each in (hidden_states, B, C))
    time = _times(dt[0].T, delta_bias, softplus=delta_softplus).contiguous()
    output = mixer.operators.selective_scan(x, time, A.float(), b, c, D, state, mixer.segments)
    if z is not None:
        output = output * elementwise(F.silu, z[0].T)
    return output.T[None]


def _times(dt: Tensor, bias: Tensor | None, *, softplus: bool) -> Tensor:
    """Return the time steps, `[tokens, heads]`, in the dtype of `dt`."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return elementwise(F.softplus, dt) if softplus else dt


def apply_mask_to_padding_states(mixer: Pass, hidden_states: Tensor, *_: Any) -> Tensor:
    """The states as they are: a flattened batch has no padding."""
    return hidden_states


def _fused(mixer: Pass, *_: Any, **__: Any) -> None:
    """Fused passes, which the mixers do without if they return nothing."""


def _unreached(mixer: Pass, *_: Any, **__: Any) -> None:
    raise RuntimeError("a mixer took the path of its own cache, and was given none")


CALLS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": torch_chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": torch_chunk_gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
    "apply_mask_to_padding_states": apply_mask_to_padding_states,
    "mamba2_split_conv1d_scan_combined": _fused,
    "mamba_inner_fn": _fused,
    "causal_conv1d_update": _unreached,
    "torch_recurrent_gated_delta_rule": _unreached,
    "recurrent_kimi_delta_attention": _unreached,
    "mamba2_selective_state_update": _unreached,
    "mamba_selective_state_update": _unreached,
}
"""By the name in Transformers."""


def lightning_attention(
    mixer: Pass, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Pass of a module that computes lightning attention itself, block by block."""
    module, heads = mixer.module, mixer.module.num_attention_heads
    mixed = module.act_fn(module.qkv_proj(hidden_states))[0]
    q, k, v = (
        each.contiguous()
        for each in mixed.view(len(mixed), heads, -1).split(module.head_dim, dim=2)
    )
    state = mixer.state((heads, module.head_dim, module.head_dim), torch.float32)
    decay = torch.exp(-module.slope_rate.float().flatten())
    output = mixer.operators.lightning(q, k, v, decay, state, mixer.segments)
    output = module.norm(output.view(*hidden_states.shape[:2], -1))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * output), None


def convolved_projection(
    mixer: Pass, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Pass of ZAYA's projection: two convolutions over queries and keys, and half of the values
    from the token before. No sum is over tokens, so it is computed for all at once."""
    module = mixer.module
    shape = (*hidden_states.shape[:2], -1, module.head_dim)
    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)
    few = keys.view(shape).repeat_interleave(module.num_key_value_groups, dim=2)
    query_rest = (queries.view(shape) + few) * 0.5
    grouped = (*hidden_states.shape[:2], -1, module.num_key_value_groups, module.head_dim)
    key_rest = query_rest.view(grouped).mean(dim=-2)
    history = _histories(mixer, torch.cat((queries, keys), dim=-1)[0], module.conv_kernel_size)
    deep, wide = module.conv_qk_depthwise, module.conv_qk_grouped
    span = history.shape[1] - module.depthwise_kernel_size + 1
    taps = (
        history[:, tap : tap + span] * deep.weight[:, 0, tap]
        for tap in range(module.depthwise_kernel_size)
    )
    mixed = reduce(torch.add, taps) + deep.bias
    parts = zip(
        mixed.unflatten(2, (wide.groups, -1)).unbind(2),
        wide.weight.unflatten(0, (wide.groups, -1)),
        wide.bias.unflatten(0, (wide.groups, -1)),
        strict=True,
    )
    found = torch.cat(
        [F.linear(rows.mT.flatten(1), weight.flatten(1), bias) for rows, weight, bias in parts],
        dim=-1,
    )
    query, key = torch.tensor_split(found, [queries.shape[-1]], dim=-1)
    before = _histories(mixer, hidden_states[0], 1)[None, :, 0]
    value = torch.cat((module.v_proj_current(hidden_states), module.v_proj_delayed(before)), -1)
    return query.view(shape) + query_rest, key.view(shape) + key_rest, value.view(shape)


def _histories(mixer: Pass, rows: Tensor, span: int) -> Tensor:
    """Return each token with the `span` tokens before it, `[tokens, span + 1, width]`, zeros before
    the first."""
    state = mixer.state((span, rows.shape[1]), rows.dtype)
    found = rows.new_empty(rows.shape[0], span + 1, rows.shape[1])
    for first, end, slot, save in mixer.segments.each():
        seen = torch.cat((state[slot], rows[first:end]))
        found[first:end] = seen.unfold(0, span + 1, 1).mT
        for target in (slot, save)[: 1 + (save >= 0)]:
            state[target] = seen[end - first :]
    return found


PASSES: dict[str, Callable[..., Any]] = {
    "LightningAttention": lightning_attention,
    "CCAProjection": convolved_projection,
}
"""Passes of whole modules, by the end of the class's name in Transformers."""
