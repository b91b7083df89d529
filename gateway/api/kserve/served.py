"""What a model has to do to be served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ....kserve.tensors import InferRequest, ModelSpec, NamedTensor
from ...serving.origin import Origin

Answer = Callable[[Sequence[NamedTensor]], Awaitable[None]]
"""Sends an answer, which has the model's outputs, or those of them that there are so far."""


class ModelCall:
    """A call of a model.

    Attributes:
        request: What is asked, which fits the model's `spec`.
        origin: Who asks, and until when.
        many: Whether several answers may be sent; else it is exactly one.
        compute_ns: How long something was computed for it, as far as its model knows.
    """

    __slots__ = ("compute_ns", "many", "origin", "request")

    def __init__(self, request: InferRequest, origin: Origin, *, many: bool = False) -> None:
        self.request = request
        self.origin = origin
        self.many = many
        self.compute_ns: int | None = None

    def computed(self, ns: int) -> None:
        """Something was computed for it for so long; what runs side by side counts once."""
        self.compute_ns = max(ns, self.compute_ns or 0)


class ServedModel(Protocol):
    """A model that clients can call by its name.

    Attributes:
        spec: What it takes and gives.
    """

    spec: ModelSpec

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        """Sends one answer, or several to a call that takes many, and returns behind the last.

        Cancelling it ends whatever it has begun.

        Raises:
            NanoInferenceError: It can't be done.
        """

    async def trouble(self) -> str:
        """Why a request would not be served now, in one sentence; "" when it would.

        Raises:
            BusError: Nobody can tell.
        """
