"""A queue in which tenants take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[K, T]):
    """Items by tenant: tenants take turns, each with its items in order of arrival."""

    def __init__(self) -> None:
        # The tenant with the next turn is first.
        self._queues: OrderedDict[K, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, tenant: K, item: T) -> None:
        """Add an item at the end of its tenant's."""
        self._queues.setdefault(tenant, deque()).append(item)

    def next(self, may: Callable[[K], bool] = lambda tenant: True) -> T | None:
        """Return the first item of the tenant with the next turn, which ends with that; None if
        there is none. The item stays.

        Args:
            may: Whether a tenant may have its turn now; otherwise the turn stays with it.
        """
        tenant = next(filter(may, self._queues), None)
        if tenant is None:
            return None
        self._queues.move_to_end(tenant)
        return self._queues[tenant][0]

    def last(self, tenant: K) -> T:
        """Return the newest item of a tenant."""
        return self._queues[tenant][-1]

    def remove(self, tenant: K, item: T) -> None:
        """Remove an item; quick for the first ones."""
        queue = self._queues[tenant]
        queue.remove(item)
        if not queue:
            del self._queues[tenant]

    @property
    def only(self) -> int:
        """The number of items, if all are of one tenant; else 0."""
        return len(next(iter(self._queues.values()))) if len(self._queues) == 1 else 0
