"""Our attention in Transformers' models, registered under the name `IMPLEMENTATION`.

A step's tokens come flattened to `[1, tokens]`. The back end, what it prepared and the `KVCache`
reach this function as keyword arguments of the model's forward call, which Transformers hands down
to the attention of every layer; nothing is global.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from .....config import ModelError
from ..kv_cache import KVCache
from ..loaded_model import AttentionOptions
from .backend import QKV, AttentionBackend
from .probe import PROBING, probe_layer, probe_mask

IMPLEMENTATION = "nano_paged"
"""The name for `attn_implementation`."""


def register_attention() -> None:
    """Makes it known to Transformers, and the probe too. Repeating it changes nothing.

    Without a mask of the same name a model would take none and say nothing. Steps pass a
    placeholder, which Transformers takes as it is.
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
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    attention_backend: AttentionBackend[Any] | None = None,
    attention_batch: Any = None,
    kv_cache: KVCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer for the whole batch.

    Args:
        module: The attention layer; `layer_idx` names its part of the cache.
        query: `[1, heads, tokens, key_dim]`.
        key: `[1, kv_heads, tokens, key_dim]`, rotated.
        value: `[1, kv_heads, tokens, value_dim]`.
        attention_mask: Ignored; the batch says what may be seen.
        scaling: Factor of the scores; 1/sqrt(key_dim) when None.
        sliding_window: The layer's window, None for full attention.
        softcap: As in AttentionOptions.
        s_aux: `[heads]`, its sinks.
        attention_backend: Computes it.
        attention_batch: The step, as the back end prepared it.
        kv_cache: The KVCache.
        others: Settings for other implementations.

    Returns:
        `[1, tokens, heads, value_dim]`, and None for the weights.

    Raises:
        ModelError: The model was called without a back end, or does not hand it down.
    """
    if attention_backend is None or kv_cache is None:
        raise ModelError(
            f"{type(module).__name__} did not get attention_backend and kv_cache: the model does "
            "not hand keyword arguments down to its attention, or was called past model_forward()"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    qkv = QKV(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    return attention_backend.forward(attention_batch, kv_cache, layer, qkv, options)[None], None
