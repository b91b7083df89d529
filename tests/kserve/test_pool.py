"""Slots have one owner at a time, are assigned in FIFO order, and end with their arrays."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.config import NanoInferenceError
from nano_inference.config.temporary import SHARED_MEMORY, sweep
from nano_inference.kserve.pool import BufferPool, PoolAcquireTimeout, PoolSlot
from nano_inference.kserve.tensors import SharedMemory, TensorError

from ..programs import run

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")

PAST_NS = 1
LIMIT_S = 20


@pytest.fixture(params=[True, False], ids=["shared", "inline"])
def pool(request: pytest.FixtureRequest) -> Iterator[BufferPool]:
    with BufferPool(8000, 8, request.param) as found:
        yield found


async def within_limit(task: asyncio.Task[PoolSlot]) -> PoolSlot:
    return await asyncio.wait_for(task, LIMIT_S)


async def settle() -> None:
    """Until all tasks wait for something."""
    for _ in range(5):
        await asyncio.sleep(0)


# --- acquiring and releasing ----------------------------------------------------------------------


async def test_slots_are_acquired_and_released(pool: BufferPool) -> None:
    first, second = await pool.acquire_slot(), pool.acquire_slot_blocking(3)
    assert (pool.n_slots, pool.slot_bytes, pool.free_slots) == (8, 1000, 4)
    assert (first.offset, first.n_bytes) == (0, 1000)
    assert (second.offset, second.n_bytes) == (1000, 3000)
    pool.release_slot(first)
    assert pool.free_slots == 5
    with await pool.acquire_slot() as third:
        assert third.offset == 0
        pool.release_slot(second)
        assert not third.is_released
    assert third.is_released
    assert pool.free_slots == 8


async def test_a_second_release_is_an_error(pool: BufferPool) -> None:
    slot = await pool.acquire_slot()
    pool.release_slot(slot)
    other = await pool.acquire_slot()
    with pytest.raises(RuntimeError, match="released before"):
        pool.release_slot(slot)
    assert pool.free_slots == 7, "the other's is the same, and still his"
    with (
        BufferPool(10, 2, use_shm=False) as another,
        pytest.raises(ValueError, match="of the pool"),
    ):
        another.release_slot(other)
    with other:
        pool.release_slot(other)  # and the end of the block does not


async def test_a_span_larger_than_the_pool_is_refused_at_once(pool: BufferPool) -> None:
    held = await pool.acquire_slot(8)
    for span in (9, 0, -1):
        with pytest.raises(ValueError, match="can never be free"):
            await pool.acquire_slot(span)
        with pytest.raises(ValueError, match="can never be free"):
            pool.acquire_slot_blocking(span)
    assert pool.waiting == 0
    pool.release_slot(held)


async def test_a_waiter_leaves_the_queue_at_its_deadline(pool: BufferPool) -> None:
    """Before the error, so that the next waiter is served."""
    held = await pool.acquire_slot(5)
    before_ns = time.monotonic_ns()
    deadline_ns = time.time_ns() + 50_000_000
    many = asyncio.create_task(pool.acquire_slot(4, deadline_ns))
    await settle()
    few = asyncio.create_task(pool.acquire_slot(3))
    await settle()
    assert pool.waiting == 2
    with pytest.raises(PoolAcquireTimeout, match="4 slots") as caught:
        await within_limit(many)
    assert time.time_ns() >= deadline_ns
    assert isinstance(caught.value, NanoInferenceError)
    assert (caught.value.code, caught.value.span) == ("pool_timeout", 4)
    assert 0 < caught.value.waited_ns <= time.monotonic_ns() - before_ns
    assert (await within_limit(few)).offset == 5000
    assert pool.waiting == 0
    with pytest.raises(PoolAcquireTimeout):
        pool.acquire_slot_blocking(1, time.time_ns() + 1_000_000)
    assert pool.waiting == 0
    pool.release_slot(held)


async def test_free_slots_are_acquired_after_the_deadline(pool: BufferPool) -> None:
    slots = [await pool.acquire_slot(4, PAST_NS), pool.acquire_slot_blocking(4, PAST_NS)]
    with pytest.raises(PoolAcquireTimeout):
        await pool.acquire_slot(1, PAST_NS)
    with pytest.raises(PoolAcquireTimeout):
        pool.acquire_slot_blocking(1, PAST_NS)
    for slot in slots:
        pool.release_slot(slot)
    assert pool.free_slots == 8


async def test_a_waiter_cancelled_while_served_passes_its_slots_on(pool: BufferPool) -> None:
    held = await pool.acquire_slot(8)
    first, second = (asyncio.create_task(pool.acquire_slot(8)) for _ in range(2))
    await settle()
    pool.release_slot(held)
    first.cancel()  # it has slots, and has not yet run
    slot = await within_limit(second)
    assert first.cancelled()
    pool.release_slot(slot)
    assert (pool.free_slots, pool.waiting) == (8, 0)


async def test_closing_wakes_waiters_with_an_error(pool: BufferPool) -> None:
    held = await pool.acquire_slot(8)
    array = held.scratch(4, np.int64)
    waiting = asyncio.create_task(pool.acquire_slot())
    blocked = asyncio.create_task(asyncio.to_thread(pool.acquire_slot_blocking))
    async with asyncio.timeout(LIMIT_S):
        while pool.waiting < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    pool.close()
    for task in (waiting, blocked, pool.acquire_slot()):
        with pytest.raises(RuntimeError, match="is closed"):
            await asyncio.wait_for(task, LIMIT_S)
    with pytest.raises(RuntimeError, match="is closed"):
        pool.acquire_slot_blocking()
    assert held.is_released
    assert array.shape == (0,)
    pool.release_slot(held)  # as at the end of a block
    pool.close()


# --- 64 tasks ----------------------------------------------------------------------------------


async def use(
    pool: BufferPool, number: int, span: int, deadline_ns: int, may_end: asyncio.Event
) -> bool:
    """Acquire slots, fill them, and check that no other owner writes them; False: not in time."""
    try:
        slot = await pool.acquire_slot(span, deadline_ns)
    except PoolAcquireTimeout:
        return False
    with slot:
        array = slot.scratch(slot.n_bytes, np.uint8)
        array[:] = number
        try:
            await may_end.wait()
        finally:
            assert (array == number).all(), "never two owners"
    assert array.shape == (0,)
    return True


USERS = 64
ACTIONS = st.tuples(st.sampled_from(["end", "cancel", "wait"]), st.integers(0, USERS - 1))


@given(
    n_slots=st.integers(1, 12),
    spans=st.lists(st.integers(1, 12), min_size=USERS, max_size=USERS),
    impatient=st.sets(st.integers(0, USERS - 1)),
    actions=st.lists(ACTIONS, max_size=2 * USERS),
)
@pytest.mark.soak
def test_64_tasks_with_random_spans_deadlines_and_cancellations(
    n_slots: int, spans: list[int], impatient: set[int], actions: list[tuple[str, int]]
) -> None:
    """There are never two owners, and every task ends."""
    cancelled: set[int] = set()

    async def play() -> list[bool | BaseException]:
        may_end = [asyncio.Event() for _ in spans]
        with BufferPool(16 * n_slots, n_slots, use_shm=False) as pool:
            # A deadline that is over is one that passes while others come and go.
            deadlines_ns = [PAST_NS if number in impatient else 0 for number in range(USERS)]
            each = zip(range(USERS), spans, deadlines_ns, may_end, strict=True)
            tasks = [
                asyncio.create_task(use(pool, number, min(span, n_slots), *more))
                for number, span, *more in each
            ]
            for what, number in actions:
                if what == "end":
                    may_end[number].set()
                elif what == "cancel":
                    cancelled.add(number)
                    tasks[number].cancel()
                else:
                    await asyncio.sleep(0)
            for event in may_end:
                event.set()
            async with asyncio.timeout(LIMIT_S):
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert (pool.free_slots, pool.waiting) == (n_slots, 0)
            return ended

    for number, end in enumerate(asyncio.run(play())):
        if isinstance(end, asyncio.CancelledError):
            assert number in cancelled
        else:
            assert end is True or (end is False and number in impatient), end


# --- arrays in slots --------------------------------------------------------------------------


@pytest.fixture
async def slot(pool: BufferPool) -> AsyncIterator[PoolSlot]:
    """One in the middle, of 2000 bytes."""
    with await pool.acquire_slot(), await pool.acquire_slot(2) as found:
        yield found


SPECS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4), max_size=3),
        st.sampled_from([np.bool_, np.uint8, np.int16, np.float32, np.float64, ml_dtypes.bfloat16]),
    ),
    max_size=5,
)


@given(calls=st.lists(SPECS, max_size=4), slot_bytes=st.integers(1, 1500))
def test_arrays_are_disjoint_aligned_and_within_their_slot(
    calls: list[list[tuple[list[int], type]]], slot_bytes: int
) -> None:
    pool = BufferPool(3 * slot_bytes, 3, use_shm=False)
    with pool, pool.acquire_slot_blocking() as before, pool.acquire_slot_blocking(2) as slot:
        edge = before.scratch(before.n_bytes, np.uint8)
        edge[:] = 0
        used = np.zeros(3 * slot_bytes, bool)
        made = []
        for specs in calls:
            try:
                arrays = slot.scratch(list(specs))
            except ValueError:
                continue
            assert [(list(each.shape), each.dtype) for each in arrays] == specs
            made += arrays
        for array in made:
            assert array.flags.aligned
            offset = slot.offset_of(array)
            assert offset is not None
            assert slot.offset <= offset <= offset + array.nbytes <= slot.offset + slot.n_bytes
            assert not used[offset : offset + array.nbytes].any()
            used[offset : offset + array.nbytes] = True
            array[...] = 1
        assert not edge.any()


async def test_all_arrays_of_a_list_are_made_or_none(slot: PoolSlot) -> None:
    for specs in (
        [(1500, np.uint8), (501, np.uint8)],
        [(10, np.uint8), (-1, np.uint8)],
        [(10, np.uint8), ((2**40, 2**40), np.float64)],
        [(10, np.uint8), (1, np.object_)],
    ):
        with pytest.raises(ValueError, match=r"left; acquire more|below 0|Python objects"):
            slot.scratch(list(specs))
    assert slot.offset_of(slot.scratch(2000, np.uint8)) == slot.offset
    with pytest.raises(ValueError, match="1 bytes were requested of a slot with 0 left"):
        slot.scratch(1, np.uint8)


async def test_arrays_end_with_the_release(pool: BufferPool) -> None:
    slot = await pool.acquire_slot(8)
    array, other = slot.scratch([((3, 4), np.float32), (5, np.int64)])
    array[...], other[...] = 1, 2
    looked = slot.read(SharedMemory(pool.name, 4))
    pool.release_slot(slot)
    for each in (array, other, looked):
        assert (each.shape, each.dtype, each.flags.writeable) == ((0,), "V1", False)
        with pytest.raises(IndexError):
            each[0]
        with pytest.raises(TypeError):
            each + 1
        with pytest.raises(TypeError):
            each.sum()
        with pytest.raises(ValueError, match="read-only"):
            each[...] = 0
    for use in (
        lambda: slot.scratch(1, np.uint8),
        lambda: slot.subslot(1),
        lambda: slot.offset_of(array),
        lambda: slot.read(SharedMemory(pool.name, 1)),
        lambda: slot.write(SharedMemory(pool.name, 1), b"1"),
    ):
        with pytest.raises(RuntimeError, match="released before"):
            use()


async def test_a_view_of_an_ended_array_keeps_the_memory_mapped() -> None:
    """It can't be found; but the memory stays mapped for it, behind the pool's end too."""
    pool = BufferPool(1 << 20)
    with await pool.acquire_slot() as slot:
        array = slot.scratch(1000, np.uint8)
        array[:] = 1
        view = array[5:].reshape(5, 199)
    with await pool.acquire_slot() as slot:
        slot.scratch(1000, np.uint8)[:] = 2
    pool.close()
    del pool, slot, array
    gc.collect()
    assert (view == 2).all()
    view[...] = 3
    assert (view == 3).all()


async def test_subslots_end_with_their_slot(pool: BufferPool, slot: PoolSlot) -> None:
    first = slot.scratch(8, np.uint8)
    part, rest = slot.subslot(100), slot.subslot(1892)
    a, b = part.scratch(100, np.uint8), rest.scratch(1892, np.uint8)
    inner = slot.subslot(0)
    assert [slot.offset_of(each) for each in (first, a, b)] == [1000, 1008, 1108]
    assert (part.offset_of(a), part.offset_of(b), part.offset_of(first)) == (1008, None, None)
    for full in (slot, part, rest, inner):
        with pytest.raises(ValueError, match="0 left"):
            full.scratch(1, np.uint8)
    with pytest.raises(ValueError, match="0 or more"):
        slot.subslot(-1)
    free = pool.free_slots
    for _ in range(2):
        pool.release_slot(part)
    with part:
        a[:] = 1
    assert (pool.free_slots, a.sum(), slot.is_released) == (free, 100, False)
    pool.release_slot(slot)
    assert (a.shape, b.shape, part.is_released) == ((0,), (0,), True)
    with pytest.raises(RuntimeError, match="released before"):
        part.scratch(0, np.uint8)


async def test_array_at_a_filled_place(pool: BufferPool, slot: PoolSlot) -> None:
    slot.write(SharedMemory(pool.name, 16, 1000), np.arange(4, dtype="<i4").view(np.uint8))
    array = slot.array_at(SharedMemory(pool.name, 16, 1000), (2, 2), np.int32)
    assert array.tolist() == [[0, 1], [2, 3]]
    assert slot.offset_of(array) == 1000
    assert slot.array_at(SharedMemory(pool.name, 16, 1000), 1, np.int32).tolist() == [0]
    with pytest.raises(ValueError, match="more bytes than its place"):
        slot.array_at(SharedMemory(pool.name, 16, 1000), 5, np.int32)
    with pytest.raises(ValueError, match="Python objects"):
        slot.array_at(SharedMemory(pool.name, 16, 1000), 1, np.object_)
    with pytest.raises(TensorError, match="not within the slot"):
        slot.array_at(SharedMemory(pool.name, 16, 2990), 4, np.int32)
    pool.release_slot(slot)
    assert array.shape == (0,)


# --- the memory -------------------------------------------------------------------------------


def ours() -> set[str]:
    return {name for name in os.listdir(SHARED_MEMORY) if "-pool-" in name}


def test_a_pool_makes_and_removes_its_memory() -> None:
    with BufferPool(1 << 20) as first, BufferPool(1 << 20, name="given") as second:
        paths = [SHARED_MEMORY / pool.key[1:] for pool in (first, second)]
        for path in paths:
            status = path.stat()
            assert (status.st_size, status.st_mode & 0o777) == (1 << 20, 0o600)
            assert status.st_blocks * 512 >= 1 << 20, "all of it is there"
        assert first.name == first.key[1:]
        assert second.name == "given"
        assert first.key != second.key
        sweep()
        assert all(path.exists() for path in paths)
    assert not any(path.exists() for path in paths)


def test_a_private_pool_makes_no_object() -> None:
    before = ours()
    with BufferPool(1000, use_shm=False) as first, BufferPool(1000, use_shm=False) as second:
        assert first.key == second.key == ""
        assert first.name != second.name
        assert not ours() - before


@pytest.mark.parametrize("sizes", [(0, 1), (7, 8), (100, 0), (-8, 8)])
def test_an_empty_slot_is_refused(sizes: tuple[int, int]) -> None:
    before = ours()
    with pytest.raises(ValueError, match="slots"):
        BufferPool(*sizes)
    assert not ours() - before


def test_too_much_shared_memory_is_refused_without_leftovers() -> None:
    before = ours()
    with pytest.raises(OSError, match="enlarge /dev/shm"):
        BufferPool(1 << 60)
    assert not ours() - before


MAKER = """
import os, sys
from nano_inference.kserve.pool import BufferPool
pool = BufferPool(1 << 20)
slot = pool.acquire_slot_blocking()
array = slot.scratch(1000, "u1")
print(pool.key, flush=True)
"""


def test_an_exception_ends_the_memory_with_its_process(tmp_path: Path) -> None:
    ran = run(MAKER + "raise ValueError('over')", tmp_path, whole_end=True)
    assert ran.status == 1
    assert "ValueError: over" in ran.stderr
    assert not (SHARED_MEMORY / ran.stdout.strip()[1:]).exists()


def test_a_fork_does_not_remove_its_parents_object(tmp_path: Path) -> None:
    code = """
child = os.fork()
if child == 0:
    try:
        pool.acquire_slot_blocking()
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit()
os.waitpid(child, 0)
print(os.path.exists("/dev/shm" + pool.key), flush=True)
"""
    ran = run(MAKER + code, tmp_path, whole_end=True)
    key, refusal, exists = ran.stdout.splitlines()
    assert "of the process that made it" in refusal
    assert exists == "True"
    assert not (SHARED_MEMORY / key[1:]).exists()
