"""Unloading of adapters: new requests are refused, and requests in flight finish first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...bus.control import Cancel, UnloadAdapter
from ...config import AdapterError, shown
from ..actor import Actor
from .core import AdmissionCore
from .requests import Ledger, Unanswered

_ABORTED = "the adapter was unloaded, and requests in flight were to end"


class Unloading:
    """Answers each UnloadAdapter once no request in flight has the adapter."""

    def __init__(
        self, actor: Actor, ledger: Ledger, tell: Callable[[Cancel], Awaitable[None]]
    ) -> None:
        """`tell`: Cancels a request."""
        self._actor = actor
        self._ledger = ledger
        self._tell = tell
        # (id of the adapter, id of the operation)
        self._waiting: list[tuple[str, str]] = []

    def __bool__(self) -> bool:
        """Return whether an UnloadAdapter waits."""
        return bool(self._waiting)

    async def begin(self, unload: UnloadAdapter, operation_id: str, core: AdmissionCore) -> None:
        """Refuse the adapter from now on; `abort` ends its requests in flight."""
        id = unload.adapter
        if not core.close_adapter(id):
            error = AdapterError(f"no adapter {shown(id)} is loaded", code="adapter_not_found")
            await self._actor.answer(operation_id, error=error)
            return
        self._waiting.append((id, operation_id))
        if unload.in_flight == "abort":
            for item in self._in_flight(id):
                ids = item.request_id, item.entry_id
                await self._tell(Cancel(*ids, "cancelled", "aborted", _ABORTED))
        await self.look()

    async def look(self) -> None:
        """Answer if no request has the adapter any more."""
        for waiting in self._waiting[:]:
            id, operation_id = waiting
            if not self._in_flight(id):
                self._waiting.remove(waiting)
                await self._actor.answer(operation_id)

    def _in_flight(self, id: str) -> list[Unanswered]:
        return [
            item
            for item in self._ledger
            if item.accepted is not None and item.accepted.admitted.info.adapter == id
        ]
