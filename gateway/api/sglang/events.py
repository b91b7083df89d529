"""The events of a stream, as fast as its client reads them."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import msgspec

from ...server.http import SendEvent
from .answers import Answer
from .growing import Growing


class Events:
    """Of each sample the newest state is sent; what came before it is not kept for a slow client.

    An answer, which is the last event of a sample, has all of it.

    Attributes:
        any_sent: Whether an event was sent, or is being sent.
    """

    def __init__(self, send: SendEvent, *, indexed: bool) -> None:
        """`indexed`: whether an event names its sample."""
        self._send = send
        self._indexed = indexed
        self._newest: dict[int, Growing | Answer] = {}
        self._changed = anyio.Event()
        self._closed = False
        self.any_sent = False

    def put(self, index: int, state: Growing | Answer) -> None:
        """There is something new of a sample."""
        self._newest[index] = state
        self._changed.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._changed.set()

    async def send_all(self) -> None:
        """Sends until it is closed and everything is sent."""
        while self._newest or not self._closed:
            if not self._newest:
                self._changed = anyio.Event()
                await self._changed.wait()
                continue
            index = next(iter(self._newest))
            state = self._newest.pop(index)
            where = {"index": index} if self._indexed else {}
            answer = state.answer() if isinstance(state, Growing) else state
            data = msgspec.json.encode(answer | where)
            if isinstance(state, Growing):
                state.sent(len(data))
            self.any_sent = True
            await self._send(data)
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()
