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

from ....config import ModelError


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer.

    Attributes:
        num_kv_heads: Heads of the keys and values.
        key_dim: Width of one key head.
        value_dim: Width of one value head.
        window: A query sees itself and the `window - 1` tokens before it; None sees all.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


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


class LayerProbe:
    """Stands in for the attention batch during the probing pass, and collects the layers.

    Attributes:
        layers: By number.
        options: By number, what each passes to `attend` besides tensors of tokens.
    """

    def __init__(self, architecture: str, max_position: int) -> None:
        self.layers: dict[int, LayerSpec] = {}
        self.options: dict[int, dict[str, Any]] = {}
        self._architecture = architecture
        self._max_position = max_position

    def record(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        options: dict[str, Any],
        others: dict[str, Any],
    ) -> Tensor:
        """Notes one layer's call; returns an output of the right shape, `[1, tokens, heads, dim]`.

        Raises:
            ModelError: The layer asks for something that our attention does not do.
        """
        window: int | None = options["window"]
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            self._refuse("its attention layers don't have a KV cache of their own each")
        if query.shape[1] % key.shape[1]:
            self._refuse("its query heads don't divide evenly among its KV heads")
        if others.get("position_bias") is not None or others.get("is_causal") is False:
            self._refuse(f"layer {index} uses a position bias or looks ahead")
        if not isinstance(mask, MaskProbe) or not mask.agrees(window, self._max_position):
            self._refuse(f"the mask of layer {index} is neither causal nor a sliding window")
        self.options[index] = options
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
