"""Calls of operators as Transformers' mixers make them: one sequence, the batch flattened.

Each function has Transformers' name and arguments, and its first argument gives the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..fixed_tiles import elementwise
from .operators import Operators, Segments


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


PASSES: dict[str, Callable[..., Any]] = {"LightningAttention": lightning_attention}
"""Passes of whole modules, by the end of the class's name in Transformers."""
