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

from ..gradients import differentiable
from ..state.kinds import StateTensor
from ..state.segments import Segments
from .calls import CALLS, PASSES
from .operators import Operators
from .reference import ReferenceOperators

_ATTENTION = "ALL_ATTENTION_FUNCTIONS"


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
        shared: Attention modules that layers share, or their weights, which get the layer's number
            with each call; their own `layer_idx` is one for all.
    """

    def __init__(
        self,
        mixers: Sequence[tuple[nn.Module, dict[str, FunctionType]]],
        shared: Sequence[nn.Module] = (),
    ) -> None:
        """Take the modules.

        Args:
            mixers: Modules, and those of their methods that call operators.
            shared: As the attribute.
        """
        self.operators: Operators = ReferenceOperators()
        self.segments = _TWO_TOKENS
        self.states: tuple[MixerState, ...] = ()
        self.shared = frozenset(shared)
        self._mixers = [_Mixer(self, *each) for each in mixers]
        self._shared = [_Shared(each) for each in shared]

    def use_kernels(self, dtype: torch.dtype, device: torch.device) -> str:
        """Take the kernels for activations of a dtype, if they agree with the definition.

        Returns:
            Why they are not taken; "" if they are.
        """
        from .choose import choose_operators

        self.operators, why = choose_operators(dtype, device)
        return why

    def keep_gradients(self) -> None:
        """Give passes gradients: those of the modules' own code, which takes the batch for one
        sequence."""
        for mixer in self._mixers:
            mixer.keep_gradients()

    def __len__(self) -> int:
        return len(self._mixers)

    def index_of(self, module: nn.Module) -> int | None:
        """Return the index of a module's state; None if it is no mixer."""
        found = (index for index, each in enumerate(self._mixers) if each.module is module)
        return next(found, None)

    @contextmanager
    def active(self, segments: Segments, states: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Context of one pass over the model.

        Args:
            segments: Its segments.
            states: The tensors of each mixer.
        """
        with self._taken(segments, states):
            yield

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Context of one pass over two tokens, in which mixers record the state that they keep."""
        with self._taken(_TWO_TOKENS, [None] * len(self._mixers)):
            yield
        self.states = tuple(MixerState(mixer.found) for mixer in self._mixers)

    @contextmanager
    def _taken(
        self, segments: Segments, states: Sequence[Sequence[Tensor] | None]
    ) -> Iterator[None]:
        self.segments = segments
        for mixer, tensors in zip(self._mixers, states, strict=True):
            mixer.begin(tensors)
        for each in self._shared:
            each.begin()
        try:
            yield
        finally:
            for module in (*self._mixers, *self._shared):
                module.end()


_TWO_TOKENS = Segments(*(np.array([each], np.int64) for each in (0, 2, 0, -1)))


class _Taken:
    """A module that has other methods during a pass."""

    methods: dict[str, Any]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        own = vars(self.module)
        self._before = {name: own[name] for name in self.methods if name in own}
        own.update(self.methods)

    def end(self) -> None:
        own = vars(self.module)
        for name in self.methods:
            del own[name]
        own.update(self._before)


class _Shared(_Taken):
    """An attention module whose `layer_idx` is that of the current call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.methods = {"forward": self._forward, "layer_idx": None}
        self._plain = type(module).forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(self._plain).bind(self.module, *args, **kwargs)
        vars(self.module)["layer_idx"] = call.arguments["layer_idx"]
        return self._plain(self.module, *args, **kwargs)


class _Mixer(_Taken):
    """One mixer, a `Pass` of its operators."""

    def __init__(
        self, owner: Mixers, module: nn.Module, functions: dict[str, FunctionType]
    ) -> None:
        super().__init__(module)
        self.found: list[StateTensor] = []
        self._owner = owner
        self._tensors: Iterator[Tensor] | None = None
        calls = {name: partial(call, self) for name, call in CALLS.items()}
        self.methods = {
            name: MethodType(_with_globals(function, calls), module)
            for name, function in functions.items()
        }
        for end, forward in PASSES.items():
            if type(module).__name__.endswith(end):
                self.methods["forward"] = partial(forward, self)

    def keep_gradients(self) -> None:
        own = MethodType(type(self.module).forward, self.module)

        def plain(*args: Any, **kwargs: Any) -> Any:
            if "attention_mask" in kwargs:
                kwargs["attention_mask"] = None  # it is a placeholder
            return own(*args, **kwargs)

        fast = self.methods.get("forward", own)
        self.methods["forward"] = differentiable(self.module, fast, plain)

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
        device = next(self.module.parameters()).device
        return torch.zeros(1, *shape, dtype=dtype, device=device)

    def begin(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Begin a pass; without tensors, record those that operators need."""
        self._tensors = None if tensors is None else iter(tensors)
        super().begin()


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
    return Mixers(found, _shared_attention(model)) if found else None


def _shared_attention(model: nn.Module) -> list[nn.Module]:
    """Return attention modules that take the layer's number as an argument."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "layer_idx")
        and "layer_idx" in inspect.signature(type(module).forward).parameters
        and _ATTENTION in inspect.unwrap(type(module).forward).__code__.co_names
    ]


def _calling(kind: type) -> dict[str, FunctionType]:
    """Return the methods of a class that call operators by name, or compute them, without
    decorators."""
    found = {}
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        function = inspect.unwrap(method)
        named = function.__code__.co_names
        whole = name == "forward" and kind.__name__.endswith(tuple(PASSES))
        if whole or any(each in CALLS and each in function.__globals__ for each in named):
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
