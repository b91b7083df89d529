"""Entries that are taken from the queue and not in the ledger yet, and what is said of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ...bus.channel import RequestEntry
from ...bus.control import Cancel
from .checks import request_id_of

REMEMBERED_CANCELS = 4096
"""Cancellations of entries not seen yet that are kept."""


class InHand:
    """Entries on their way into the ledger; those whose prompts take long are set apart.

    It also keeps cancellations of entries that are not in the ledger. Such an entry may be in hand,
    on its way here, or answered already; nobody can tell.
    """

    def __init__(self) -> None:
        self._entries: dict[str, RequestEntry] = {}
        self._apart: set[str] = set()
        # The oldest first.
        self._cancelled: OrderedDict[str, Cancel] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._entries

    @property
    def apart(self) -> tuple[RequestEntry, ...]:
        """Those whose prompts are being tokenised, or wait for that."""
        return tuple(entry for entry_id, entry in self._entries.items() if entry_id in self._apart)

    @property
    def num_cancelled(self) -> int:
        """Cancellations that are kept."""
        return len(self._cancelled)

    def add(self, entries: Iterable[RequestEntry]) -> None:
        """Entries were taken."""
        for entry in entries:
            self._entries[entry.entry_id] = entry

    def set_apart(self, entry_id: str) -> None:
        """An entry's prompt is tokenised while others go past it, if it is still in hand."""
        if entry_id in self._entries:
            self._apart.add(entry_id)

    def remove(self, entry_id: str) -> bool:
        """An entry goes into the ledger, or is another lane's; returns whether it was in hand."""
        self._apart.discard(entry_id)
        return self._entries.pop(entry_id, None) is not None

    def entry_of(self, request_id: str) -> str | None:
        """The entry in hand that has this request id, None for none."""
        for entry_id, entry in self._entries.items():
            if request_id_of(entry) == request_id:
                return entry_id
        return None

    def cancel(self, entry_id: str, cancel: Cancel) -> None:
        """An entry that is not in the ledger is to end as soon as it is let in."""
        self._cancelled[entry_id] = cancel
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    def take_cancel(self, entry_id: str) -> Cancel | None:
        """How an entry that is let in now is to end; None if it was not cancelled."""
        return self._cancelled.pop(entry_id, None)
