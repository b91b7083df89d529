"""A stream of requests over gRPC, and of the answers to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup
from google.protobuf.message import Message

from ....config import NanoInferenceError
from .grpc_connection import GrpcConnection

MOST_AT_ONCE = 64
"""Requests of one stream that are served at a time; the next is read when one of them has ended."""

Send = Callable[[Message], Awaitable[None]]

Serve = Callable[[Any, int, Send], Awaitable[None]]
"""Answers a request, which has so many bytes, be it with an error. Raises NanoInferenceError when
an answer could not be sent."""


class _Turn(NamedTuple):
    """What a request's first answer waits for, and what is set behind its last."""

    before: anyio.Event | None
    done: anyio.Event


class InferStream:
    """Serves the requests of one stream beside one another."""

    def __init__(
        self, connection: GrpcConnection, serve: Serve, in_order: Callable[[Any], bool]
    ) -> None:
        """Args: `in_order` says whether the answer to a request waits for those to the requests
        before it of which it says so as well."""
        self._connection = connection
        self._serve = serve
        self._in_order = in_order
        self._room = anyio.Semaphore(MOST_AT_ONCE)
        self._sending = anyio.Lock()
        self._last: anyio.Event | None = None
        self._failure: NanoInferenceError | None = None

    async def run(self) -> None:
        """Returns when the client has sent its last request and has all answers.

        Raises:
            NanoInferenceError: Nothing more can be read, and what was is answered; or nothing more
                can be sent.
        """
        unread: NanoInferenceError | None = None
        async with anyio.create_task_group() as group:
            try:
                while (found := await self._connection.next_request(self._rests)) is not None:
                    await self._room.acquire()
                    message, size = found
                    group.start_soon(self._serve_one, message, size, self._turn(message), group)
            except NanoInferenceError as error:
                unread = error
        if failure := self._failure or unread:
            raise failure

    def _rests(self) -> bool:
        return self._room.value == MOST_AT_ONCE

    def _turn(self, message: Any) -> _Turn:
        done = anyio.Event()
        if not self._in_order(message):
            return _Turn(None, done)
        before, self._last = self._last, done
        return _Turn(before, done)

    async def _serve_one(self, message: Any, size: int, turn: _Turn, group: TaskGroup) -> None:
        async def send(answer: Message) -> None:
            if turn.before is not None:
                await turn.before.wait()
            async with self._sending:
                await self._connection.send(answer)

        try:
            await self._serve(message, size, send)
        except NanoInferenceError as error:
            self._failure = self._failure or error
            group.cancel_scope.cancel()
        finally:
            turn.done.set()
            self._room.release()
