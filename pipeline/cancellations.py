"""Cancellations of requests whose callers have left."""

from __future__ import annotations

import asyncio
from asyncio import Task
from collections.abc import Coroutine
from typing import Any

import anyio

from ..config import ChannelClosed
from ..config.logger import get_logger

CANCEL_PATIENCE_S = 2.0
"""Longest wait of a caller that leaves a stream for its request's cancellation to be sent."""


class Cancellations:
    """Cancellations in progress; each goes on after its caller's wait."""

    def __init__(self) -> None:
        self._running: set[Task[None]] = set()

    async def begin(self, cancel: Coroutine[Any, Any, None]) -> None:
        """Begin a cancellation; return when it is sent, or after `CANCEL_PATIENCE_S`.

        The wait is shielded, for callers that were cancelled themselves.
        """
        task = asyncio.create_task(cancel)
        self._running.add(task)
        task.add_done_callback(self._done)
        with anyio.move_on_after(CANCEL_PATIENCE_S, shield=True):
            await asyncio.wait([task])

    async def wait(self) -> None:
        """Wait until all are sent, or `CANCEL_PATIENCE_S` have passed."""
        if self._running:
            with anyio.move_on_after(CANCEL_PATIENCE_S, shield=True):
                await asyncio.wait(list(self._running))

    def _done(self, task: Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, ChannelClosed):
            get_logger().warning("not_cancelled", error=str(error))
