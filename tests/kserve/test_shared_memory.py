"""Clients register regions of their shared memory, which is read and written and never removed."""

from __future__ import annotations

import errno
import gc
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.utils.shared_memory as triton

from nano_inference.config import RequestError
from nano_inference.config.temporary import SHARED_MEMORY
from nano_inference.kserve import shared_memory
from nano_inference.kserve.shared_memory import (
    Region,
    SharedMemoryRegistry,
    WarmBuffers,
    copy_by_two,
)
from nano_inference.kserve.tensors import SharedMemory

from ..errors import raises
from ..programs import run

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="there is no /dev/shm")

SIZE = 200_000
PAGE = os.sysconf("SC_PAGE_SIZE")


class Object:
    """A shared memory object of a client.

    Attributes:
        key: Its name.
        path: Where Linux shows it.
        registry: Where the test registers it.
    """

    registry: SharedMemoryRegistry

    def __init__(self, size: int = SIZE, *, mode: int = 0o600, full: bool = True) -> None:
        self.key = f"/nano-test-{secrets.token_hex(8)}"
        self.path = SHARED_MEMORY / self.key[1:]
        self.path.touch(mode)
        self.path.chmod(mode)
        os.truncate(self.path, size)
        if full:
            self.fill(bytes(range(251)) * (size // 251 + 1))

    def fill(self, data: bytes) -> None:
        size = self.path.stat().st_size
        with self.path.open("r+b") as file:
            file.write(data[:size])

    def data(self) -> bytes:
        return self.path.read_bytes()


@pytest.fixture(params=[0o600, 0o666], ids=["own", "others may write"])
def there(request: pytest.FixtureRequest, registry: SharedMemoryRegistry) -> Iterator[Object]:
    """An object that is copied through a mapping, and one that is not."""
    made = Object(mode=request.param)
    made.registry = registry
    yield made
    made.path.unlink()


@pytest.fixture
def registry() -> Iterator[SharedMemoryRegistry]:
    """A registry of at most three regions, which closes every descriptor."""
    before = open_objects()
    found = SharedMemoryRegistry(max_regions=3)
    yield found
    found.unregister()
    assert open_objects() == before


def open_objects() -> int:
    """Number of this process's descriptors of shared memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith(f"{SHARED_MEMORY}/") for link in links)


def test_any_buffer_is_written_and_may_be_smaller_than_its_place(there: Object) -> None:
    there.registry.register("part", there.key[1:], PAGE + 7, 1000)  # the slash may be left out
    before = there.data()
    for data in (b"0123", memoryview(b"4567"), np.frombuffer(b"four", np.uint8)):
        there.registry.write(SharedMemory("part", 100, 10), data)
        assert there.data() == before[: PAGE + 17] + bytes(data) + before[PAGE + 21 :]


def test_read_bytes_are_a_copy(there: Object) -> None:
    there.registry.register("all", there.key, 0, SIZE)
    before = there.data()
    data = there.registry.read(SharedMemory("all", SIZE))
    assert (data.dtype, data.shape, data.flags.writeable) == (np.uint8, (SIZE,), False)
    there.fill(bytes(SIZE))
    there.registry.unregister("all")
    assert data.tobytes() == before


def test_zero_bytes_are_read_and_written(there: Object) -> None:
    there.registry.register("all", there.key, 0, SIZE)
    before = there.data()
    assert there.registry.read(SharedMemory("all", 0, SIZE)).shape == (0,)
    there.registry.write(SharedMemory("all", 0, SIZE), b"")
    assert there.data() == before


def test_status_lists_regions(there: Object) -> None:
    there.registry.register("a", there.key, 0, SIZE)
    there.registry.register("b", there.key[1:], 8, 16)
    a, b = Region(there.key, 0, SIZE), Region(there.key[1:], 8, 16)
    assert there.registry.status() == {"a": a, "b": b}
    assert there.registry.status("b") == {"b": b}
    with raises("unknown_region", "'c'"):
        there.registry.status("c")


def test_unregister_is_idempotent(there: Object) -> None:
    for name in "abc":
        there.registry.register(name, there.key, 0, SIZE)
    for _ in range(2):
        there.registry.unregister("b")
        assert list(there.registry.status()) == ["a", "c"]
    with raises("unknown_region", "'b'"):
        there.registry.read(SharedMemory("b", 1))
    for _ in range(2):
        there.registry.unregister()
        assert there.registry.status() == {}
    assert there.path.exists()


@pytest.mark.parametrize(
    ("name", "key", "offset", "byte_size", "why"),
    [
        ("", "/{key}", 0, 1, "1 to 256 characters"),
        ("x" * 257, "/{key}", 0, 1, "1 to 256 characters"),
        ("r", "", 0, 1, "no key"),
        ("r", "/", 0, 1, "no key"),
        ("r", "..", 0, 1, "no key"),
        ("r", "/.", 0, 1, "no key"),
        ("r", "//{key}", 0, 1, "no key"),
        ("r", "/../shm/{key}", 0, 1, "no key"),
        ("r", "{key}\0", 0, 1, "no key"),
        ("r", "k" * 300, 0, 1, "no key"),
        ("r", "\ud800", 0, 1, "no Unicode"),
        ("r", "/{key}-other", 0, 1, "there is no shared memory object"),
        ("r", "é" * 250, 0, 1, "can't be opened"),
        ("r", "/{key}", -1, 10, "not possible"),
        ("r", "/{key}", 0, 0, "not possible"),
        ("r", "/{key}", 0, -1, "not possible"),
        ("r", "/{key}", 0, SIZE + 1, "too few"),
        ("r", "/{key}", SIZE, 1, "too few"),
        ("r", "/{key}", 1, 2**63 - 1, "not possible"),
        ("r", "/{key}", 2**64 - 1, 2, "not possible"),
        ("r", "/{key}", 10**400, 1, "not possible"),
    ],
)
def test_impossible_regions_are_refused(
    there: Object, name: str, key: str, offset: int, byte_size: int, why: str
) -> None:
    with raises("invalid_region", why):
        there.registry.register(name, key.replace("{key}", there.key[1:]), offset, byte_size)
    assert there.registry.status() == {}


def test_only_shared_memory_is_opened(registry: SharedMemoryRegistry, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(100))
    path = SHARED_MEMORY / f"nano-test-{secrets.token_hex(8)}"
    for make in (
        lambda: path.symlink_to(tmp_path / "secret"),
        lambda: path.mkdir(),
        lambda: os.mkfifo(path),
    ):
        make()
        try:
            with raises("invalid_region"):
                registry.register("r", path.name, 0, 1)
        finally:
            path.rmdir() if path.is_dir() else path.unlink()


def test_the_number_of_regions_is_limited(there: Object) -> None:
    for name in "abc":
        there.registry.register(name, there.key, 0, SIZE)
    with raises("invalid_region", "3 regions"):
        there.registry.register("d", there.key, 0, SIZE)
    there.registry.register("c", there.key, 1, 1)  # instead of another
    there.registry.unregister("a")
    there.registry.register("d", there.key, 0, SIZE)
    assert list(there.registry.status()) == ["b", "c", "d"]


@pytest.mark.parametrize(
    "place", [(-1, 5), (5, -5), (0, 101), (100, 1), (2**63, 1), (1, 2**63), (-(2**70), 2**70 + 5)]
)
def test_a_place_outside_its_region_is_refused(there: Object, place: tuple[int, int]) -> None:
    there.registry.register("r", there.key, 50, 100)
    before = there.data()
    outside = SharedMemory("r", place[1], place[0])
    with raises("invalid_region"):
        there.registry.read(outside)
    with raises("invalid_region"):
        there.registry.write(outside, b"")
    with raises("invalid_region", "more room"):
        there.registry.write(SharedMemory("r", 5, 0), b"123456")
    assert there.data() == before


def test_a_shrunk_object_is_refused(there: Object) -> None:
    there.registry.register("r", there.key, 0, SIZE)
    os.truncate(there.path, 3 * PAGE)
    for action in (
        lambda place: there.registry.read(place),
        lambda place: there.registry.write(place, bytes(place.byte_size)),
    ):
        action(SharedMemory("r", 3 * PAGE))
        for outside in (SharedMemory("r", SIZE), SharedMemory("r", 1, 3 * PAGE)):
            with raises("invalid_region", "smaller than when it was registered"):
                action(outside)
    assert there.path.stat().st_size == 3 * PAGE


def test_shrinking_during_a_copy_is_an_error_and_no_signal(
    registry: SharedMemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In objects that other users can shrink; touching a mapping would be SIGBUS."""
    there = Object(mode=0o666)
    registry.register("r", there.key, 0, SIZE)
    seen = os.stat(there.path)
    monkeypatch.setattr(shared_memory.os, "fstat", lambda file: seen)
    os.truncate(there.path, 0)
    with raises("invalid_region", "smaller than when it was registered"):
        registry.read(SharedMemory("r", SIZE))
    registry.write(SharedMemory("r", 4, SIZE - 4), b"grow")
    monkeypatch.undo()
    there.path.unlink()


@pytest.mark.parametrize(("mode", "others"), [(0o600, False), (0o620, True), (0o602, True)])
def test_only_objects_that_no_other_user_can_shrink_are_mapped(
    registry: SharedMemoryRegistry, monkeypatch: pytest.MonkeyPatch, mode: int, others: bool
) -> None:
    there = Object(mode=mode)
    registry.register("r", there.key, 0, SIZE)
    calls: list[int] = []
    really = os.preadv

    def preadv(file: int, buffers: Sequence[memoryview], at: int) -> int:
        calls.append(at)
        return really(file, buffers, at)

    monkeypatch.setattr(shared_memory.os, "preadv", preadv)
    assert registry.read(SharedMemory("r", SIZE)).tobytes() == there.data()
    assert bool(calls) == others
    calls.clear()
    me = os.geteuid()
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: me + 1)
    assert registry.read(SharedMemory("r", SIZE)).tobytes() == there.data()
    assert calls, "it is another user's"
    there.path.unlink()


def test_holes_are_read_as_zeros_and_stay_holes(registry: SharedMemoryRegistry) -> None:
    """To touch one through a mapping takes memory, and kills the process where none is left."""
    there = Object(100 * PAGE, full=False)
    registry.register("r", there.key, 0, 100 * PAGE)
    assert not registry.read(SharedMemory("r", 100 * PAGE)).any()
    assert there.path.stat().st_blocks == 0
    registry.write(SharedMemory("r", PAGE, 7 * PAGE), b"1" * PAGE)
    assert there.path.stat().st_blocks * 512 < 100 * PAGE
    expected = bytes(7 * PAGE) + b"1" * PAGE + bytes(92 * PAGE)
    assert registry.read(SharedMemory("r", 100 * PAGE)).tobytes() == expected
    there.path.unlink()


def test_no_memory_for_a_hole_is_an_error(
    registry: SharedMemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Object(full=False)
    registry.register("r", there.key, 0, SIZE)
    left = [PAGE, 10]

    def pwritev(file: int, buffers: Sequence[memoryview], at: int) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(file, buffers[0][: left.pop()], at)

    monkeypatch.setattr(shared_memory.os, "pwritev", pwritev)
    with raises("invalid_region", "No space left on device"):
        registry.write(SharedMemory("r", SIZE), b"x" * SIZE)
    assert there.data() == b"x" * (PAGE + 10) + bytes(SIZE - PAGE - 10)
    there.path.unlink()


def test_a_clients_object_is_not_removed(tmp_path: Path) -> None:
    """Python's own SharedMemory removes at exit objects that it only opened."""
    there = Object()
    ran = run(
        f"""
from nano_inference.kserve.shared_memory import SharedMemoryRegistry
from nano_inference.kserve.tensors import SharedMemory
registry = SharedMemoryRegistry()
registry.register("kept", {there.key!r}, 0, {SIZE})
registry.register("left", {there.key!r}, 0, {SIZE})
registry.unregister("left")
print(registry.read(SharedMemory("kept", 3)).tolist())
""",
        tmp_path,
        whole_end=True,
    )
    assert (ran.status, ran.stdout, ran.stderr) == (0, "[0, 1, 2]\n", "")
    there.path.unlink()


def test_tritons_shared_memory_utilities(registry: SharedMemoryRegistry) -> None:
    key = f"nano-test-{secrets.token_hex(8)}"
    handle = triton.create_shared_memory_region("r", key, 4096)
    try:
        values = np.arange(100, dtype=np.float32)
        triton.set_shared_memory_region(handle, [values], offset=16)
        registry.register("r", key, 0, 4096)
        data = registry.read(SharedMemory("r", values.nbytes, 16))
        assert (data.view(np.float32) == values).all()
        registry.write(SharedMemory("r", values.nbytes, 1600), (2 * values).tobytes())
        found = triton.get_contents_as_numpy(handle, np.float32, [100], offset=1600)
        assert (found == 2 * values).all()
        del found
        registry.unregister()
    finally:
        triton.destroy_shared_memory_region(handle)
    assert not (SHARED_MEMORY / key).exists()


def test_a_region_stays_attached_during_a_copy(
    there: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.registry.register("r", there.key, 0, SIZE)
    there.registry.register("other", there.key, 0, SIZE)
    copying, go_on, gone = threading.Event(), threading.Event(), threading.Event()
    really = shared_memory._Attached.copy_out

    def copy_out(self: object, place: SharedMemory, data: np.ndarray) -> None:  # type: ignore[type-arg]
        if place.region == "r":
            copying.set()
            assert go_on.wait(30)
        really(self, place, data)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_memory._Attached, "copy_out", copy_out)
    read: list[bytes] = []

    def take() -> None:
        read.append(there.registry.read(SharedMemory("r", SIZE)).tobytes())

    def take_away() -> None:
        there.registry.unregister("r")
        gone.set()

    threads = [threading.Thread(target=take), threading.Thread(target=take_away)]
    threads[0].start()
    assert copying.wait(30)
    threads[1].start()
    there.registry.read(SharedMemory("other", SIZE))  # others need not wait
    while "r" in there.registry.status():
        pass
    assert not gone.is_set()
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert gone.is_set()
    assert read == [there.data()]


def test_threads_use_regions_that_come_and_go(there: Object) -> None:
    registry = SharedMemoryRegistry()
    errors: list[BaseException] = []

    def use(number: int) -> None:
        piece = SharedMemory("r", 40_000, number * 40_000)
        try:
            for turn in range(300):
                try:
                    if number == 4:
                        registry.register("r", there.key, 0, SIZE)
                        if turn % 3 == 0:
                            registry.unregister("r")
                    else:
                        registry.write(piece, bytes([turn % 256]) * piece.byte_size)
                        assert len(set(registry.read(piece).tobytes())) == 1
                except RequestError as error:
                    assert error.code == "unknown_region"  # noqa: PT017
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    there.fill(bytes(SIZE))
    threads = [threading.Thread(target=use, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    registry.unregister()


# --- buffers --------------------------------------------------------------------------------------


BUFFER = 256 << 10


def test_memory_is_reused() -> None:
    buffers = WarmBuffers()
    first = buffers.take(BUFFER)
    address = first.ctypes.data
    del first
    assert buffers.idle_bytes == BUFFER
    again = buffers.take(BUFFER - 100)
    assert again.ctypes.data == address
    assert again.shape == (BUFFER - 100,)
    assert buffers.idle_bytes == 0


def test_no_more_is_kept_than_allowed() -> None:
    buffers = WarmBuffers(max_idle_bytes=3 * BUFFER)
    taken = [buffers.take(BUFFER) for _ in range(5)]
    taken.append(buffers.take(4 * BUFFER))
    taken.clear()
    assert buffers.idle_bytes == 3 * BUFFER


def test_small_buffers_are_not_kept() -> None:
    buffers = WarmBuffers()
    assert [buffers.take(size).shape for size in (0, 1, 1000)] == [(0,), (1,), (1000,)]
    assert (buffers.idle_bytes, buffers.used_bytes) == (0, 0)


def test_no_more_is_in_use_than_allowed() -> None:
    buffers = WarmBuffers(max_used_bytes=BUFFER + 100)
    large, small = buffers.take(BUFFER), buffers.take(100)
    view = large[5:]
    del large
    for size in (1, BUFFER, 10**15):
        with raises("overloaded", "leaves no room"):
            buffers.take(size)
    assert buffers.used_bytes == BUFFER + 100
    del small
    buffers.take(100)
    del view
    assert buffers.used_bytes == 0
    buffers.take(BUFFER)


def test_the_garbage_collector_may_run_during_take() -> None:
    """Which is on the same thread, so that to wait for the lock would be for ever."""
    buffers = WarmBuffers()
    circle: list[object] = [buffers.take(BUFFER)]
    circle.append(circle)
    gone = weakref.ref(circle[0])
    del circle
    with buffers._lock:
        gc.collect()
        assert gone() is None
    assert (buffers.idle_bytes, buffers.used_bytes) == (BUFFER, 0)


def test_an_impossible_size_is_a_memory_error() -> None:
    buffers = WarmBuffers()
    with pytest.raises(MemoryError, match="not available"):
        buffers.take(1 << 61)
    assert buffers.used_bytes == 0


# --- copies ---------------------------------------------------------------------------------------


COPIES = [0, 1, 1 << 20, (4 << 20) - 1, 4 << 20, (9 << 20) + 12345]


@pytest.mark.parametrize("size", COPIES)
def test_every_byte_is_copied(size: int) -> None:
    source = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    target = np.zeros(size, np.uint8)
    copy_by_two(target, source)
    assert np.array_equal(target, source)


def test_a_busy_helper_is_not_awaited() -> None:
    free = threading.Event()
    busy = shared_memory._copy_helper.submit(free.wait, 30)
    source = np.arange(5 << 20, dtype=np.uint32).view(np.uint8)
    target = np.zeros_like(source)
    copy_by_two(target, source)
    assert not busy.done()
    free.set()
    assert busy.result()
    assert np.array_equal(target, source)


def test_errors_are_raised() -> None:
    source = np.zeros(8 << 20, np.uint8)
    target = np.zeros(8 << 20, np.uint8)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_by_two(target, source)
