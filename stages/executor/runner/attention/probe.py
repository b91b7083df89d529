"""Finds out what each layer of a model needs, by asking the model and not its config.

Configs spell the same fact in many ways (`head_dim`, `num_kv_heads`, `layer_types`, one window for
all layers or one per layer). So the model runs once over two tokens with an attention function that
only looks: it notes the shapes of every layer's keys and values, its window, and the mask that the
model wants there. What our attention would not honour is refused here, before any request comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .....config import ModelError
from ..loaded_model import AttentionOptions, LayerSpec

_CALL = ("scaling", "sliding_window", "softcap", "s_aux")
"""What models call the fields of AttentionOptions."""

PROBING = "nano_probe"
"""The name for `attn_implementation` in that pass, whose forward call takes a `layer_probe`."""


@dataclass(frozen=True, slots=True)
class MaskProbe:
    """What our mask interface gives the model in place of a mask: the rule the mask would follow.

    `mask_function(batch, head, query position, key position)` is Transformers' own, elementwise on
    index tensors, true where the query may see the key.
    """

    mask_function: Any

    def agrees(self, window: int | None, max_position: int) -> bool:
        """Whether the rule is causal within `window`, at edges and at random pairs of positions."""
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
    """Gives the model the rule of the mask it wants, for the probe to check."""
    return MaskProbe(mask_function)


def probe_layer(*args: Any, layer_probe: LayerProbe, **kwargs: Any) -> tuple[Tensor, None]:
    """Takes what `interface.paged_attention` takes, and computes nothing.

    Raises:
        ModelError: As `LayerProbe.record`.
    """
    return layer_probe.record(*args, **kwargs), None


class LayerProbe:
    """Collects the layers in the probing pass.

    Attributes:
        layers: By number.
        options: By number.
    """

    def __init__(self, architecture: str, max_position: int) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.options: dict[int, AttentionOptions] = {}
        self._architecture = architecture
        self._max_position = max_position

    def record(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **call: Any
    ) -> Tensor:
        """Notes one layer's call; returns an output of the right shape, `[1, tokens, heads, dim]`.

        Raises:
            ModelError: The layer asks for something that our attention does not do.
        """
        scale, window, softcap, sinks = map(call.get, _CALL)
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            self._refuse("its attention layers don't have a KV cache of their own each")
        if query.shape[1] % key.shape[1]:
            self._refuse("its query heads don't divide evenly among its KV heads")
        if call.get("position_bias") is not None or call.get("is_causal") is False:
            self._refuse(f"layer {index} uses a position bias or looks ahead")
        if not isinstance(mask, MaskProbe) or not mask.agrees(window, self._max_position):
            self._refuse(f"the mask of layer {index} is neither causal nor a sliding window")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.options[index] = AttentionOptions(scale, window, softcap, sinks)
        self.layers[index] = LayerSpec(key.shape[1], key.shape[-1], value.shape[-1], window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def finish(self, num_layers: int) -> tuple[LayerSpec, ...]:
        """The layers in order.

        Raises:
            ModelError: Some layer did not come through our attention.
        """
        missing = sorted(set(range(num_layers)) ^ self.layers.keys())
        if missing:
            names = ", ".join(map(str, missing[:8]))
            self._refuse(
                f"layers {names} don't go through Transformers' attention interface "
                "(state-space, linear-attention or hybrid layers are not supported)"
            )
        return tuple(self.layers[index] for index in range(num_layers))

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self._architecture} can't be served: {why}; choose another model")
