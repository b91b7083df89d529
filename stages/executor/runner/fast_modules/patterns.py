"""Patterns: modules matched by their parts, and the kernel passes offered for them.

An offer may be wrong; `modules` compares it with the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.backend import QKV, AttentionBackend
from ..kernels import cpu
from ..kernels.cpu import LinearKind, RMSNorm
from ..kv_cache import KVCache
from ..linear.choose import method_of
from ..linear.method import LinearMethod
from ..loaded_model import LoadedModel
from .calls import GATED, PROJECTIONS, Calls, kind_of, pack

Forward = Callable[..., Any]

_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")


def find_patterns(
    model: LoadedModel, cache: KVCache, calls: Calls
) -> Iterator[tuple[nn.Module, list[Forward]]]:
    """Iterate over the modules that match a pattern, with their offers."""
    output = model.module.get_output_embeddings()  # type: ignore[operator]
    shared = () if model.mixers is None else model.mixers.shared
    for module in model.module.modules():
        if module in shared:
            continue
        if any(each.dtype != model.dtypes.weights for each in _plain_parameters(module)):
            continue  # such as a router that is kept in float32
        offers: list[Forward] = []
        if (method := method_of(module)) is not None:
            offers = _linear(method, calls, wide=module is output)
        elif getattr(module, "holds_experts", False):
            from .experts import expert_pass

            found = expert_pass(module, model.dtypes.activations, calls)  # type: ignore[arg-type]
            offers = [] if found is None else [found]
        elif hasattr(module, "holds_codes") and calls.kernels is not cpu:
            offers = _embedding(module, model.dtypes.activations)
        elif "RMSNorm" in type(module).__name__:
            offers = [*_norm(module, calls)]
        else:
            patterns = (
                _decoder_layer(module, model, cache, calls),
                _attention(module, model, calls),
            )
            offers = next(filter(None, (*patterns, _gated_mlp(module, calls))), [])
        if offers:
            yield module, offers


def _plain_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Iterate over the parameters that are no codes."""
    for part in module.modules():
        if not getattr(part, "holds_codes", False):
            yield from part.parameters(recurse=False)


def _linear(method: LinearMethod, calls: Calls, *, wide: bool) -> list[Forward]:
    packed = method.pack()
    if packed is None:
        return []
    fast = calls.linear([packed], LinearKind.WIDE if wide else LinearKind.PLAIN)
    if fast is None:
        return []

    def forward(x: Tensor) -> Tensor:
        return fast(_rows(x)).view(*x.shape[:-1], packed.outputs)

    return [forward]


def _embedding(module: nn.Module, dtype: torch.dtype) -> list[Forward]:
    if getattr(module, "plain", module) is not None:
        return []  # it does more than look up rows
    from ..kernels.triton_quantized import Embedding

    return [Embedding(module._parameters, module.form, dtype)]  # type: ignore[arg-type]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _norm(module: nn.Module, calls: Calls) -> list[RMSNorm]:
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or not isinstance(epsilon, float) or not weight.is_contiguous():
        return []
    return [calls.kernels.RMSNorm(module, epsilon, shifted=shifted) for shifted in (False, True)]


def _gated_mlp(module: nn.Module, calls: Calls) -> list[Forward]:
    """act(gate_proj(x)) * up_proj(x), through down_proj."""
    gated = _gated(module, calls)
    if gated is None:
        return []
    down: nn.Module = module.down_proj  # type: ignore[assignment]

    def forward(x: Tensor) -> Tensor:
        output: Tensor = down(gated(_rows(x)))
        return output.view_as(x)

    return [forward]


def _gated(module: nn.Module, calls: Calls) -> Callable[[Tensor], Tensor] | None:
    """Return a gated MLP's pass up to its last layer, on `[tokens, hidden]`."""
    packed = pack(module, GATED)
    kind = kind_of(getattr(module, "act_fn", None))
    if not packed or method_of(getattr(module, "down_proj", None)) is None or kind is None:
        return None
    if any(layer.parameters["bias"] is not None for layer in packed):
        return None
    layers, inner = [getattr(module, name) for name in GATED], calls.linear(packed, kind)

    def gated(rows: Tensor) -> Tensor:
        if calls.together and inner:
            return inner(rows)
        gates, ups = (layer(rows) for layer in layers)
        product: Tensor = calls.kernels.gate(gates, ups, kind)
        return product

    return gated


def _attention(module: nn.Module, model: LoadedModel, calls: Calls) -> list[Forward]:
    """Projections to queries, keys and values, norms of their heads, rotation, our attention."""
    attended = _attended(module, model, calls)
    if attended is None:
        return []
    output: nn.Module = module.o_proj  # type: ignore[assignment]

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        result: Tensor = output(attended(_rows(hidden_states), *args, **kwargs))
        return result.view(*hidden_states.shape[:-1], -1), None

    return [forward]


def _attended(module: nn.Module, model: LoadedModel, calls: Calls) -> Forward | None:
    """Return an attention module's pass up to its last layer, on `[tokens, hidden]`."""
    packed = pack(module, PROJECTIONS)
    index, last = getattr(module, "layer_idx", None), method_of(getattr(module, "o_proj", None))
    if not packed or last is None or not isinstance(index, int) or index not in model.index_of:
        return None
    if index in model.shares_kv:
        return None  # a module hands keys and values to another
    if getattr(module, "indexer", None) is not None:
        return None
    index = model.index_of[index]
    spec, options = model.layers[index], model.attention_options[index]
    if spec.key_dim % 32:
        return None
    kv_heads, width = spec.num_kv_heads, spec.key_dim
    heads = last.inputs // spec.value_dim
    # A gate for the output may be beside each query.
    gated = packed[0].outputs == 2 * heads * width and width == spec.value_dim
    if not gated and packed[0].outputs != heads * width:
        return None
    sizes = [layer.outputs for layer in packed]
    layers = [getattr(module, name) for name in PROJECTIONS]
    projection, rotate = calls.linear(packed), calls.kernels.rotate
    norms: list[nn.Module | None] = [getattr(module, name, None) for name in HEAD_NORMS]
    on_cpu = model.device.type == "cpu"
    if gated and not on_cpu:
        return None

    def normalised(norm: nn.Module | None, rows: Tensor, count: int) -> Tensor:
        if norm is None:
            return rows
        by_head: Tensor = norm(rows.reshape(-1, count, width))
        return by_head.view(-1, count * width)

    def attended(
        rows: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: Any,
        attention_backend: AttentionBackend[Any],
        attention_batch: Any,
        kv_cache: Any,
        **others: Any,
    ) -> Tensor:
        cos, sin = (part[0].contiguous() for part in position_embeddings)
        if cos.shape[1] != width and (cos.shape[1] % 32 or not on_cpu):
            raise ValueError(f"{cos.shape[1]} of {width} numbers rotate")
        apart = {"apart": width} if cos.shape[1] != width else {}
        together = None
        if projection is None or not calls.together:
            queries, keys, values = (layer(rows) for layer in layers)
        else:
            together = projection(rows)
            queries, keys, values = together.split_with_sizes(sizes, 1)
        if norms == [None, None] and together is not None and not gated:
            rotate(together, heads + kv_heads, cos, sin, **apart)
        else:
            if gated:
                queries, gates = queries.reshape(-1, heads, 2, width).unbind(2)
                queries = queries.reshape(-1, heads * width)
            queries = normalised(norms[0], queries, heads)
            keys = normalised(norms[1], keys, kv_heads)
            rotate(queries, heads, cos, sin, **apart)
            rotate(keys, kv_heads, cos, sin, **apart)
        qkv = QKV(
            queries.unflatten(1, (heads, width)),
            keys.unflatten(1, (kv_heads, width)),
            values.unflatten(1, (kv_heads, spec.value_dim)),
        )
        output = attention_backend.forward(attention_batch, kv_cache, index, qkv, options)
        output = output.flatten(1)
        if gated:
            flat = gates.reshape(-1, heads * width).contiguous()
            output = calls.kernels.gate(flat, output.contiguous(), LinearKind.GATED_SIGMOID)
        return output

    return attended


@dataclass(frozen=True, eq=False)
class DecoderForward:
    """x += attention(norm(x)), then x += mlp(norm(x))."""

    first: RMSNorm
    second: RMSNorm
    mixer: Any
    mlp: Any
    attended: Forward
    gated: Forward
    after_attention: Forward
    after_mlp: Forward

    def __call__(self, hidden_states: Tensor, *, position_embeddings: Any, **kwargs: Any) -> Tensor:
        rows = _rows(hidden_states)
        attended = self.attended(self.first(rows), position_embeddings, **kwargs)
        rows = self.after_attention(attended, rows)
        output: Tensor = self.after_mlp(self.gated(self.second(rows)), rows)
        return output.view(hidden_states.shape)


def _decoder_layer(
    module: nn.Module, model: LoadedModel, cache: KVCache, calls: Calls
) -> list[Forward]:
    """The common decoder layer."""
    parts: dict[str, Any] = dict(module.named_children())
    norms = [_norm(parts[name], calls) for name in _LAYER_NORMS if name in parts]
    mixer, mlp = parts.get("self_attn", parts.get("linear_attn")), parts.get("mlp")
    if len(parts) != 4 or len(norms) != 2 or mixer is None or mlp is None:
        return []
    if "self_attn" in parts:
        attended = _attended(mixer, model, calls)
    elif model.mixers is not None and calls.kernels is cpu:
        from .mixers import mixer_pass

        attended = mixer_pass(mixer, model, cache, calls)
    else:
        attended = None
    gated = _gated(mlp, calls)
    if attended is None or gated is None:
        return []
    ends = _added(last_of(mixer), calls), _added(mlp.down_proj, calls)
    return [
        DecoderForward(first, second, mixer, mlp, attended, gated, *ends)
        for first, second in zip(*norms, strict=True)
    ]


def last_of(mixer: Any) -> Any:
    """Return the output layer of an attention module or another mixer."""
    return mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj


def _added(layer: nn.Module, calls: Calls) -> Callable[[Tensor, Tensor], Tensor]:
    """layer(rows) + residual."""
    method = method_of(layer)
    packed = None if method is None else method.pack()
    fast = None if packed is None else calls.linear([packed])

    def added(rows: Tensor, residual: Tensor) -> Tensor:
        if calls.together and fast:
            return fast(rows, residual)
        return residual.add(layer(rows))

    return added
