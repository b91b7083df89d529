"""Requests as their clients know them."""

from __future__ import annotations

import msgspec

from ..bus.public import Output
from ..config import NanoInferenceError
from .loop import SimulatedProcess
from .story import Request


class Call(msgspec.Struct):
    """A request as its client knows it.

    Attributes:
        outputs: What the client has read.
        error: Of the client's call.
        ended: Whether the client is done with it.
        left: Whether the client has stopped early, or was killed.
        process: The client.
        ended_ns: When it ended.
    """

    request: Request
    outputs: list[Output] = msgspec.field(default_factory=list)
    error: NanoInferenceError | None = None
    ended: bool = False
    left: bool = False
    process: SimulatedProcess | None = None
    ended_ns: int = 0
