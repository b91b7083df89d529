"""The sending ends of links."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable

from .envelope import Envelope, Message
from .links import AnyLink


class Numbering:
    """Message ids of each sender on each link, counting from 1.

    A second object for the same incarnation continues the count; otherwise its messages would look
    like duplicates.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], int] = {}

    def next(self, link: str, sender: str) -> int:
        number = self._last.get((link, sender), 0) + 1
        self._last[link, sender] = number
        return number


class Sender(ABC):
    """The sending end of a link, owned by one stage.

    It sets the envelope's sender, id and sent_ns. Messages of one sender arrive once each, in
    order. Messages to a stage whose inbox was never opened are lost.
    """

    def __init__(self, numbering: Numbering, link: AnyLink, sender: str) -> None:
        self._numbering = numbering
        self._link = link
        self._sender = sender

    async def send(
        self,
        body: Message,
        *,
        epoch: int = 0,
        traceparent: str = "",
        tracestate: str = "",
        budget_ns: int | None = None,
        operation_id: str = "",
    ) -> None:
        """Send a message; wait while the link is full.

        If the wait is cancelled, the message is sent completely or not at all, and never twice.

        Raises:
            ChannelClosed: The bus was closed, or (with both ends in this process) the receiving
                inbox was closed and not reopened.
            BusError: The message exceeds the transport's limit.
        """
        sender, sent_ns = self._sender, time.time_ns()
        number = self._numbering.next(self._link.name, sender)
        envelope = Envelope(
            body, epoch, sender, number, sent_ns, traceparent, tracestate, budget_ns, operation_id
        )
        await self._put(envelope)

    @abstractmethod
    def _put(self, envelope: Envelope) -> Awaitable[None]:
        """Hand an envelope to the transport, which returns what is to be awaited."""

    @abstractmethod
    async def flush(self) -> None:
        """Wait until all messages have left this process (in memory: at once).

        Raises:
            ChannelClosed: The bus was closed before that.
        """
