"""An engine whose requests go on for as long as a test wants."""

from __future__ import annotations

from typing import Any

import anyio

from nano_inference.bus.public import Completion

from ...fake import FakeEngine, completion
from ...made import interleaved, told


class Going(FakeEngine):
    """One whose requests have a token, and end when they may go on, or are cancelled.

    Attributes:
        go: All may go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.go = anyio.Event()
        self._stops: dict[str, anyio.Event] = {}

    async def follow(self, request_id: str, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        (request,) = (each for each in self.requests if each.request_id == request_id)
        stop = self._stop(request_id)
        for place, output in enumerate(interleaved(request)):
            if place == 1:
                await either(self.go, stop)
                if stop.is_set():
                    output = completion(request, told(request, 0, "abort"), status="cancelled")
            self.bus.results.last_outputs[request_id] = output
            yield output
            if isinstance(output, Completion):
                return

    async def cancel(self, request_id: str, entry_id: str = "") -> None:
        await super().cancel(request_id)
        self._stop(request_id).set()

    def _stop(self, request_id: str) -> anyio.Event:
        return self._stops.setdefault(request_id, anyio.Event())


async def either(*events: anyio.Event) -> None:
    """Waits until one of them is set."""

    async def wait(event: anyio.Event) -> None:
        await event.wait()
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for event in events:
            group.start_soon(wait, event)
