"""Routed experts: those that the routers of a mixture choose for each token of a step.

Routers differ between architectures. Their modules of experts don't: nearly all are called with
hidden states, the chosen experts and their weights, also where our passes or another rank's parts
take their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .loaded_model import LoadedModel, experts_of

_CHOSEN = ("top_k_index", "selected_experts", "router_indices")
"""Names of the argument with the experts of each token, `[tokens, top_k]`: the second one."""


class Routers:
    """The places where a model routes tokens to experts.

    Attributes:
        num_layers: Layers of the model, those without experts included.
        top_k: Experts of a token.
        why_not: Why they can't be reported; "" if they can.
    """

    def __init__(self, model: LoadedModel) -> None:
        text = model.hf_config.get_text_config()
        self.num_layers: int = text.num_hidden_layers
        self.top_k = experts_of(model.hf_config)[1]
        self._modules = dict(_experts_by_layer(model.module))
        self.why_not = ""
        if model.pipeline is not None:
            self.why_not = "each pipeline stage has the experts of its own layers only"
        elif not self._modules or not self.top_k or max(self._modules) >= self.num_layers:
            self.why_not = "the model's routers are of a form that is not read here"

    @contextmanager
    def watched(self, found: list[Tensor]) -> Iterator[None]:
        """Append to `found` the experts of each token of a forward pass: `[tokens, layers, top_k]`,
        0 in layers without experts. All of a step's tokens must reach the last layer."""
        chosen: dict[int, Tensor] = {}

        def keep(layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
            named = (kwargs[name] for name in _CHOSEN if name in kwargs)
            chosen[layer] = args[1] if len(args) > 1 else next(named)

        with ExitStack() as hooks:
            for layer, module in self._modules.items():
                hook = module.register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
                hooks.callback(hook.remove)
            yield
        tokens = next(iter(chosen.values())).shape[0]
        experts = torch.zeros(tokens, self.num_layers, self.top_k, dtype=torch.int64)
        for layer, indices in chosen.items():
            experts[:, layer] = indices.reshape(tokens, self.top_k)
        found.append(experts)


def _experts_by_layer(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield the layer's number and the module of each layer's experts."""
    for name, child in module.named_modules():
        arguments = list(inspect.signature(child.forward).parameters)
        if len(arguments) > 1 and arguments[1] in _CHOSEN:
            numbers = [int(part) for part in name.split(".") if part.isdecimal()]
            if numbers:
                yield numbers[0], child
