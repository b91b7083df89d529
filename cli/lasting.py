"""Calls of a server that outlive their connections: computed once, resumed, and cancelled."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import anyio
import httpx2

from ..config import NanoInferenceError, RequestError

T = TypeVar("T")

Opened = Callable[..., AbstractAsyncContextManager[httpx2.Response]]
"""Opens a call by method, URL, body and headers. Raises NanoInferenceError."""

AWAY_S = 60.0
"""Longest time without a server that answers, after the connection was lost."""

LOST = "connection_lost"

_AWAY = frozenset((LOST, "unreachable", "shutting_down", "not_ready", "bus_unavailable"))
_AWAY |= {"model_not_loaded", "502", "503", "504"}
_FIRST_WAIT_S, _MOST_WAIT_S = 0.1, 2.0
_CANCEL_S = 2.0
_KEY = "Idempotency-Key"


class Read(NamedTuple):
    """Data of an event: its value, and whether it is the last one."""

    value: Any
    is_last: bool = False


async def events_of(response: httpx2.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield id and data of each event of a stream."""
    async for event in httpx2.EventSource(response):
        yield event.id, event.data


@dataclass
class LastingCall:
    """A call with an idempotency key, over as many connections as it takes.

    A stream whose events have ids is resumed after the last one. Any other is sent again, if none
    of its values came, or all come again. A server without room for its key gets it without one.

    Attributes:
        opened: Opens a connection.
        url: The URL of OpenAI's interface.
        path: The call's path there.
        body: Its body.
        headers: Its headers.
        say: Writes why the answer has to wait.
        data: Yields the ids and data of an answer.
        repeats: Whether a call that is sent again has the same values again.
    """

    opened: Opened
    url: str
    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    say: Callable[[str], None]
    data: Callable[[httpx2.Response], AsyncIterator[tuple[str, str]]] = events_of
    repeats: bool = False

    def __post_init__(self) -> None:
        self._key = {_KEY: uuid.uuid4().hex}
        self._last_id = ""
        self._received = 0
        self._lost_at: float | None = None
        self._wait_s = _FIRST_WAIT_S

    async def values(self, read: Callable[[str], Read]) -> AsyncGenerator[Any, None]:
        """Yield each value once. A caller that stops before the last one cancels the call.

        Args:
            read: Reads the data of an event. Raises RequestError: it is an error.

        Raises:
            NanoInferenceError: The call was refused or has failed; or the server was away for
                longer than `AWAY_S`, or has lost the call.
        """
        is_last = False
        try:
            while not is_last:
                number = 0
                try:
                    async with self._connected() as response:
                        async for event_id, data in self.data(response):
                            if is_last:
                                continue  # to the end, or the server would count a disconnect
                            value, is_last = read(data)
                            number += 1
                            self._lost_at, self._wait_s = None, _FIRST_WAIT_S
                            self._last_id = event_id or self._last_id
                            if not self._last_id and number <= self._received:
                                continue
                            self._received += 1
                            yield value
                    if not is_last:
                        raise self._ended_early()
                except NanoInferenceError as error:
                    if not is_last:
                        await self._recover(error)
        except (asyncio.CancelledError, GeneratorExit):
            if not is_last:
                await self._cancel()
            raise

    def _connected(self) -> AbstractAsyncContextManager[httpx2.Response]:
        if self._last_id:
            stream = quote(self._last_id.partition(".")[0], safe="")
            headers = {**self.headers, "Last-Event-ID": self._last_id}
            return self.opened("GET", f"{self.url}/streams/{stream}", None, headers)
        headers = {**self.headers, **self._key}
        return self.opened("POST", self.url + self.path, self.body, headers)

    async def _recover(self, error: NanoInferenceError) -> None:
        """Wait until the call may be sent again. Raises its error where that is of no use."""
        if error.code == "stored_calls_full" and self._key:
            self._key = {}
            return
        if self._lost_at is None:
            may_go_on = self._last_id or (self._key and (self.repeats or not self._received))
            if not may_go_on or error.code not in (_AWAY if self._received else (LOST,)):
                raise error
            self._lost_at = time.monotonic()
            self.say(
                f"the connection to {self.url} was lost ({error.code}); the answer goes on when a "
                f"server answers there again, within {AWAY_S:.0f} s"
            )
        elif error.code == "stream_not_found":
            raise self.lost() from None
        elif error.code not in _AWAY or time.monotonic() - self._lost_at > AWAY_S:
            raise error
        await anyio.sleep(self._wait_s)
        self._wait_s = min(2 * self._wait_s, _MOST_WAIT_S)

    def lost(self) -> RequestError:
        """Return the error of a server that doesn't have the rest of the answer."""
        return RequestError(
            f"the server at {self.url} was started again and has no more of this answer",
            code="stream_not_found",
            remedy="send it again; behind Redis (`up --gateway`) calls outlive their gateway",
        )

    def _ended_early(self) -> RequestError:
        return RequestError(
            f"{self.url} ended before its answer did", code=LOST, remedy="send it again"
        )

    async def _cancel(self) -> None:
        """End the call at the server, for which a connection that closes may come back."""
        if self._key:
            with suppress(NanoInferenceError), anyio.move_on_after(_CANCEL_S, shield=True):
                headers = {**self.headers, **self._key}
                async with self.opened("DELETE", f"{self.url}/streams", None, headers) as response:
                    await response.aread()
