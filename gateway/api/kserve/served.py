"""The protocol of a served model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ....kserve.tensors import InferRequest, ModelSpec, NamedTensor
from ...call import Call
from ...serving.durable_calls import IdempotencyKey

Answer = Callable[[Sequence[NamedTensor]], Awaitable[None]]
"""Sends a response with the model's outputs, or with those available so far."""


@dataclass(slots=True)
class ModelCall:
    """A call of a model.

    Attributes:
        request: The request, which fits the model's `spec`.
        call: The caller and the deadline.
        many: Several responses may be sent; otherwise exactly one.
        key: Its identity; None without an idempotency key.
        compute_ns: Compute time, as far as the model reports it.
    """

    request: InferRequest
    call: Call
    many: bool = False
    key: IdempotencyKey | None = None
    compute_ns: int | None = None

    def computed(self, ns: int) -> None:
        """Record compute time; concurrent work counts once."""
        self.compute_ns = max(ns, self.compute_ns or 0)


class ServedModel(Protocol):
    """A model that clients call by its name.

    Attributes:
        spec: Its interface.
    """

    spec: ModelSpec

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        """Send one response, or several to a call that takes many, and return after the last.

        Cancellation ends everything that the call has begun.

        Raises:
            NanoInferenceError: The call failed.
        """

    async def trouble(self) -> str:
        """Return why a request would not be served now, in one sentence; "" if it would.

        Raises:
            BusError: It is unknown.
        """
