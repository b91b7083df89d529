"""Shared memory of clients: regions that they register, and tensors in them.

A region is a part of a POSIX shared memory object that a client has made, and that stays its own:
here it is opened, read and written, and never removed.

A mapping of memory that is not there any more, because somebody has made the object smaller, or
that can't be had, because the object has holes and the machine no memory left for them, kills the
process that touches it (SIGBUS). So a region is only copied through its mapping where it has no
holes, and where nobody but this process's own user, who may end it anyway, can make it smaller. Any
other is copied by reads and writes of the object, which fail instead; they are about a third as
fast.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from ..config import RequestError, shown
from ..config.temporary import SHARED_MEMORY
from .buffers import WarmBuffers
from .copying import copy_by_two
from .tensors import MAX_NAME_LENGTH, Array, SharedMemory

MAX_REGIONS = 64

_KEY = re.compile(r"/?([^/\0]{1,250})", re.DOTALL)

_MAX_SIZE = 2**63 - 1

_BLOCK_BYTES = 512
"""What `st_blocks` counts."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_READ_AND_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

T = TypeVar("T")


class Region(NamedTuple):
    """What was registered.

    Attributes:
        key: The name of the shared memory object, as the client gave it.
        offset: Where in the object the region begins, in bytes.
        byte_size: How long it is.
    """

    key: str
    offset: int
    byte_size: int


class SharedMemoryRegistry:
    """Regions by the names under which clients have registered them.

    It may be used by several threads. A copy is made under the lock of its region alone, so that
    nobody can take the region away meanwhile, and other regions need not wait.
    """

    def __init__(self, max_regions: int = MAX_REGIONS, buffers: WarmBuffers | None = None) -> None:
        """Args: how many regions there may be, and what `read` takes its arrays from."""
        self._max_regions = max_regions
        self._buffers = buffers or WarmBuffers()
        self._lock = threading.Lock()
        self._regions: dict[str, _Attached] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Attaches a shared memory object that exists, instead of what had this name before.

        Args:
            name: Under which tensors refer to it.
            key: Of the object, as `shm_open` takes it; the slash before it may be left out.
            offset: Where in the object the region begins, in bytes.
            byte_size: How long it is.

        Raises:
            RequestError: invalid_region: the name is empty or too long, there is no such object,
                it is too small, it can't be read and written, or there are too many regions. What
                had the name before stays.
        """
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise _invalid(
                f"the name of a region has 1 to {MAX_NAME_LENGTH} characters, and {shown(name)} "
                f"has {len(name)}"
            )
        attached = _attach(Region(key, offset, byte_size))
        with self._lock:
            before = self._regions.get(name)
            fits = before is not None or len(self._regions) < self._max_regions
            if fits:
                self._regions[name] = attached
        if not fits:
            attached.close()
            raise _invalid(
                f"{self._max_regions} regions are registered, which is as many as there may be; "
                "unregister some"
            )
        if before is not None:
            before.close()

    def unregister(self, name: str = "") -> None:
        """Detaches a region, or all of them for ""; nothing happens where it is not there."""
        with self._lock:
            names = [name] if name else list(self._regions)
            gone = [self._regions.pop(each) for each in names if each in self._regions]
        for each in gone:
            each.close()

    def status(self, name: str = "") -> dict[str, Region]:
        """The regions by their names, or the one of a name. Raises RequestError: unknown_region."""
        with self._lock:
            if name and name not in self._regions:
                raise _unknown(name)
            names = [name] if name else list(self._regions)
            return {each: self._regions[each].region for each in names}

    def read(self, place: SharedMemory) -> Array:
        """A copy of a piece of a region: `[byte_size]` of uint8, read-only.

        Raises:
            RequestError: unknown_region; invalid_region when the piece is not within the region, or
                the client has made its object smaller; overloaded when others have read as much as
                `buffers` may give.
            MemoryError: There is none for the copy.
        """

        def copy(attached: _Attached) -> Array:
            attached.check(place)
            data = self._buffers.take(place.byte_size)
            attached.copy_out(place, data)
            data.flags.writeable = False
            return data

        return self._locked(place.region, copy)

    def write(self, place: SharedMemory, data: bytes | memoryview | Array) -> None:
        """Puts bytes into a piece of a region, which may be larger than they are.

        Args:
            place: The piece.
            data: Contiguous bytes, or an array of uint8.

        Raises:
            RequestError: As `read`; invalid_region too when the piece is too small, or the machine
                has no shared memory left.
        """
        given: Array = np.frombuffer(data, np.uint8)
        if len(given) > place.byte_size:
            raise _invalid(
                f"{len(given)} bytes are to be put into {shown(place.byte_size)} bytes of the "
                f"region {shown(place.region)}; leave more room for that output"
            )

        def copy(attached: _Attached) -> None:
            attached.check(place)
            attached.copy_in(place, given)

        self._locked(place.region, copy)

    def _locked(self, name: str, action: Callable[[_Attached], T]) -> T:
        while True:
            with self._lock:
                attached = self._regions.get(name)
            if attached is None:
                raise _unknown(name)
            with attached.lock:
                if attached.is_open:
                    return action(attached)
            # It was replaced or detached in between.


class _Attached:
    """A region whose object is open. All but `close` is done under its lock."""

    def __init__(self, region: Region, file: int, mapping: mmap.mmap) -> None:
        self.region = region
        self.lock = threading.Lock()
        self.is_open = True
        self._file = file
        self._mapping = mapping

    def check(self, place: SharedMemory) -> None:
        """Raises RequestError when a place is not within the region."""
        end = place.offset + place.byte_size
        if place.offset < 0 or place.byte_size < 0 or end > self.region.byte_size:
            raise _invalid(
                f"{shown(place.byte_size)} bytes at {shown(place.offset)} are not within the "
                f"region {shown(place.region)}, which has {self.region.byte_size}"
            )

    def copy_out(self, place: SharedMemory, data: Array) -> None:
        """Fills `data`, which is as long as the place. Raises RequestError."""
        if self._may_be_touched(place):
            copy_by_two(data, self._mapped(place, len(data)))
            return
        rest, at = data.data, self.region.offset + place.offset
        while rest:
            count = os.preadv(self._file, [rest], at)
            if not count:
                raise _shrunk(place)
            rest, at = rest[count:], at + count

    def copy_in(self, place: SharedMemory, data: Array) -> None:
        """Fills the beginning of a place. Raises RequestError."""
        if self._may_be_touched(place):
            copy_by_two(self._mapped(place, len(data)), data)
            return
        rest, at = data.data, self.region.offset + place.offset
        try:
            while rest:
                count = os.pwritev(self._file, [rest], at)
                rest, at = rest[count:], at + count
        except OSError as error:
            raise _invalid(
                f"the region {shown(place.region)} can't be written: {error.strerror}; its object "
                "has memory only where it was written before, so fill it with zeros first, or "
                "make room in shared memory"
            ) from None

    def close(self) -> None:
        """Waits for a copy under way."""
        with self.lock:
            self.is_open = False
            # Once nobody looks at it, which a thread that has just copied may for a moment.
            del self._mapping
            os.close(self._file)

    def _may_be_touched(self, place: SharedMemory) -> bool:
        """Whether a mapping of it is there, and stays. Raises RequestError when it is not."""
        status = os.fstat(self._file)
        if status.st_size < self.region.offset + place.offset + place.byte_size:
            raise _shrunk(place)
        whole = status.st_blocks * _BLOCK_BYTES >= status.st_size
        own = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE
        return whole and own

    def _mapped(self, place: SharedMemory, n_bytes: int) -> Array:
        # A mapping begins where a page does.
        start = self.region.offset % mmap.ALLOCATIONGRANULARITY + place.offset
        return np.frombuffer(self._mapping, np.uint8, n_bytes, start)


def _attach(region: Region) -> _Attached:
    found = _KEY.fullmatch(region.key)
    if found is None or found[1] in (".", ".."):
        raise _invalid(
            f"{shown(region.key)} is no key of shared memory, which is a name of at most 250 "
            "characters, with no slash but one before it"
        )
    if region.offset < 0 or region.byte_size < 1 or region.offset > _MAX_SIZE - region.byte_size:
        raise _invalid(
            f"a region of {shown(region.byte_size)} bytes at {shown(region.offset)} is none; it "
            "has at least one byte, and begins at 0 or after it"
        )
    file = _opened(region.key, found[1])
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


def _opened(key: str, name: str) -> int:
    """A descriptor; without Python's SharedMemory, which would remove the object at exit."""
    try:
        return os.open(
            SHARED_MEMORY / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except FileNotFoundError:
        raise _invalid(
            f"there is no shared memory object {shown(key)}; it must be made before, and be on "
            f"the gateway's machine (in containers: with a common {SHARED_MEMORY})"
        ) from None
    except (OSError, UnicodeEncodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "its name is no Unicode"
        raise _invalid(f"the object {shown(key)} can't be opened: {why}") from None


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
