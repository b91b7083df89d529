"""Positions for attention modules that count them from the length of a Transformers cache.

Llama 4 scales the queries of its layers without rotary positions by a function of the position, and
takes `arange(tokens) + past_key_values.get_seq_length()` for it. In a flattened step that is the
place in the batch. So these models get a cache that says, token by token, how many positions lie
before the step.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class StepLengths:
    """Stands for Transformers' cache in one step; keeps no keys and values."""

    def __init__(self, position_ids: Tensor) -> None:
        """`position_ids`: `[1, tokens]`."""
        places = torch.arange(position_ids.shape[1], device=position_ids.device)
        self._before = position_ids[0] - places

    def get_seq_length(self, _layer: int = 0) -> Tensor:
        """Return the positions before the step, less the tokens of other rows: `[tokens]`."""
        return self._before

    def update(
        self, keys: Tensor, values: Tensor, _layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of the step alone; our attention keeps them."""
        return keys, values


def provide_lengths(module: Any) -> None:
    """Have steps pass StepLengths to a model whose attention counts positions.

    Calls without our attention, such as a trainer's, stay as they are.
    """
    if any(map(_counts_positions, module.modules())):
        module.get_decoder().register_forward_pre_hook(_with_lengths, with_kwargs=True)


def _counts_positions(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "layer_idx", None), int):
        return False
    forward: Any = inspect.unwrap(type(module).forward)
    return "get_seq_length" in forward.__code__.co_names


def _with_lengths(_module: nn.Module, args: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    if call.get("kv_cache") is None:
        return args, call
    return args, {**call, "past_key_values": StepLengths(call["position_ids"])}
