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

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .....config import ModelError
from ..attention_options import AttentionOptions, Span
from ..kv_cache import KVCache
from ..loaded_model import LayerSpec
from ..media import LookAhead
from .backend import PREFIX, QKV, AttentionBackend
from .carried import KeywordsLost

if TYPE_CHECKING:
    from .indexers import IndexedStep
    from .latent import LatentAttention

_CALL = ("scaling", "sliding_window", "softcap", "s_aux")
"""Transformers' names of the fields of AttentionOptions."""

_IGNORED = frozenset(
    (
        *("cache_position", "deterministic", "dropout", "logits_to_keep", "position_ids"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "use_cache"),
    )
)
"""Other names that change no number, or have been applied before attention is called."""

PROBING = f"{PREFIX}probe"
"""The `attn_implementation` of the probe, whose forward call takes a `layer_probe`."""


class MaskUsedError(AttributeError):
    """A layer computes with its mask, so that its tokens may see others than the mask says."""

    def __init__(self) -> None:
        super().__init__("its layers compute with their masks, so a mask doesn't say what they see")


class MaskProbe(msgspec.Struct, frozen=True):
    """The rule of a mask, which our mask interface returns in place of the mask.

    `mask_function(batch, head, query position, key position)` is Transformers' own, elementwise on
    index tensors, true where the query may attend to the key.
    `local_size` is the length of its window or chunk, if it has one.
    """

    mask_function: Any
    local_size: int | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise MaskUsedError

    def __getitem__(self, index: object) -> NoReturn:
        raise MaskUsedError

    def agrees(self, span: Span, max_position: int) -> bool:
        """Return whether the rule is causal within `span`, at edges and random positions."""
        last = max(max_position - 1, 1)
        generator = torch.Generator().manual_seed(0)
        query = torch.randint(0, last + 1, (512,), generator=generator)
        anywhere = torch.randint(0, last + 1, (512,), generator=generator)
        size = span.window or span.chunk or last + 1
        offsets = (0, 1, -1, size - 1, size, size + 1, last)
        keys = torch.cat([anywhere, *((query - offset).clamp(0, last) for offset in offsets)])
        queries = query.repeat(1 + len(offsets))
        zero = torch.zeros((), dtype=torch.long)
        allowed = self.mask_function(zero, zero, queries, keys)
        return bool(torch.equal(allowed, (keys <= queries) & (keys >= span.first(queries))))


class IndexerMask(MaskProbe, frozen=True):
    """The rule of a mask that an indexer gets without its dimension of heads."""

    def __getitem__(self, index: object) -> IndexerMask:  # type: ignore[override]
        return self


def probe_mask(
    *, mask_function: Any, local_size: int | None = None, config: Any = None, **_: Any
) -> MaskProbe:
    """Return the rule of the mask that the model wants, for the probe to check."""
    kind = MaskProbe if getattr(config, "index_topk", None) is None else IndexerMask
    return kind(mask_function, local_size)


def probe_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    layer_probe: LayerProbe | None = None,
    **call: Any,
) -> tuple[Tensor, None]:
    """Take the arguments of `paged_attention`, and compute nothing.

    Raises:
        ModelError: As `LayerProbe.record`.
        KeywordsLost: The layer drops keyword arguments.
    """
    if layer_probe is None:
        raise KeywordsLost(type(module))
    return layer_probe.record(module, query, key, value, attention_mask, **call), None


class LayerProbe:
    """Collects the layers and their options, by number, in the probing pass."""

    def __init__(self, architecture: str, max_position: int, *, indexed: bool = False) -> None:
        self._indexed = indexed
        self.layers: dict[int, LayerSpec] = {}
        self.options: dict[int, AttentionOptions] = {}
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}
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
        if options.window is None and isinstance(mask, MaskProbe):
            # Layers pass their window to the attention function, but not the size of their chunks.
            in_chunks = options._replace(chunk=mask.local_size)
            if mask.agrees(in_chunks.span, self._max_position):
                options = in_chunks
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            self._refuse("its attention layers don't have a KV cache of their own each")
        if query.shape[1] % key.shape[1]:
            self._refuse("its query heads don't divide evenly among its KV heads")
        if call.get("is_causal") is False:
            self._refuse(f"layer {index} looks ahead")
        known = _IGNORED.union(
            _CALL, ("is_causal",), ("indices", "block_indices") if self._indexed else ()
        )
        if getattr(module, "indexer", None) is not None and options.span != Span():
            self._refuse(f"layer {index} chooses tokens within a window")
        if unknown := [name for name in call.keys() - known if call[name] is not None]:
            self._refuse(
                f"layer {index} computes attention by `{min(unknown)}`, which is not known here"
            )
        try:
            agrees = isinstance(mask, MaskProbe) and mask.agrees(options.span, self._max_position)
        except IndexError:
            self._refuse("its masks are of the call's tokens, such as those of one image")
        if not agrees:
            self._refuse(
                f"the mask of layer {index} is neither causal, nor a sliding window, nor in chunks"
            )
        self.options[index] = options
        # A layer without keys and values of its own gets the tensors of the one that made them.
        owners = (each for each, (k, v) in self._kv.items() if k is key and v is value)
        source = next(owners, None)
        self._kv[index] = (key, value)
        shape = key.shape[1], key.shape[-1], value.shape[-1]
        is_latent = latent_of(module) is not None
        self.layers[index] = LayerSpec(*shape, *options.span, source, is_latent)
        return _empty_output(module, query, value)

    def finish(self, layers: range, *, others: bool) -> tuple[int, ...]:
        """Return the numbers of the attention layers, in order.

        Args:
            layers: The numbers that layers have.
            others: Whether layers may mix tokens in another way, or not at all.

        Raises:
            ModelError: Some layer did not call our attention.
        """
        missing = sorted(set(layers) ^ self.layers.keys())
        if missing and not (others and self.layers.keys() <= set(layers)):
            names = ", ".join(map(str, missing[:8]))
            self._refuse(
                f"layers {names} don't go through Transformers' attention interface, nor mix "
                "tokens by an operator that is known here"
            )
        return tuple(sorted(self.layers))

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self._architecture} can't be served: {why}; choose another model")


class ImageProbe(LayerProbe):
    """Finds, in a pass over text and images, the layers in which the tokens of an image see all of
    that image."""

    def __init__(self, architecture: str, kinds: Tensor) -> None:
        """`kinds`: `[tokens]`, 1 for an image's token, 0 for text between images."""
        super().__init__(architecture, len(kinds))
        places = torch.arange(len(kinds))
        following = torch.where(kinds == 0, places, len(kinds))
        # The last token before the next one of text, of which there is one at the end.
        ends = following.flip(0).cummin(0).values.flip(0) - 1
        self._reaches = places, torch.where(kinds == 1, ends, places)
        self._found: dict[bool, set[bool]] = {False: set(), True: set()}

    def record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **call: Any
    ) -> Tensor:
        window = _options_of(query, call).window
        places, _ = self._reaches
        low = places[:, None] - (window or len(places))
        zero = torch.zeros((), dtype=torch.long)
        fits = [False, False]
        if isinstance(mask, MaskProbe):
            seen = mask.mask_function(zero, zero, places[:, None], places).cpu()
            fits = [
                torch.equal((places <= reach[:, None]) & (places > low), seen)
                for reach in self._reaches
            ]
        if not any(fits):
            self._refuse("tokens of images see others than those before them and their own image")
        self._found[window is not None].add(fits[1])
        return _empty_output(module, query, value)

    def look_ahead(self) -> LookAhead:
        """Return the layers in which an image's tokens see all of it.

        Raises:
            ModelError: They are neither all layers, nor those with a sliding window.
        """
        full, windows = self._found[False], self._found[True]
        if full | windows <= {False}:
            return "nowhere"
        if full | windows == {True}:
            return "everywhere"
        if full == {False} and windows == {True}:
            return "windows"
        self._refuse("tokens of images see all of their image in some layers only")


def latent_of(module: nn.Module) -> LatentAttention | None:
    """Return what keeps the latent of an attention module; None if it has keys and values."""
    found: LatentAttention | None = vars(module).get("expand_kv")
    return found


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
    indexed_step: IndexedStep | None = None,
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
        indexed_step: The step, of a model whose indexers choose the tokens that a query sees.
        call: The options, and settings for other implementations.

    Returns:
        `[1, tokens, heads, value_dim]`, and None for the weights.

    Raises:
        ModelError: The model was called without a back end, or does not pass it on.
    """
    if attention_backend is None or kv_cache is None:
        raise ModelError(
            f"{type(module).__name__} did not get attention_backend and kv_cache: the model does "
            "not hand keyword arguments down to its attention, or was called past model_forward()",
            remedy="choose another model",
        )
    layer = kv_cache.index_of[module.layer_idx]  # type: ignore[index]
    options = _options_of(query, call)._replace(chunk=kv_cache.specs[layer].chunk)
    chosen = None
    if indexed_step is not None:
        chosen = partial(indexed_step.attend_chosen, module, call, layer, options)
    states = query, key, value
    attended = attend(module, states, options, attention_backend, attention_batch, kv_cache, chosen)
    return attended, None


def attend(
    module: nn.Module,
    states: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    backend: AttentionBackend[Any],
    batch: Any,
    cache: KVCache,
    chosen: Callable[[QKV, Tensor], None] | None = None,
) -> Tensor:
    """Attention of one layer, `[1, tokens, heads, value_dim]`; arguments as of `paged_attention`.

    Of a latent layer, queries are brought to the latent, and the output from it. `chosen`
    overwrites the output of tokens that attend to chosen ones only.
    """
    layer = cache.index_of[module.layer_idx]  # type: ignore[index]
    queries, keys, values = (each[0].transpose(0, 1) for each in states)
    latent = latent_of(module)
    if latent is not None:
        queries = latent.absorb(queries, backend.multiply_heads)
    qkv = QKV(queries, keys, values)
    output = backend.forward(batch, cache, layer, qkv, options)
    if chosen is not None:
        chosen(qkv, output)
    if latent is not None:
        output = latent.project(output, backend.multiply_heads)
    return output[None]


def _options_of(query: Tensor, call: Mapping[str, Any]) -> AttentionOptions:
    """Return the options of a call by Transformers; the scale is 1/sqrt(key_dim) if not given."""
    scale, window, softcap, sinks = map(call.get, _CALL)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return AttentionOptions(scale, window, softcap, sinks)
