"""POSIX shared memory: regions that clients register, and objects that this process makes.

A client's region is a part of an object that the client owns: it is opened, read and written here,
and never removed.

Touching a mapping kills the process (SIGBUS) where the object was made smaller, or has a hole and
the machine has no shared memory left. So a region is copied through a mapping only if it has no
holes, and no other user can make it smaller. Other regions are copied by reads and writes of the
object, which raise errors instead, at about a third of the speed.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config import MAX_INT64, RequestError, shown
from ..config.temporary import SHARED_MEMORY, new_name, own, sweep
from .tensors import MAX_NAME_LENGTH, Array, SharedMemory

MAX_REGIONS = 64
"""The most regions of one tenant."""

MAX_REGIONS_OF_ALL = 256
"""The most regions of all tenants together. Each holds two of the process's descriptors."""

_KEY = re.compile(r"/?([^/\0]{1,250})", re.DOTALL)

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

_SMALLEST = 64 << 10
"""Below this size new memory costs next to nothing."""

_COPY_BYTES = 1 << 20

_COPY_BY_TWO_BYTES = 4 << 20
"""Below this size waking a second thread isn't worthwhile."""

_copy_helper = ThreadPoolExecutor(1, "kserve-copy")


class Region(NamedTuple):
    """A registered region.

    Attributes:
        key: The name of the shared memory object, as the client gave it.
        offset: Bytes from the object's beginning.
        byte_size: Size in bytes.
    """

    key: str
    offset: int
    byte_size: int


# --- regions of clients ---------------------------------------------------------------------------


class SharedMemoryRegistry:
    """Registered regions by tenant and name. Any thread may use it.

    A copy holds the lock of its region alone: the region stays attached meanwhile, and other
    regions don't wait.
    """

    def __init__(self, max_regions: int = MAX_REGIONS, buffers: WarmBuffers | None = None) -> None:
        """Args: the most regions of one tenant, and the source of the arrays that `read` fills."""
        self._max_regions = max_regions
        self._buffers = buffers or WarmBuffers()
        self._lock = threading.Lock()
        self._regions: dict[tuple[str, str], _Attached] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int, tenant: str = "") -> None:
        """Attach an existing shared memory object; it replaces a region of the same name.

        Args:
            name: Of the region.
            key: Of the object, as `shm_open` takes it, with or without the leading slash.
            offset: Bytes from the object's beginning.
            byte_size: Size of the region in bytes.
            tenant: The region's owner.

        Raises:
            RequestError: invalid_region: the name is empty or too long, there is no such object,
                it is too small, it can't be read and written, or there are too many regions. A
                region of the same name stays.
        """
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise _invalid(
                f"the name of a region has 1 to {MAX_NAME_LENGTH} characters, and {shown(name)} "
                f"has {len(name)}"
            )
        attached = _attach(Region(key, offset, byte_size))
        with self._lock:
            before = self._regions.get((tenant, name))
            own_count = sum(owner == tenant for owner, _ in self._regions)
            full = ""
            if before is None and own_count >= self._max_regions:
                full = f"{own_count} regions are registered"
            elif before is None and len(self._regions) >= MAX_REGIONS_OF_ALL:
                full = f"{len(self._regions)} regions of all tenants are registered"
            else:
                self._regions[tenant, name] = attached
        if full:
            attached.close()
            raise _invalid(f"{full}, which is the limit; unregister some")
        if before is not None:
            before.close()

    def unregister(self, name: str = "", tenant: str = "") -> None:
        """Detach a tenant's region, or with "" all of them; idempotent."""
        with self._lock:
            keys = [each for each in self._regions if each[0] == tenant and name in ("", each[1])]
            detached = [self._regions.pop(each) for each in keys]
        for each in detached:
            each.close()

    def status(self, name: str = "", tenant: str = "") -> dict[str, Region]:
        """Return a tenant's regions by name, or only one. Raises RequestError: unknown_region."""
        with self._lock:
            found = {
                each: attached.region
                for (owner, each), attached in self._regions.items()
                if owner == tenant and name in ("", each)
            }
        if name and not found:
            raise _unknown(name)
        return found

    def read(self, place: SharedMemory, tenant: str = "") -> Array:
        """Return a copy of a place's bytes: uint8 `[byte_size]`, read-only.

        Raises:
            RequestError: unknown_region; invalid_region if the place is outside the region, or the
                client has made its object smaller; overloaded if `buffers` are exhausted.
            MemoryError: There is no memory for the copy.
        """
        with self._attached(place, tenant) as attached:
            data = self._buffers.take(place.byte_size)
            attached.copy_out(place, data)
        data.flags.writeable = False
        return data

    def write(
        self, place: SharedMemory, data: bytes | memoryview | Array, tenant: str = ""
    ) -> None:
        """Write contiguous bytes, or an array of uint8, to the beginning of a place.

        Raises:
            RequestError: As `read`; also invalid_region if the place is too small, or the machine
                has no shared memory left.
        """
        given: Array = np.frombuffer(data, np.uint8)
        if len(given) > place.byte_size:
            raise _invalid(
                f"{len(given)} bytes don't fit {shown(place.byte_size)} bytes of the region "
                f"{shown(place.region)}; leave more room for that output"
            )
        with self._attached(place, tenant) as attached:
            attached.copy_in(place, given)

    def close(self) -> None:
        """Detach all regions of all tenants."""
        for tenant in {tenant for tenant, _ in list(self._regions)}:
            self.unregister(tenant=tenant)

    @contextmanager
    def _attached(self, place: SharedMemory, tenant: str) -> Iterator[_Attached]:
        """Yield a place's region, locked. Raises RequestError."""
        while True:
            with self._lock:
                attached = self._regions.get((tenant, place.region))
            if attached is None:
                raise _unknown(place.region)
            with attached.lock:
                if attached.is_open:
                    attached.check(place)
                    yield attached
                    return
            # It was replaced or detached in between.


@dataclass
class _Attached:
    """An attached region. Everything but `close` requires its lock."""

    region: Region
    file: int
    mapping: mmap.mmap
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True

    def check(self, place: SharedMemory) -> None:
        """Raise RequestError if a place is outside the region."""
        end = place.offset + place.byte_size
        if place.offset < 0 or place.byte_size < 0 or end > self.region.byte_size:
            raise _invalid(
                f"{shown(place.byte_size)} bytes at {shown(place.offset)} are not within the "
                f"region {shown(place.region)}, which has {self.region.byte_size}"
            )

    def copy_out(self, place: SharedMemory, data: Array) -> None:
        """Fill `data`, which has the place's size. Raises RequestError."""
        if self._is_safe(place):
            copy_by_two(data, self._mapped(place, len(data)))
            return
        rest, at = data.data, self.region.offset + place.offset
        while rest:
            count = os.preadv(self.file, [rest], at)
            if not count:
                raise _shrunk(place)
            rest, at = rest[count:], at + count

    def copy_in(self, place: SharedMemory, data: Array) -> None:
        """Fill the beginning of a place. Raises RequestError."""
        if self._is_safe(place):
            copy_by_two(self._mapped(place, len(data)), data)
            return
        rest, at = data.data, self.region.offset + place.offset
        try:
            while rest:
                count = os.pwritev(self.file, [rest], at)
                rest, at = rest[count:], at + count
        except OSError as error:
            raise _invalid(
                f"the region {shown(place.region)} can't be written: {error.strerror}; its object "
                "has memory only where it was written before, so fill it with zeros first, or "
                "make room in shared memory"
            ) from None

    def close(self) -> None:
        """Detach, after a copy in progress."""
        with self.lock:
            self.is_open = False
            # Not closed: the thread of the last copy may hold a view for a moment.
            del self.mapping
            os.close(self.file)

    def _is_safe(self, place: SharedMemory) -> bool:
        """Return whether the mapping is safe to touch. Raises RequestError if the object shrank."""
        status = os.fstat(self.file)
        if status.st_size < self.region.offset + place.offset + place.byte_size:
            raise _shrunk(place)
        whole = status.st_blocks * _BLOCK_BYTES >= status.st_size
        return whole and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE

    def _mapped(self, place: SharedMemory, n_bytes: int) -> Array:
        # A mapping begins at a page.
        start = self.region.offset % mmap.ALLOCATIONGRANULARITY + place.offset
        return np.frombuffer(self.mapping, np.uint8, n_bytes, start)


def _attach(region: Region) -> _Attached:
    found = _KEY.fullmatch(region.key)
    if found is None or found[1] in (".", ".."):
        raise _invalid(
            f"{shown(region.key)} is no key of shared memory, which is a name of at most 250 "
            "characters, with no slash but one before it"
        )
    if region.offset < 0 or region.byte_size < 1 or region.offset > MAX_INT64 - region.byte_size:
        raise _invalid(
            f"a region of {shown(region.byte_size)} bytes at {shown(region.offset)} is not "
            "possible; it has at least one byte, and begins at 0 or after it"
        )
    # Python's SharedMemory would remove the object at exit.
    try:
        file = os.open(SHARED_MEMORY / found[1], _OPEN | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _invalid(
            f"there is no shared memory object {shown(region.key)}; it must be made before, and "
            f"be on the gateway's machine (in containers: with a common {SHARED_MEMORY})"
        ) from None
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its name is no Unicode"
        raise _invalid(f"the object {shown(region.key)} can't be opened: {why}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _invalid(f"{shown(region.key)} is no shared memory object")
        if status.st_size < region.offset + region.byte_size:
            raise _invalid(
                f"the object {shown(region.key)} has {status.st_size} bytes, too few for "
                f"{region.byte_size} at {region.offset}"
            )
        before = region.offset % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(file, before + region.byte_size, offset=region.offset - before)
    except BaseException as error:
        os.close(file)
        if isinstance(error, OSError | ValueError | OverflowError):
            raise _invalid(f"{shown(region.key)} can't be mapped: {shown(str(error))}") from None
        raise
    return _Attached(region, file, mapping)


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_region")


def _shrunk(place: SharedMemory) -> RequestError:
    return _invalid(
        f"the object of the region {shown(place.region)} is smaller than when it was registered; "
        "register it again"
    )


def _unknown(name: str) -> RequestError:
    return RequestError(
        f"no region {shown(name)} is registered; register it first", code="unknown_region"
    )


# --- copies ---------------------------------------------------------------------------------------


def copy_by_two(target: Array, source: Array) -> None:
    """Copy an array `[bytes]` to another of the same length, large ones by two threads.

    One thread can't fill the memory's bandwidth. The second one takes pieces as long as there are
    any; if it is busy, the caller's thread copies everything.
    """
    if len(target) < _COPY_BY_TWO_BYTES:
        np.copyto(target, source)
        return
    pieces = iter(range(0, len(target), _COPY_BYTES))

    def copy() -> None:
        for at in pieces:
            piece = slice(at, at + _COPY_BYTES)
            np.copyto(target[piece], source[piece])

    helping = _copy_helper.submit(copy)
    copy()
    if not helping.cancel():
        helping.result()


class WarmBuffers:
    """Byte arrays whose memory is reused once all views of them are gone. Any thread may use it.

    Page faults make filling a new array of 64 MiB several times slower than a reused one.
    """

    def __init__(self, max_idle_bytes: int = 256 << 20, max_used_bytes: int = 1 << 62) -> None:
        """Args: the most bytes that are kept while unused, and the most bytes in use."""
        self._max_idle_bytes = max_idle_bytes
        self._max_used_bytes = max_used_bytes
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._used_bytes = 0
        self._returned: deque[tuple[int, mmap.mmap | None]] = deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept and not in use."""
        self._collect()
        return sum(map(len, self._idle))

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        self._collect()
        return self._used_bytes

    def take(self, n_bytes: int) -> Array:
        """Return an uninitialised array `[n_bytes]` of uint8.

        Raises:
            RequestError: overloaded: the most bytes are in use.
            MemoryError: The system has none left.
        """
        # Powers of two, so that tensors of similar sizes share buffers. Untouched pages are not
        # allocated.
        size = 1 << (n_bytes - 1).bit_length() if n_bytes >= _SMALLEST else 0
        self._collect()
        with self._lock:
            if self._used_bytes + n_bytes > self._max_used_bytes:
                raise RequestError(
                    f"other requests have {self._used_bytes} bytes of tensors in memory, which "
                    f"leaves no room for {n_bytes} more; try again",
                    code="overloaded",
                )
            self._used_bytes += n_bytes
            kept = next((each for each in self._idle if len(each) == size), None)
            if kept is not None:
                self._idle.remove(kept)
        try:
            memory = kept or (_new_buffer(size) if size else None)
            array: Array = np.frombuffer(memory or bytearray(n_bytes), np.uint8, n_bytes)
        except BaseException:
            self._return(n_bytes, None)
            raise
        weakref.finalize(array, self._return, n_bytes, memory).atexit = False
        return array

    def _return(self, n_bytes: int, memory: mmap.mmap | None) -> None:
        # The garbage collector may call this at any moment, also while this thread holds the lock.
        # Then the buffer waits for the next caller.
        self._returned.append((n_bytes, memory))
        self._collect()

    def _collect(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                while self._returned:
                    n_bytes, memory = self._returned.popleft()
                    self._used_bytes -= n_bytes
                    idle = sum(map(len, self._idle))
                    if memory is not None and idle + len(memory) <= self._max_idle_bytes:
                        self._idle.append(memory)
            finally:
                self._lock.release()


def _new_buffer(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError):
        raise MemoryError(f"{size} bytes for tensors are not available") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


# --- objects of this process ----------------------------------------------------------------------


class OwnSharedMemory:
    """A shared memory object of this process, for this user alone.

    It is removed by `close`, or when the process ends, also by an exception. After SIGKILL it stays
    until the next sweep, by the next process that makes one or the next `nano-inference` process
    (`config/temporary.py`).

    Attributes:
        key: The name that `shm_open` takes.
        mapping: All of the object, prefaulted; it stays mapped while referenced.
    """

    def __init__(self, n_bytes: int, purpose: str) -> None:
        """Reserve it.

        Args:
            n_bytes: Size in bytes.
            purpose: A word for its name.

        Raises:
            OSError: There is not enough shared memory.
        """
        sweep()
        path, file, lock = _create(purpose)
        self.key = f"/{path.name}"
        self.close = weakref.finalize(self, _remove, path, lock, os.getpid())
        try:
            # Otherwise pages would be allocated on write, where their lack kills the process.
            os.posix_fallocate(file, 0, n_bytes)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.mapping = mmap.mmap(file, n_bytes, flags=flags)
        except OSError as error:
            self.close()
            raise OSError(
                error.errno,
                f"{n_bytes} bytes of shared memory are not available ({error.strerror}); enlarge "
                f"{SHARED_MEMORY}, or do without it (use_shm=False)",
            ) from None
        finally:
            os.close(file)


def _create(purpose: str) -> tuple[Path, int, int]:
    """Return path and descriptor of a new object, and the lock that keeps others from sweeping."""
    while True:
        path = SHARED_MEMORY / new_name(purpose)
        try:
            file = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise OSError(
                error.errno,
                f"shared memory can't be made in {SHARED_MEMORY} ({error.strerror}); do without "
                "it (use_shm=False)",
            ) from None
        lock = own(path)
        if lock is not None:
            return path, file, lock
        os.close(file)


def _remove(path: Path, lock: int, owner: int) -> None:
    # A fork of the owner runs this at its end, too.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
    os.close(lock)
