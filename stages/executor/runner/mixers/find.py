"""Mixers with recurrent state in Transformers' models, run over a step by our operators.

A mixer's projections, gates and norms work token by token. All that mixes tokens are a few
functions that modelling files define under the same names, such as `causal_conv1d_fn`. Within
`Mixers.active()` a mixer runs its class's own methods with other globals: these names mean our
operators, which find the state in the cache. Nothing is changed outside, so other callers of the
model, such as a trainer that shares it, run Transformers' own code.

Mixers are found by the names, not by architecture. A layer that mixes tokens in another way would
give other tokens, which the comparison at load finds (`comparison.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..state.kinds import StateTensor
from .calls import CALLS
from .operators import Operators, Segments
from .reference import ReferenceOperators


class MixerState:
    """The state of one mixer, a `LayerState`."""

    def __init__(self, found: Sequence[StateTensor]) -> None:
        """`found`: the tensors of its operators, in the order of their calls."""
        self._found = tuple(found)

    def tensors(self, dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """Return the tensors, whose dtypes don't depend on the KV cache's."""
        return self._found


class Mixers:
    """The mixers of a model, in the order of its modules.

    Attributes:
        operators: Compute what mixes tokens.
        segments: The segments of the current step.
        states: The state of each mixer; known after `probing`.
    """

    def __init__(self, mixers: Sequence[tuple[nn.Module, dict[str, FunctionType]]]) -> None:
        """`mixers`: modules, and those of their methods that call operators."""
        self.operators: Operators = ReferenceOperators()
        self.segments = _TWO_TOKENS
        self.states: tuple[MixerState, ...] = ()
        self._mixers = [_Mixer(self, *each) for each in mixers]

    def use_kernels(self, dtype: torch.dtype, device: torch.device) -> str:
        """Take the kernels for activations of a dtype, if they agree with the definition.

        Returns:
            Why they are not taken; "" if they are.
        """
        from .choose import choose_operators

        self.operators, why = choose_operators(dtype, device)
        return why

    def __len__(self) -> int:
        return len(self._mixers)

    @contextmanager
    def active(self, segments: Segments, states: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Context of one pass over the model.

        Args:
            segments: Its segments.
            states: The tensors of each mixer.
        """
        self.segments = segments
        for mixer, tensors in zip(self._mixers, states, strict=True):
            mixer.begin(tensors)
        try:
            yield
        finally:
            for mixer in self._mixers:
                mixer.end()

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Context of one pass over two tokens, in which mixers record the state that they keep."""
        self.segments = _TWO_TOKENS
        for mixer in self._mixers:
            mixer.begin(None)
        try:
            yield
        finally:
            for mixer in self._mixers:
                mixer.end()
        self.states = tuple(MixerState(mixer.found) for mixer in self._mixers)


_TWO_TOKENS = Segments(*(np.array([each], np.int64) for each in (0, 2, 0, -1)))


class _Mixer:
    """One mixer, a `Pass` of its operators."""

    def __init__(
        self, owner: Mixers, module: nn.Module, functions: dict[str, FunctionType]
    ) -> None:
        self.found: list[StateTensor] = []
        self._owner, self._module = owner, module
        self._tensors: Iterator[Tensor] | None = None
        calls = {name: partial(call, self) for name, call in CALLS.items()}
        self._methods = {
            name: MethodType(_with_globals(function, calls), module)
            for name, function in functions.items()
        }
        self._before: dict[str, Any] = {}

    @property
    def operators(self) -> Operators:
        return self._owner.operators

    @property
    def segments(self) -> Segments:
        return self._owner.segments

    def state(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._tensors is not None:
            return next(self._tensors)
        self.found.append(StateTensor(shape, dtype))
        device = next(self._module.parameters()).device
        return torch.zeros(1, *shape, dtype=dtype, device=device)

    def begin(self, tensors: Sequence[Tensor] | None) -> None:
        """Begin a pass; without tensors, record those that operators need."""
        self._tensors = None if tensors is None else iter(tensors)
        own = vars(self._module)
        self._before = {name: own[name] for name in self._methods if name in own}
        own.update(self._methods)

    def end(self) -> None:
        own = vars(self._module)
        for name in self._methods:
            del own[name]
        own.update(self._before)


def find_mixers(model: nn.Module) -> Mixers | None:
    """Return the mixers of a model; None if it has none."""
    functions: dict[type, dict[str, FunctionType]] = {}
    found = []
    for module in model.modules():
        kind = type(module)
        if kind not in functions:
            functions[kind] = _calling(kind)
        if functions[kind]:
            found.append((module, functions[kind]))
    return Mixers(found) if found else None


def _calling(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class that call operators by name, without decorators."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        function = inspect.unwrap(method)
        named = function.__code__.co_names
        if any(each in CALLS and each in function.__globals__ for each in named):
            found[name] = function
    return found


def _with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a function with the same code, in which these global names mean something else."""
    changed = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
