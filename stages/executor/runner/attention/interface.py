"""Our attention in Transformers' models, registered as `IMPLEMENTATION`, and a probe of layers.

A step's tokens come flattened to `[1, tokens]`. The back end, the prepared step and the `KVCache`
are keyword arguments of the model's forward call, which Transformers passes to the attention of
every layer; nothing is global.

Configs spell the same fact in many ways (`head_dim`, `num_kv_heads`, `layer_types`, one window for
all layers or one per layer). So at load the model runs once over two tokens with an attention
function that only records every layer's shapes, window and mask. What our attention would not
honour is refused there, before any request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .....config import ModelError
from ..attention_options import AttentionOptions
from ..kv_cache import KVCache
from ..loaded_model import LayerSpec
from .backend import QKV, AttentionBackend
from .latent import PREFIX, latent_of

_CALL = ("scaling", "sliding_window", "softcap", "s_aux")
"""Transformers' names of the fields of AttentionOptions."""

PROBING = f"{PREFIX}probe"
"""The `attn_implementation` of the probe, whose forward call takes a `layer_probe`."""


class MaskProbe(msgspec.Struct, frozen=True):
    """The rule of a mask, which our mask interface returns in place of the mask.

    `mask_function(batch, head, query position, key position)` is Transformers' own, elementwise on
    index tensors, true where the query may attend to the key.
    """

    mask_function: Any

    def agrees(self, window: int | None, max_position: int) -> bool:
        """Return whether the rule is causal within `window`, at edges and random positions."""
        last = max(max_position - 1, 1)
        generator = torch.Generator().manual_seed(0)
        query = torch.randint(0, last + 1, (512,), generator=generator)
        anywhere = torch.randint(0, last + 1, (512,), generator=generator)
        span = window or last + 1
        offsets = (0, 1, -1, span - 1, span, span + 1, last)
        keys = torch.cat([anywhere, *((query - offset).clamp(0, last) for offset in offsets)])
        queries = query.repeat(1 + len(offsets))
        zero = torch.zeros((), dtype=torch.long)
        allowed = self.mask_function(zero, zero, queries, keys)
        return bool(torch.equal(allowed, (keys <= queries) & (keys > queries - span)))


def probe_mask(*, mask_function: Any, **_: Any) -> MaskProbe:
    """Return the rule of the mask that the model wants, for the probe to check."""
    return MaskProbe(mask_function)


def probe_layer(*args: Any, layer_probe: LayerProbe, **kwargs: Any) -> tuple[Tensor, None]:
    """Take the arguments of `paged_attention`, and compute nothing.

    Raises:
        ModelError: As `LayerProbe.record`.
    """
    return layer_probe.record(*args, **kwargs), None


class LayerProbe:
    """Collects the layers and their options, by number, in the probing pass."""

    def __init__(self, architecture: str, max_position: int) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.options: dict[int, AttentionOptions] = {}
        self._architecture = architecture
        self._max_position = max_position

    def record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **call: Any
    ) -> Tensor:
        """Record one layer's call; return an output of its shape, `[1, tokens, heads, dim]`.

        Raises:
            ModelError: The layer needs something that our attention does not do.
        """
        options = _options_of(query, call)
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            self._refuse("its attention layers don't have a KV cache of their own each")
        if query.shape[1] % key.shape[1]:
            self._refuse("its query heads don't divide evenly among its KV heads")
        if call.get("position_bias") is not None or call.get("is_causal") is False:
            self._refuse(f"layer {index} uses a position bias or looks ahead")
        if not isinstance(mask, MaskProbe) or not mask.agrees(options.window, self._max_position):
            self._refuse(f"the mask of layer {index} is neither causal nor a sliding window")
        self.options[index] = options
        self.layers[index] = LayerSpec(
            key.shape[1],
            key.shape[-1],
            value.shape[-1],
            options.window,
            is_latent=latent_of(module) is not None,
        )
        return _empty_output(module, query, value)

    def finish(self, layers: range) -> tuple[LayerSpec, ...]:
        """Return these layers in order.

        Raises:
            ModelError: Some layer did not call our attention.
        """
        missing = sorted(set(layers) ^ self.layers.keys())
        if missing:
            names = ", ".join(map(str, missing[:8]))
            self._refuse(
                f"layers {names} don't go through Transformers' attention interface "
                "(state-space, linear-attention or hybrid layers are not supported)"
            )
        return tuple(self.layers[index] for index in layers)

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self._architecture} can't be served: {why}; choose another model")


class ImageProbe(LayerProbe):
    """Checks, in a pass over text and images, that the tokens of an image see all of that image."""

    def __init__(self, architecture: str, kinds: Tensor) -> None:
        """`kinds`: `[tokens]`, 1 for an image's token, 0 for text between images."""
        super().__init__(architecture, len(kinds))
        places = torch.arange(len(kinds))
        following = torch.where(kinds == 0, places, len(kinds))
        # The last token before the next one of text, of which there is one at the end.
        ends = following.flip(0).cummin(0).values.flip(0) - 1
        self._reach = torch.where(kinds == 1, ends, places)

    def record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **call: Any
    ) -> Tensor:
        window = _options_of(query, call).window or len(self._reach)
        places = torch.arange(len(self._reach))
        seen = (places <= self._reach[:, None]) & (places > places[:, None] - window)
        zero = torch.zeros((), dtype=torch.long)
        if not isinstance(mask, MaskProbe) or not torch.equal(
            mask.mask_function(zero, zero, places[:, None], places).cpu(), seen
        ):
            self._refuse("tokens of images see others than those before them and their own image")
        return _empty_output(module, query, value)


def _empty_output(module: nn.Module, query: Tensor, value: Tensor) -> Tensor:
    latent = latent_of(module)
    width = value.shape[-1] if latent is None else latent.value_dim
    return query.new_zeros(1, query.shape[2], query.shape[1], width)


IMPLEMENTATION = f"{PREFIX}paged"
"""The name for `attn_implementation`."""


def register_attention() -> None:
    """Register our attention and the probe with Transformers; idempotent.

    Without a mask of the same name a model would silently use none. Steps pass a placeholder, which
    Transformers uses as it is.
    """
    for name, function in ((IMPLEMENTATION, paged_attention), (PROBING, probe_layer)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, probe_mask)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    attention_backend: AttentionBackend[Any] | None = None,
    attention_batch: Any = None,
    kv_cache: KVCache | None = None,
    **call: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer for the whole batch.

    Args:
        module: The attention layer; `layer_idx` is its index in the model.
        query: `[1, heads, tokens, key_dim]`.
        key: `[1, kv_heads, tokens, key_dim]`, rotated.
        value: `[1, kv_heads, tokens, value_dim]`; of a latent layer, a part of the key.
        attention_mask: Ignored; the batch has the rule.
        attention_backend: Computes it.
        attention_batch: The step, prepared by the back end.
        kv_cache: The KVCache.
        call: The options, and settings for other implementations.

    Returns:
        `[1, tokens, heads, value_dim]`, and None for the weights.

    Raises:
        ModelError: The model was called without a back end, or does not pass it on.
    """
    if attention_backend is None or kv_cache is None:
        raise ModelError(
            f"{type(module).__name__} did not get attention_backend and kv_cache: the model does "
            "not hand keyword arguments down to its attention, or was called past model_forward()"
        )
    options = _options_of(query, call)
    states = query, key, value
    return attend(module, states, options, attention_backend, attention_batch, kv_cache), None


def attend(
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    backend: AttentionBackend[Any],
    batch: Any,
    cache: KVCache,
) -> Tensor:
    """Attention of one layer, `[1, tokens, heads, value_dim]`; arguments as of `paged_attention`.

    Of a latent layer, queries are brought to the latent, and the output from it.
    """
    layer: int = module.layer_idx - cache.first_layer  # type: ignore[operator, assignment]
    queries, keys, values = (each[0].transpose(0, 1) for each in states)
    latent = latent_of(module)
    if latent is None:
        return backend.forward(batch, cache, layer, QKV(queries, keys, values), options)[None]
    queries = latent.absorb(queries, backend.multiply_heads)
    attended = backend.forward(batch, cache, layer, QKV(queries, keys, values), options)
    return latent.project(attended, backend.multiply_heads)[None]


def _options_of(query: Tensor, call: Mapping[str, Any]) -> AttentionOptions:
    """Return the options of a call by Transformers; the scale is 1/sqrt(key_dim) if not given."""
    scale, window, softcap, sinks = map(call.get, _CALL)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return AttentionOptions(scale, window, softcap, sinks)
