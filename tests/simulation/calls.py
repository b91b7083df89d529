"""Requests as their clients know them."""

from __future__ import annotations

from typing import Any

import msgspec

from nano_inference.bus.public import CompletionChunk, Output
from nano_inference.config import NanoInferenceError

from .loop import SimulatedProcess
from .story import Request


class Call(msgspec.Struct):
    """A request as its client knows it.

    Attributes:
        outputs: What the client has read.
        error: Error of the client's call.
        ended: Whether the client is done with it.
        left: Whether the client has stopped early, or was killed.
        process: The client.
        ended_ns: When it ended.
        answers: Ids of the answers that a gateway gave.
        response: What a response in the background has come to; None if it has not ended.
        alone_ns: The longest time that a begun call had no gateway.
    """

    request: Request
    outputs: list[Output] = msgspec.field(default_factory=list)
    error: NanoInferenceError | None = None
    ended: bool = False
    left: bool = False
    process: SimulatedProcess | None = None
    ended_ns: int = 0
    answers: set[str] = msgspec.field(default_factory=set)
    response: dict[str, Any] | None = None
    alone_ns: int = 0

    @property
    def chunks(self) -> list[CompletionChunk]:
        """The chunks before the end."""
        return [each for each in self.outputs if isinstance(each, CompletionChunk)]
