"""Decoded images are stored once, held while in use, and evicted for want of room."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference.bus import Bus
from nano_inference.store.images import ImageUsage, MemoryImages, StoredImage, name_of
from nano_inference.store.redis import images as redis_images

from ..buses import STORES

BUSES = STORES


def image(number: int, width: int = 4, height: int = 2) -> StoredImage:
    return StoredImage(width, height, bytes([number]) * (3 * width * height + 1))


def name(image: StoredImage) -> str:
    return name_of(repr(image))


BYTES = len(image(0).features)


async def put(bus: Bus, number: int, **how: Any) -> str:
    made = image(number)
    assert await bus.store.images.put(name(made), made, **how)
    return name(made)


async def test_an_image_is_stored_under_its_id(bus: Bus) -> None:
    images, made = bus.store.images, image(1)
    assert await images.get(name(made)) is None
    assert await images.put(name(made), made)
    assert await images.put(name(made), made)
    assert await images.get(name(made)) == made
    assert await images.usage() == ImageUsage(1, 0, BYTES)


async def test_sizes_that_are_no_multiple_of_a_piece(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_images, "PIECE_BYTES", 16)
    for width in (1, 5, 16, 128, 129):
        made = StoredImage(width, 1, bytes(range(3 * width)[:256]) + bytes(max(0, 3 * width - 256)))
        assert await bus.store.images.put(name(made), made)
        assert await bus.store.images.get(name(made)) == made


async def test_held_images_are_never_evicted(bus: Bus) -> None:
    images, room = bus.store.images, {"max_bytes": 2 * BYTES}
    first, second = await put(bus, 1, holder="a"), await put(bus, 2, holder="b")
    third = image(3)
    assert not await images.put(name(third), third, holder="c", **room)
    assert await images.usage() == ImageUsage(2, 2, 2 * BYTES)
    await images.release([second], "b")
    assert await images.put(name(third), third, holder="c", **room)
    assert await images.get(second) is None
    assert await images.get(first) == image(1)
    assert await images.usage() == ImageUsage(2, 2, 2 * BYTES)


async def test_the_longest_unused_is_evicted_first(bus: Bus) -> None:
    images, room = bus.store.images, {"max_bytes": 3 * BYTES}
    ids = [await put(bus, number) for number in range(3)]
    await asyncio.sleep(0.005)  # of a clock in milliseconds
    assert await images.hold([ids[0], "0" * 64], "a") == [(4, 2), None]
    await images.release([ids[0]], "a")
    await put(bus, 9, **room)
    await put(bus, 8, **room)
    assert [await images.get(id) is not None for id in ids] == [True, False, False]


async def test_each_holder_has_a_lease_of_its_own(bus: Bus) -> None:
    images, room = bus.store.images, {"max_bytes": BYTES}
    id = await put(bus, 1, holder="a")
    await put(bus, 1, holder="b")
    for holder in ("b", "b", "unknown"):
        await images.release([id], holder)
    other = image(2)
    assert not await images.put(name(other), other, **room)
    await images.release([id], "a")
    assert await images.put(name(other), other, **room)
    await images.release([id], "a")


async def test_a_lease_ends_by_itself_unless_it_is_extended(bus: Bus) -> None:
    """So a killed process holds nothing for ever."""
    images, room = bus.store.images, {"max_bytes": BYTES}
    id, other = await put(bus, 1, holder="a", for_s=0.02), image(2)
    assert await images.hold([id], "a", 60) == [(4, 2)]
    assert await images.hold([id], "a", 0.001) == [(4, 2)], "no shorter one"
    await asyncio.sleep(0.03)
    assert not await images.put(name(other), other, **room)
    await images.release([id], "a")
    await images.hold([id], "b", 0.001)
    await asyncio.sleep(0.005)
    assert await images.put(name(other), other, **room)


async def test_processes_share_the_images(buses: Any) -> None:
    first, second = buses.pair()
    id = await put(first, 1, holder="a")
    assert await second.store.images.get(id) == image(1)
    await second.store.images.release([id], "a")
    assert (await first.store.images.usage()).held == 0


async def test_two_writers_of_one_image_store_it_once(buses: Any) -> None:
    first, second = buses.pair()
    await asyncio.gather(put(first, 1, holder="a"), put(second, 1, holder="b"))
    assert await first.store.images.usage() == ImageUsage(1, 1, BYTES)
    assert await first.store.images.get(name(image(1))) == image(1)


async def test_no_half_written_image_is_seen_nor_kept_for_ever(
    redis_buses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, made = redis_buses.open(), image(1, 64, 64)
    key = b"{%s:images}:part:x" % redis_buses.prefix.encode()
    monkeypatch.setattr(redis_images, "PIECE_BYTES", 1000)
    async with Redis.from_url(redis_buses.url) as redis:
        for commands in redis_images._batches(key, made.features):
            for command in commands:
                await redis.execute_command(*command)
            assert await bus.store.images.get(name(made)) is None
        assert await redis.get(key) == made.features
        assert 0 < await redis.ttl(key) <= redis_images._PART_TTL_S
        assert await bus.store.images.put(name(made), made)
        parts = [each async for each in redis.scan_iter("*part:*")]
        assert parts == [key], "one's own is renamed"
        assert (
            await redis.ttl(
                b"{%s:images}:data:%s" % (redis_buses.prefix.encode(), name(made).encode())
            )
            == -1
        )


async def test_leases_in_memory_follow_their_clock() -> None:
    now = 0.0
    images, made, other = MemoryImages(lambda: now), image(1), image(2)
    await images.put(name(made), made, holder="a", for_s=10)
    now = 9.9
    assert not await images.put(name(other), other, max_bytes=BYTES)
    now = 10
    assert await images.put(name(other), other, max_bytes=BYTES)
