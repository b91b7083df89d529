"""The place of a layer that another pipeline stage computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class PassingLayer(nn.Module):
    """Stands for a layer of another stage, and records its call."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        if (kind := getattr(layer, "attention_type", None)) is not None:
            # Models choose a layer's mask by it.
            self.attention_type = kind

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states
