"""Limits that all gateways share, on every kind of bus."""

from __future__ import annotations

import asyncio
import random
import time

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus import Bus
from nano_inference.store.limits import SLICES, Charge, Limit, Reservation, Room, slice_ms
from nano_inference.store.memory import MemoryLimits

from ..buses import STORES, Buses, kit

BUSES = STORES

HOUR_S = 3600
"""A window that no test outlives."""


async def reserve(bus: Bus, *charges: tuple[Limit, int]) -> Reservation:
    return await bus.store.limits.reserve([Charge(*each) for each in charges])


async def fits(bus: Bus, *charges: tuple[Limit, int]) -> bool:
    return (await reserve(bus, *charges)).granted


async def left(bus: Bus, *charges: tuple[Limit, int]) -> list[int]:
    """Return the remaining amount of each limit after a reservation."""
    return [room.left for room in (await reserve(bus, *charges)).rooms]


async def test_all_is_taken_or_nothing(buses: Buses) -> None:
    bus, other = buses.pair()
    few, many, held = Limit("a", 10, HOUR_S), Limit("b", 100, HOUR_S), Limit("a", 3)
    took = await reserve(bus, (few, 4), (many, 70), (held, 2))
    assert took.granted
    assert [room.left for room in took.rooms] == [6, 30, 1]
    for refused, place in (
        (((few, 7), (many, 1), (held, 1)), 0),
        (((few, 1), (many, 31), (held, 1)), 1),
        (((few, 1), (many, 1), (held, 2)), 2),
    ):
        took = await reserve(other, *refused)
        assert (took.granted, took.refused_by) == (False, place)
        assert [room.left for room in took.rooms] == [6, 30, 1]
    assert await fits(other, (few, 6), (many, 30), (held, 1))
    assert not await fits(bus, (few, 1))


async def test_many_at_once_get_as_much_as_there_is(buses: Buses) -> None:
    """Two gateways, one limit of 100, 1,000 sent to both."""
    limit, gateways = Limit("key", 100, HOUR_S), buses.pair()
    takes = await asyncio.gather(*(reserve(gateways[i % 2], (limit, 1)) for i in range(1000)))
    assert sum(each.granted for each in takes) == 100


async def test_never_is_more_granted_within_a_window(buses: Buses) -> None:
    """The times between which each was granted are those of this process. What is in a window of
    the limit's length by the server's clock was granted later than the first of it was asked for.
    """
    limit, gateways = Limit("key", 5, 1), buses.pair()
    asked, granted = [], []
    deadline = time.monotonic() + kit.LIMIT_S
    while len(granted) < 7:
        before = time.monotonic()
        assert before < deadline
        took = await reserve(gateways[len(granted) % 2], (limit, 1))
        if took.granted:
            asked.append(before)
            granted.append(time.monotonic())
            continue
        # Room comes back in time.
        assert 0 < took.retry_after_s <= (SLICES + 1) * slice_ms(limit) / 1000
        await asyncio.sleep(took.retry_after_s)
    for place in range(len(granted) - 5):
        assert granted[place + 5] - asked[place] >= 1


async def test_there_is_room_when_it_was_said(buses: Buses) -> None:
    bus = buses.open()
    limit = Limit("key", 2, 1)
    assert await fits(bus, (limit, 2))
    refused = await reserve(bus, (limit, 2))
    (room,) = refused.rooms
    assert room == Room(0, refused.retry_after_s)
    await asyncio.sleep(refused.retry_after_s)
    assert await fits(bus, (limit, 2))


async def test_a_reservation_is_committed(buses: Buses) -> None:
    bus, other = buses.pair()
    tokens = Limit("tokens", 1000, HOUR_S)
    first = await reserve(bus, (tokens, 900))
    second = await reserve(other, (tokens, 100))
    bus.store.limits.commit(first, [50])
    # Who has committed may rely on it at once, others a moment later; it may have been more, too.
    third = await reserve(bus, (tokens, 850))
    assert third.granted
    other.store.limits.commit(second, [150])
    bus.store.limits.commit(third, [600])

    await kit.eventually(lambda: fits(other, (tokens, 200)), "what was given back")
    assert await left(bus, (tokens, 0)) == [0]


async def test_racing_reservations_stay_within_the_limit_and_lose_nothing(buses: Buses) -> None:
    """Three gateways, amounts of all sizes, most of them committed to less while others take."""
    first = buses.open()
    gateways = [first, *(buses.another(first) for _ in range(2))]
    tokens, held, rng = Limit("tokens", 1000, HOUR_S), Limit("held", 5), random.Random(5)
    taken, holding = 0, 0

    async def taker(bus: Bus) -> None:
        nonlocal taken, holding
        for _ in range(40):
            amount = rng.randint(1, 400)
            took = await reserve(bus, (tokens, amount), (held, 1))
            if not took.granted:
                continue
            # Recorded here later than there, and less of it sooner: this is never above what is so.
            taken, holding = taken + amount, holding + 1
            assert taken <= 1000
            assert holding <= 5
            for _ in range(rng.randint(0, 20)):
                await asyncio.sleep(0)
            final = rng.randint(0, min(20, amount))
            taken, holding = taken - amount + final, holding - 1
            bus.store.limits.commit(took, [final, 0])

    await asyncio.gather(*(taker(bus) for bus in gateways for _ in range(4)))
    assert taken > 0

    await kit.becomes(lambda: left(first, (tokens, 1001), (held, 1)), [1000 - taken, 5])


async def test_held_amounts_are_released(buses: Buses) -> None:
    bus, other = buses.pair()
    held = Limit("held", 2)
    first, second = await reserve(bus, (held, 1)), await reserve(other, (held, 1))
    refused = await reserve(bus, (held, 1))
    assert (refused.granted, refused.retry_after_s) == (False, None)
    bus.store.limits.commit(first, [0])
    third = await reserve(bus, (held, 1))
    assert third.granted, "whoever gives back may take again at once"
    bus.store.limits.commit(third, [1])
    other.store.limits.commit(second, [0])

    await kit.eventually(lambda: fits(other, (held, 2)), "both places")
    assert not await fits(bus, (held, 1))


async def test_an_amount_above_the_limit_never_has_room(buses: Buses) -> None:
    bus = buses.open()
    took = await reserve(bus, (Limit("requests", 5, HOUR_S), 1), (Limit("tokens", 10, HOUR_S), 11))
    assert (took.refused_by, took.retry_after_s) == (1, None)
    assert took.rooms == (Room(5, 0.0), Room(10, 0.0))


async def test_a_changed_limit_counts_at_once(buses: Buses) -> None:
    bus = buses.open()
    assert (await reserve(bus, (Limit("key", 5, HOUR_S), 4))).granted
    assert not (await reserve(bus, (Limit("key", 3, HOUR_S), 1))).granted
    assert (await reserve(bus, (Limit("key", 6, HOUR_S), 2))).granted
    # A limit of another window is another one, and so is that of another name.
    assert (await reserve(bus, (Limit("key", 3, 60), 3))).granted
    assert (await reserve(bus, (Limit("\udc80 :{ü}", 3, HOUR_S), 3))).granted


Step = tuple[int, int, int]
STEPS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 5), st.integers(0, 6)), max_size=80)


@given(STEPS, st.integers(0, 8))
def test_a_window_is_exact_to_a_slice(steps: list[Step], most: int) -> None:
    """Each step waits some milliseconds, takes something, and later settles it to something else.

    What was taken counts while it is younger than the window, and no longer than a slice more.
    """
    now_ms = 5
    limits = MemoryLimits(lambda: now_ms)
    limit = Limit("key", most, 1)
    step_ms = slice_ms(limit)
    taken: list[tuple[int, int]] = []

    def within(age_ms: int) -> int:
        return sum(amount for at_ms, amount in taken if at_ms > now_ms - age_ms)

    async def run() -> None:
        nonlocal now_ms
        for wait_ms, wanted, final in steps:
            now_ms += wait_ms
            took = await limits.reserve([Charge(limit, wanted)])
            if took.granted:
                assert within(1000) + wanted <= most
                limits.commit(took, [final])
                taken.append((now_ms, final))
            else:
                assert within(SLICES * step_ms + step_ms) + wanted > most
                if took.retry_after_s is not None:
                    now_ms += round(took.retry_after_s * 1000)
                    assert (await limits.reserve([Charge(limit, wanted)])).granted
                    taken.append((now_ms, wanted))

    asyncio.run(run())


async def test_memory_forgets_windows_that_are_over() -> None:
    now_ms = 0
    limits = MemoryLimits(lambda: now_ms)
    for number in range(100):
        await limits.reserve([Charge(Limit(f"{number}", 1, 1)), Charge(Limit(f"{number}", 1), 0)])
    now_ms = 100_000
    took = await limits.reserve([Charge(Limit("new", 1, 1))])
    assert took.granted
    assert len(limits._counted) == 1
