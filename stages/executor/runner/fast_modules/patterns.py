"""Patterns: modules matched by their parts, and the kernel passes offered for them.

An offer may be wrong; `modules` compares it with the module.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ..attention.backend import QKV, AttentionBackend
from ..attention.paged import PagedBatch
from ..fixed_tiles import VECTOR, FixedTiles, fills_vectors
from ..kernels import cpu
from ..kernels.cpu import Linear, LinearKind, LinearSum, PagedAttention, RMSNorm
from ..kv_cache import KVCache
from ..linear.choose import method_of
from ..linear.method import LinearMethod
from ..loaded_model import LoadedModel
from ..ranks.passing import PassingLayer
from .calls import GATED, PROJECTIONS, Calls, kind_of, pack
from .decoder import DecoderLayers, LayerParts

Forward = Callable[..., Any]

_KEPT_POSITIONS = 1024
"""Whose rotary factors are kept at first."""

_DECODER_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("q_norm", "k_norm")


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
    norms: list[nn.Module | None] = [getattr(module, name, None) for name in _HEAD_NORMS]
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
class _DecoderForward:
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
    ends = _added(_last_of(mixer), calls), _added(mlp.down_proj, calls)
    return [
        _DecoderForward(first, second, mixer, mlp, attended, gated, *ends)
        for first, second in zip(*norms, strict=True)
    ]


def _last_of(mixer: Any) -> Any:
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


def join_layers(
    model: LoadedModel, cache: KVCache, agreed: Mapping[nn.Module, Forward], calls: Calls
) -> Iterator[tuple[nn.Module, list[Forward]]]:
    """Iterate over decoders with a pass of all layers in one call, for steps of one token per row.

    Args:
        model: The model.
        cache: The cache for the passes.
        agreed: The correct offers; a decoder needs one for each layer.
        calls: The options of the passes.
    """
    for module, parts, layers in _decoders(model):
        decoder_layers = [_layer_parts(agreed.get(layer), model, cache, agreed) for layer in layers]
        known = [layer for layer in decoder_layers if layer is not None]
        if known and len(known) == len(decoder_layers):
            try:
                rotated = _rotated(parts["rotary_emb"], model)
            except TypeError:
                continue  # it depends on the layer
            together = DecoderLayers(known, rotated, watches=model.is_shared, mixers=model.mixers)
            cache.follow(together.find_weights)
            own = parts["rotary_emb"], together.whole_width, calls.tiles
            factors = RotaryFactors(*own, model.max_model_len)
            yield module, [JoinedDecoder(together, module.forward, calls, parts, factors)]


def follow_layers(
    model: LoadedModel, agreed: Mapping[nn.Module, Forward], calls: Calls
) -> Iterator[tuple[nn.Module, list[Forward]]]:
    """Iterate over decoders of a rank's shard with a pass through our passes of its layers, between
    which ranks exchange sums.

    Args:
        model: The shard.
        agreed: The correct offers; a decoder needs one for each layer.
        calls: The options of the passes.
    """
    for module, parts, layers in _decoders(model):
        passes = [agreed.get(layer) for layer in layers]
        if passes and all(isinstance(each, _DecoderForward) for each in passes):
            yield module, [_followed(passes, parts, model.layers[0].key_dim, calls)]


def _decoders(
    model: LoadedModel,
) -> Iterator[tuple[nn.Module, Mapping[str, nn.Module], list[nn.Module]]]:
    """Iterate over decoders, with their parts, and their layers without those of other pipeline
    stages."""
    for module in model.module.modules():
        parts = dict(module.named_children())
        if sorted(parts) == sorted(_DECODER_PARTS):
            layers = parts["layers"].children()
            yield module, parts, [each for each in layers if not isinstance(each, PassingLayer)]


def _followed(
    passes: Sequence[Any], parts: Mapping[str, nn.Module], key_width: int, calls: Calls
) -> Forward:
    """Return a decoder's pass, layer by layer, with bits that don't depend on the batch."""
    embed_tokens, norm, rotary = parts["embed_tokens"], parts["norm"], parts["rotary_emb"]

    def forward(
        *,
        position_ids: Tensor,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        hidden: Any = inputs_embeds if input_ids is None else embed_tokens(input_ids)
        factors = _factors(rotary, hidden, position_ids, key_width, calls.tiles)
        inputs["position_embeddings"] = [part[None] for part in factors]
        for layer in passes:
            hidden = layer(hidden, **inputs)
        return BaseModelOutputWithPast(last_hidden_state=norm(hidden))

    return forward


def join_output(
    model: LoadedModel, joined: Mapping[nn.Module, Forward]
) -> Iterator[tuple[nn.Module, list[Forward]]]:
    """Offer a pass for the model itself, if it is such a decoder and an output layer: only tokens
    with logits go through the last norm.

    Args:
        model: The model.
        joined: The correct passes of `join_layers`.
    """
    module, decoder = model.module, joined.get(model.base)
    output = module.get_output_embeddings() if model.generates else None  # type: ignore[operator]
    children = list(module.children())
    if not isinstance(decoder, JoinedDecoder) or output is None:
        return
    if len(children) == 2 and {*children} == {model.base, output}:
        yield module, [_with_output(decoder, model.base, output, module.forward)]


def _with_output(
    decoder: JoinedDecoder, base: nn.Module, output: nn.Module, plain: Forward
) -> Forward:
    def forward(
        *, attention_batch: PagedBatch, logits_to_keep: Tensor, **inputs: Any
    ) -> CausalLMOutputWithPast:
        # Hooks on the decoder expect all of its tokens.
        if base._forward_hooks or not decoder.handles(attention_batch):
            result: CausalLMOutputWithPast = plain(
                attention_batch=attention_batch, logits_to_keep=logits_to_keep, **inputs
            )
            return result
        states = decoder.layers_of(attention_batch=attention_batch, **inputs)
        kept = states.index_select(1, logits_to_keep)
        return _only_logits(output(decoder.parts["norm"](kept)))

    return forward


def _only_logits(logits: Tensor) -> CausalLMOutputWithPast:
    """Return what the class makes of these logits, without its checks of all fields, which take a
    tenth of a millisecond in each step."""
    output = CausalLMOutputWithPast.__new__(CausalLMOutputWithPast)
    OrderedDict.__setitem__(output, "logits", logits)
    output.__dict__["logits"] = logits
    return output


@dataclass(frozen=True, eq=False)
class JoinedDecoder:
    """A decoder's forward pass, with all layers in one call where possible."""

    together: DecoderLayers
    plain: Forward
    calls: Calls
    parts: Mapping[str, nn.Module]
    factors: RotaryFactors

    def __call__(self, *, attention_batch: PagedBatch, **inputs: Any) -> Any:
        if not self.handles(attention_batch):
            return self.plain(attention_batch=attention_batch, **inputs)
        states = self.layers_of(attention_batch=attention_batch, **inputs)
        return BaseModelOutputWithPast(last_hidden_state=self.parts["norm"](states))

    def handles(self, batch: PagedBatch) -> bool:
        """Return whether a step can run in one call."""
        return self.calls.together and self.together.handles(batch)

    def layers_of(
        self,
        *,
        position_ids: Tensor,
        attention_batch: PagedBatch,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the output of the last layer, `[1, tokens, hidden]`."""
        # A copy, since it is overwritten.
        embed = self.parts["embed_tokens"]
        hidden: Tensor = embed(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        cos, sin, positions = self.factors.of(hidden, position_ids)
        self.together(hidden[0], cos, sin, attention_batch, positions)
        return hidden


class RotaryFactors:
    """Rotary factors by position, kept as far as they have been needed: computing them takes a
    dozen of torch's functions."""

    def __init__(self, rotary: nn.Module, width: int, tiles: FixedTiles, most: int) -> None:
        """For fewer than `most` positions; `width` as in `_factors`."""
        self._rotary, self._width, self._tiles, self._most = rotary, width, tiles, most
        self._kept: list[Tensor] = []

    def of(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return both factors, by position, and the tokens' positions; or of each token, and None.

        Args:
            hidden: Of the dtype of the factors.
            position_ids: As in `StepInputs`. Those of time, height and width are not kept.
        """
        if position_ids.dim() > 2:
            cos, sin = _factors(self._rotary, hidden, position_ids, self._width, self._tiles)
            return cos, sin, None
        last = int(position_ids.max())
        if not self._kept or last >= len(self._kept[0]):
            kept = _KEPT_POSITIONS << (last // _KEPT_POSITIONS).bit_length()
            every = torch.arange(min(kept, self._most))[None]
            self._kept = _factors(self._rotary, hidden, every, self._width, self._tiles)
        cos, sin = self._kept
        return cos, sin, position_ids


def _factors(
    rotary: nn.Module, hidden: Tensor, position_ids: Tensor, width: int, tiles: FixedTiles
) -> list[Tensor]:
    """Return the rotary factors, `[tokens, width]` each, with bits independent of the batch.

    `width`: 0 for one that is not a head's.
    """
    count = position_ids.shape[-1]
    missing = -count % (VECTOR // math.gcd(VECTOR, width))
    if missing:
        position_ids = F.pad(position_ids, (0, missing))
    # The tiles cost more than the computation in them.
    with nullcontext() if width and fills_vectors((count + missing) * width) else tiles:
        return [part[0, :count].contiguous() for part in rotary(hidden, position_ids)]


def _rotated(rotary: nn.Module, model: LoadedModel) -> int:
    """Return the numbers of a head that rotate."""
    rows = torch.zeros(1, 1, 1, dtype=model.dtypes.activations)
    width: int = rotary(rows, torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1]
    return width


def _layer_parts(
    layer: Forward | None, model: LoadedModel, cache: KVCache, agreed: Mapping[nn.Module, Forward]
) -> LayerParts | None:
    """Return the parts of a layer whose offer by `_decoder_layer` was correct."""
    if not isinstance(layer, _DecoderForward):
        return None
    mixer, mlp = layer.mixer, layer.mlp
    sums = {}
    for role, last in (("output", _last_of(mixer)), ("down", mlp.down_proj)):
        method = method_of(last)
        packed = None if method is None else method.pack_sum()
        if packed is None:
            return None
        sums[role] = LinearSum(packed)
    kind = kind_of(mlp.act_fn)
    assert kind is not None
    norms = {"first": layer.first, "second": layer.second}
    gated = Linear(pack(mlp, GATED), kind)
    if not hasattr(mixer, PROJECTIONS[0]):
        mixing: Any = layer.attended
        linears = {"projection": Linear(mixing.packed), "gated": gated}
        return LayerParts(norms, linears, sums, mixer=mixing.kernel)
    for role, name in zip(("queries", "keys"), _HEAD_NORMS, strict=True):
        module = getattr(mixer, name, None)
        if module is not None:
            norm = agreed.get(module)
            if not isinstance(norm, RMSNorm):
                return None
            norms[role] = norm
    projections = pack(mixer, PROJECTIONS)
    index = model.index_of[mixer.layer_idx]
    spec = model.layers[index]
    heads = sums["output"].inputs // spec.value_dim
    paged = cache.paged_layer(index, PagedAttention, heads, model.attention_options[index])
    assert isinstance(paged, PagedAttention)
    linears = {"projection": Linear(projections), "gated": gated}
    gates = projections[0].outputs > heads * spec.key_dim
    return LayerParts(norms, linears, sums, paged, spec.key_dim, gates)
