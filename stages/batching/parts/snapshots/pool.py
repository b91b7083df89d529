"""The numbers of snapshots, and the order in which they are given out again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

OWNED_SHARE = 2
"""At most one in so many snapshots belongs to a running sequence, or is being made for one."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """A snapshot that can be found.

    Attributes:
        number: Its number.
        adapter: The adapter that its state is of; "" for none.
        owner: Id of the running sequence that has it until its next one; -1 for none.
    """

    number: int
    adapter: str
    owner: int = -1


class SnapshotFollower(Protocol):
    """Informed of the snapshots that can be found."""

    def made(self, name: bytes) -> None: ...
    def given_out(self, name: bytes, number: int) -> None: ...
    def dropped(self, name: bytes) -> None: ...


class Snapshots:
    """Snapshots by the names of the blocks at whose ends they were taken.

    A number is free, in a plan in flight, or kept under a name. The least recently used of all
    tenants is given out again first, as with blocks: a tenant has no share of its own. Held ones
    stay. Those of running sequences come after all others, so that there can only be so many.

    Attributes:
        number: Their number.
    """

    def __init__(self, number: int, follower: SnapshotFollower) -> None:
        """Args: their number, and what is informed of each."""
        self.number = number
        self._follower = follower
        # In order of eviction.
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._owned: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._free = list(range(number))
        # Whether each is made for an owner.
        self._in_flight: dict[int, bool] = {}
        self._held: Counter[bytes] = Counter()

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept or name in self._owned

    def __len__(self) -> int:
        return len(self._kept) + len(self._owned)

    @property
    def num_takable(self) -> int:
        """Number of times that `take` would return a number."""
        names = (*self._kept, *self._owned)
        return len(self._free) + sum(name not in self._held for name in names)

    def number_of(self, name: bytes) -> int:
        """Return the number of a snapshot that can be found; -1 if there is none of this name."""
        snapshot = self._kept.get(name) or self._owned.get(name)
        return -1 if snapshot is None else snapshot.number

    def name_of(self, number: int) -> bytes | None:
        """Return the name of a snapshot that can be found; None for other numbers."""
        snapshots = (*self._kept.items(), *self._owned.items())
        return next((name for name, each in snapshots if each.number == number), None)

    @property
    def num_held(self) -> int:
        """Number of names that are held."""
        return len(self._held)

    def use(self, name: bytes) -> int:
        """Return the number of a snapshot with which a sequence starts; it has no owner then."""
        snapshot = self._owned.pop(name, None) or self._kept[name]
        snapshot.owner = -1
        self._kept[name] = snapshot
        self._kept.move_to_end(name)
        return snapshot.number

    def demote(self, name: bytes) -> None:
        """Let a snapshot be given out again next, unless a running sequence owns it."""
        if name in self._kept:
            self._kept.move_to_end(name, last=False)

    def take(self, *, for_owner: bool = False) -> int | None:
        """Return a number for a plan; None if there is none. `for_owner`: of their share."""
        if for_owner:
            num_owned = len(self._owned) + sum(self._in_flight.values())
            if num_owned >= self.number // OWNED_SHARE:
                return None
        if not self._free:
            names = (*self._kept,) if for_owner else (*self._kept, *self._owned)
            victim = next((name for name in names if name not in self._held), None)
            if victim is None:
                return None
            self._follower.given_out(victim, self.number_of(victim))
            self.drop(victim)
        number = self._free.pop()
        self._in_flight[number] = for_owner
        return number

    def keep(self, name: bytes, number: int, adapter: str, owner: int = -1) -> bool:
        """Let a snapshot be found that was in flight, unless there is one of this name.

        Returns:
            Whether there was none.
        """
        if name in self:
            self.give_back(number)
            return False
        del self._in_flight[number]
        (self._kept if owner < 0 else self._owned)[name] = Snapshot(number, adapter, owner)
        self._follower.made(name)
        return True

    def give_back(self, number: int) -> None:
        """Free a number that was in flight."""
        del self._in_flight[number]
        self._free.append(number)

    def drop(self, name: bytes) -> None:
        """Free the number of a name, if it is kept."""
        snapshot = self._kept.pop(name, None) or self._owned.pop(name, None)
        if snapshot is not None:
            self._free.append(snapshot.number)
            self._follower.dropped(name)

    def is_owned(self, name: bytes, owner: int) -> bool:
        """Whether a snapshot is there, and has this owner."""
        snapshot = self._owned.get(name)
        return snapshot is not None and snapshot.owner == owner

    def drop_adapter(self, adapter: str) -> None:
        """Drop the snapshots of an adapter."""
        for name, snapshot in [*self._kept.items(), *self._owned.items()]:
            if snapshot.adapter == adapter:
                self.drop(name)

    def hold(self, name: bytes) -> None:
        """Keep the snapshot of a name until `release`; a name may be held several times."""
        self._held[name] += 1

    def release(self, name: bytes) -> None:
        """End one hold of a name."""
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]

    def clear(self) -> None:
        """Free all numbers, those in flight included."""
        for name in (*self._kept, *self._owned):
            self._follower.dropped(name)
        self._kept.clear()
        self._owned.clear()
        self._in_flight.clear()
        self._free = list(range(self.number))

    def check(self, in_flight: Collection[int]) -> None:
        """Check that each number is in one place, and these are in flight.

        Raises:
            AssertionError: One is lost, or in two places.
        """
        kept = [each.number for each in (*self._kept.values(), *self._owned.values())]
        numbers = sorted([*self._free, *kept, *in_flight])
        assert numbers == list(range(self.number)), "a snapshot is lost, or in two places"
        assert self._in_flight.keys() == set(in_flight), "a snapshot is in no plan in flight"
        assert all(each.owner < 0 for each in self._kept.values()), "a snapshot has an owner"
