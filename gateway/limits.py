"""How much the gateway takes at a time: requests under way, and the bytes of their bodies."""

from __future__ import annotations

from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import RequestError
from .http import Respond, respond_plainly
from .measures import Reason
from .probes import PROBES

UNCOUNTED_BYTES = 1 << 16
"""The beginning of a body, which is taken whatever the others hold: a small request never waits for
large ones. The server reads about as much of each before anybody asks for it."""


class Overloaded(RequestError):
    """There is no room now; `reason` says for what."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message, code="overloaded")
        self.reason: Reason = reason


class RequestLimits:
    """ASGI: answers what is beyond the limits with 429 instead of passing it on, but for probes.

    The bytes of a body count from when they come until its request is answered, since what is made
    of them is kept as long. They do not count before they come, or those who announce large bodies
    and send nothing would shut others out.

    Attributes:
        refused: How many were refused, and why, since somebody emptied this.
        held_bytes: What the bodies of all that are under way hold, beyond the uncounted.
        respond: Answers an error as clients of what is called read it.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_requests: int,
        max_bodies_bytes: int,
        respond: Respond = respond_plainly,
    ) -> None:
        self.refused: Counter[Reason] = Counter()
        self.respond = respond
        self._app = app
        self._max_requests = max_requests
        self._max_bodies_bytes = max_bodies_bytes
        self._under_way = 0
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope).get("content-length", ""))
        if refusal is not None:
            self.refused[refusal.reason] += 1
            await self.respond(scope, refusal)(scope, receive, send)
            return
        received = counted = 0

        async def receive_counted() -> Message:
            nonlocal received, counted
            message = await receive()
            received += len(message.get("body", b""))
            more = max(0, received - UNCOUNTED_BYTES) - counted
            if more and self.held_bytes + more > self._max_bodies_bytes:
                # Whoever reads the body answers with it.
                refusal = self._no_room()
                self.refused[refusal.reason] += 1
                raise refusal
            self.held_bytes += more
            counted += more
            return message

        self._under_way += 1
        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._under_way -= 1
            self.held_bytes -= counted

    def _refusal(self, told: str) -> Overloaded | None:
        if self._under_way >= self._max_requests:
            return Overloaded(
                f"{self._max_requests} requests are under way here, which is as many as the "
                "gateway takes (gateway.max_connections, and its limit of open files); try again",
                "too_many_requests",
            )
        size = int(told) if told.isdecimal() else 0
        # What is larger than all of it is refused by its reader, as too large.
        counted = max(0, size - UNCOUNTED_BYTES)
        if counted <= self._max_bodies_bytes < self.held_bytes + counted:
            return self._no_room()
        return None

    def _no_room(self) -> Overloaded:
        return Overloaded(
            f"the bodies of all requests together are larger than {self._max_bodies_bytes} bytes "
            "(gateway.max_bodies_bytes); try again, or send less at a time",
            "too_many_bytes",
        )
