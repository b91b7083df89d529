"""Who gets which slots of a pool: strictly in turn, each as many beside one another as he asks."""

from __future__ import annotations

from collections import OrderedDict


class Waiter:
    """Somebody who wants slots.

    Attributes:
        span: How many, beside one another.
        first: The first of those that he has; None while he waits.
    """

    __slots__ = ("first", "span")

    def __init__(self, span: int) -> None:
        self.span = span
        self.first: int | None = None


class SlotQueue:
    """The slots of a pool and the queue before them.

    Only the first of the queue is ever given slots: who wants many would else wait for as long as
    others want few.
    """

    def __init__(self, n_slots: int) -> None:
        """Raises ValueError when there is none."""
        if n_slots < 1:
            raise ValueError(f"a pool of {n_slots} slots can give none; it needs at least 1")
        self._free = bytearray(b"\1" * n_slots)  # for each slot
        self._waiting: OrderedDict[Waiter, None] = OrderedDict()

    @property
    def n_slots(self) -> int:
        return len(self._free)

    @property
    def free_slots(self) -> int:
        return sum(self._free)

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def ask(self, span: int) -> Waiter:
        """Gets in line; whoever finds nobody before him, and enough slots, has them at once.

        Raises:
            ValueError: There are never so many.
        """
        if not 1 <= span <= self.n_slots:
            raise ValueError(
                f"{span} slots beside one another can never be had of a pool of {self.n_slots}"
            )
        waiter = Waiter(span)
        self._waiting[waiter] = None
        self._serve()
        return waiter

    def leave(self, waiter: Waiter) -> list[Waiter]:
        """Gives up, with or without slots. Returns who has slots because of it.

        Nothing happens when he has left before.
        """
        if waiter.first is not None:
            first, waiter.first = waiter.first, None
            return self.release(first, waiter.span)
        self._waiting.pop(waiter, None)
        return self._serve()

    def release(self, first: int, span: int) -> list[Waiter]:
        """Gives slots back. Returns who has them, or some of them, now.

        Raises:
            RuntimeError: One of them is free already. None is given back then.
        """
        if any(self._free[first : first + span]):
            raise RuntimeError("these slots are free already; release them once")
        self._free[first : first + span] = b"\1" * span
        return self._serve()

    def _serve(self) -> list[Waiter]:
        served = []
        while self._waiting:
            waiter = next(iter(self._waiting))
            first = self._free.find(b"\1" * waiter.span)
            if first < 0:
                break
            self._free[first : first + waiter.span] = bytes(waiter.span)
            waiter.first = first
            del self._waiting[waiter]
            served.append(waiter)
        return served
