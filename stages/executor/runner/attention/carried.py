"""Keyword arguments for the attention of models whose layers drop them."""

from __future__ import annotations

from typing import Any

from torch import nn


class KeywordsLost(Exception):
    """Layers of a model don't hand keyword arguments down to their attention.

    Attributes:
        layer: The class of the attention layers.
    """

    def __init__(self, layer: type) -> None:
        super().__init__(f"{layer.__name__} gets no keyword arguments")
        self.layer = layer


class _Carrier:
    """Hooks that bring the keyword arguments of a model's call to its attention layers."""

    def __init__(self) -> None:
        self._carried: dict[str, Any] = {}

    def take(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._carried = {name: kwargs[name] for name in _CARRIED if name in kwargs}

    def give(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs | self._carried

    def drop(self, *_: Any) -> None:
        self._carried = {}


_CARRIED = ("attention_backend", "attention_batch", "kv_cache", "layer_probe")


def carry_keywords(module: nn.Module, layer: type) -> None:
    """Bring our keyword arguments of the model's call to its layers of this class; idempotent."""
    if any(isinstance(getattr(hook, "__self__", None), _Carrier) for hook in _hooks_of(module)):
        return
    carrier = _Carrier()
    module.register_forward_pre_hook(carrier.take, with_kwargs=True)
    module.register_forward_hook(carrier.drop, always_call=True)
    for child in module.modules():
        if isinstance(child, layer):
            child.register_forward_pre_hook(carrier.give, with_kwargs=True)


def _hooks_of(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())
