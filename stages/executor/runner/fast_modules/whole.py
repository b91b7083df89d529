"""Passes of whole decoders on the CPU: all layers in one call, and the logits in another."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ..attention.paged import PagedBatch
from ..fixed_tiles import VECTOR, FixedTiles, fills_vectors
from ..kernels.cpu import Linear, LinearKind, LinearSum, PagedAttention, RMSNorm
from ..kv_cache import KVCache
from ..linear.choose import method_of
from ..loaded_model import LoadedModel
from ..ranks.passing import PassingLayer
from .calls import GATED, PROJECTIONS, Calls, kind_of, pack
from .decoder import DecoderLayers, LayerParts, NormedLinear
from .patterns import HEAD_NORMS, DecoderForward, Forward, last_of

_KEPT_POSITIONS = 1024
"""Whose rotary factors are kept at first."""

_DECODER_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


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
        if passes and all(isinstance(each, DecoderForward) for each in passes):
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
    model: LoadedModel, joined: Mapping[nn.Module, Forward], agreed: Mapping[nn.Module, Forward]
) -> Iterator[tuple[nn.Module, list[Forward]]]:
    """Offer a pass for the model itself, if it is such a decoder and an output layer: only tokens
    with logits go through the last norm.

    Args:
        model: The model.
        joined: The correct passes of `join_layers`.
        agreed: As of `join_layers`.
    """
    module, decoder = model.module, joined.get(model.base)
    output = module.get_output_embeddings() if model.generates else None  # type: ignore[operator]
    children = list(module.children())
    if not isinstance(decoder, JoinedDecoder) or output is None:
        return
    norm, method = agreed.get(decoder.parts["norm"]), method_of(output)
    packed = None if method is None else method.pack()
    if packed is None or output not in agreed or not isinstance(norm, RMSNorm):
        return
    if len(children) == 2 and {*children} == {model.base, output}:
        logits = NormedLinear(norm, Linear([packed], LinearKind.WIDE))
        yield module, [_with_output(decoder, model.base, output, logits, module.forward)]


def _with_output(
    decoder: JoinedDecoder,
    base: nn.Module,
    output: nn.Module,
    logits: NormedLinear,
    plain: Forward,
) -> Forward:
    def forward(
        *, attention_batch: PagedBatch, logits_to_keep: Tensor, **inputs: Any
    ) -> CausalLMOutputWithPast:
        # Hooks on the decoder expect all of its tokens.
        hooks = base._forward_hooks or output._forward_hooks
        if hooks or not decoder.handles(attention_batch):
            result: CausalLMOutputWithPast = plain(
                attention_batch=attention_batch, logits_to_keep=logits_to_keep, **inputs
            )
            return result
        states = decoder.layers_of(attention_batch=attention_batch, **inputs)
        return _only_logits(logits(states[0], logits_to_keep)[None])

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
    if not isinstance(layer, DecoderForward):
        return None
    mixer, mlp = layer.mixer, layer.mlp
    sums = {}
    for role, last in (("output", last_of(mixer)), ("down", mlp.down_proj)):
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
    for role, name in zip(("queries", "keys"), HEAD_NORMS, strict=True):
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
