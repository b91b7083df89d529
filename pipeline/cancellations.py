"""Cancellations that a client is sending."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import Coroutine
from typing import Any

import anyio

from ..config import ChannelClosed
from ..config.logger import get_logger

CANCEL_PATIENCE_S = 2.0
"""How long a caller that leaves a stream waits for its request's cancellation to be sent."""


class Cancellations:
    """Goes on with each of them when nobody waits for it any longer."""

    def __init__(self) -> None:
        self._running: set[Task[None]] = set()

    async def begin(self, cancel: Coroutine[Any, Any, None]) -> None:
        """Sends one; returns when it is sent, or the patience is at its end.

        The wait is shielded: it is also for callers that were cancelled themselves.
        """
        cancelling = asyncio.create_task(cancel)
        self._running.add(cancelling)
        cancelling.add_done_callback(self._done)
        with anyio.move_on_after(CANCEL_PATIENCE_S, shield=True):
            await asyncio.wait([cancelling])

    async def wait(self) -> None:
        """Waits until all are sent, as long as the patience lasts."""
        if self._running:
            with anyio.move_on_after(CANCEL_PATIENCE_S, shield=True):
                await asyncio.wait(list(self._running))

    def _done(self, cancelling: Task[None]) -> None:
        self._running.discard(cancelling)
        error = None if cancelling.cancelled() else cancelling.exception()
        if error is not None and not isinstance(error, ChannelClosed):
            get_logger().warning("not_cancelled", error=str(error))
