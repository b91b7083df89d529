"""A limit as one process sees it."""

from __future__ import annotations

import math

import msgspec

from nano_inference.store.limits import SLICES, Limit, Room, slice_ms
from nano_inference.store.shares import FORGOTTEN_MS, Counted

MINUTE = Limit("key", 100, 60)
HELD = Limit("key", 5)
STEP_MS = 1000
NOW_MS = 1_000_000_000


def share_of(limit: Limit, amount: int, at_ms: int, until_ms: int = 0) -> bytes:
    """Return another process's report of the amount that it reserved."""
    other = Counted(b"", limit)
    other.put(other.slice_at(at_ms), amount)
    return other.encoded(until_ms)


def test_a_window_is_at_least_as_long_as_its_slices() -> None:
    for window_s in range(1, 200):
        assert window_s * 1000 <= slice_ms(Limit("key", 1, window_s)) * SLICES < window_s * 1100


def test_other_processes_use_counts_within_the_window() -> None:
    counted = Counted(b"", MINUTE)
    counted.put(counted.slice_at(NOW_MS), 10)
    counted.read_others(
        [share_of(MINUTE, 30, NOW_MS), share_of(MINUTE, 5, NOW_MS - 60_000)], NOW_MS
    )
    assert counted.sum == 45
    assert counted.room(100, NOW_MS) == Room(55, 61.0)
    assert counted.wait_ms(5, NOW_MS) == 1000
    assert counted.wait_ms(6, NOW_MS) == 61_000
    assert counted.wait_ms(46, NOW_MS) == math.inf
    counted.advance(NOW_MS + 1000)
    assert counted.sum == 40
    counted.advance(NOW_MS + 61_000)
    assert (counted.sum, counted.room(100, NOW_MS + 61_000)) == (0, Room(100, 0.0))


def test_other_processes_holds_count_while_their_lease_lasts() -> None:
    counted = Counted(b"", HELD)
    shares = [share_of(HELD, 2, NOW_MS, NOW_MS + 1), share_of(HELD, 1, NOW_MS, NOW_MS)]
    counted.read_others(shares, NOW_MS)
    assert counted.sum == 2
    assert counted.wait_ms(1, NOW_MS) == math.inf


def test_unreadable_shares_are_ignored() -> None:
    counted = Counted(b"", HELD)
    newer = msgspec.msgpack.encode([{0: 1}, NOW_MS + 1, "a field more"])
    unreadable = {b"a": b"", b"b": b"\xc1", b"c": b"\x91\x05"}
    counted.read_others([newer, *unreadable.values()], NOW_MS)
    assert counted.sum == 1
    assert counted.forgotten(unreadable, NOW_MS) == []


def test_dead_processes_are_dropped_after_a_long_time() -> None:
    counted = Counted(b"", MINUTE)
    ended_ms = NOW_MS + (SLICES + 1) * STEP_MS
    shares = {b"dead": share_of(MINUTE, 1, NOW_MS)}
    assert counted.forgotten(shares, ended_ms + FORGOTTEN_MS) == []
    assert counted.forgotten(shares, ended_ms + FORGOTTEN_MS + 1) == [b"dead"]
    shares = {b"dead": share_of(HELD, 1, NOW_MS, ended_ms)}
    assert Counted(b"", HELD).forgotten(shares, ended_ms + FORGOTTEN_MS + 1) == [b"dead"]


def test_only_amounts_that_count_must_be_written() -> None:
    counted = Counted(b"", MINUTE)
    assert not counted.is_unwritten(0)
    counted.put(counted.slice_at(NOW_MS), 1)
    counted.put(counted.slice_at(NOW_MS) + 1, 1)
    assert counted.is_unwritten(0)
    counted.written = dict(counted.own)
    counted.advance(NOW_MS + 61_000)
    assert len(counted.own) == 1
    assert not counted.is_unwritten(0), "the others see themselves that it counts no more"
    counted.advance(NOW_MS + 62_000)
    assert counted.is_unwritten(0), "a share of which nothing is left is removed"


def test_a_lease_is_written_again() -> None:
    counted = Counted(b"", HELD)
    counted.put(0, 1)
    counted.written, counted.renew_at_s = dict(counted.own), 10
    assert [counted.is_unwritten(now_s) for now_s in (9, 10)] == [False, True]
    counted.commit(0, -1)
    assert counted.own == {}
