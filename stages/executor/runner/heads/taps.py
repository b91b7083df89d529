"""The target's hidden states of its last pass, taken by hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .....config import ModelError
from ..interface import ModelRunner


class HiddenTaps:
    """Keeps hidden states of each pass of a model until the next one.

    Attributes:
        states: `[tokens, hidden]` each, in the order of `layers`.
    """

    def __init__(self, runner: ModelRunner, layers: tuple[int, ...]) -> None:
        """Register the hooks.

        Args:
            runner: Runs the model.
            layers: After so many layers each; () for the last states, normalised.

        Raises:
            ModelError: The model has no such layers.
        """
        base: Any = runner.model.base
        self.states: list[Tensor] = [Tensor() for _ in layers or (0,)]
        self._handles: list[RemovableHandle] = []
        self._joined = [] if runner.fast_modules is None else runner.fast_modules.joined
        if not layers:
            self._handles.append(base.register_forward_hook(self._keep_last))
            return
        modules = getattr(base, "layers", None)
        if modules is None or not all(0 < each <= len(modules) for each in layers):
            raise ModelError(
                f"the draft head reads hidden states after layers {', '.join(map(str, layers))}, "
                "which the model doesn't have; set draft_model_path to a head that was trained "
                "for it"
            )
        for place, layer in enumerate(layers):
            hook = self._hook(place)
            self._handles.append(modules[layer - 1].register_forward_hook(hook))
        # Layers that run in one call are no modules there.
        for joined in self._joined:
            joined.taps = {layer: partial(self._keep, i) for i, layer in enumerate(layers)}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for joined in self._joined:
            joined.taps = {}

    def _keep(self, place: int, states: Tensor) -> None:
        self.states[place] = states

    def _keep_last(self, module: nn.Module, args: Any, output: Any) -> None:
        self.states[0] = output.last_hidden_state[0]

    def _hook(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            states: Tensor = output[0] if isinstance(output, tuple) else output
            self.states[place] = states[0]

        return hook
