"""KV blocks in a folder, which survive a restart."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from errno import ELOOP, ENOSPC, ENOTDIR, ENXIO, EPERM
from pathlib import Path
from stat import S_ISREG

import xxhash

from .....config import ModelError

_MAGIC = b"nanokv02"
_HEADER_BYTES = len(_MAGIC) + 16
_ENTRY = struct.Struct("16s16s8s")
_NO_ENTRY = bytes(_ENTRY.size)

MOST_FOLDERS = 1024
"""Executors with the same layout that may share a folder at a time."""


def places_within(limit_bytes: int, block_bytes: int) -> int:
    """Return the number of blocks that fit a folder of this size."""
    return max(limit_bytes - _HEADER_BYTES, 0) // (block_bytes + _ENTRY.size)


class BlockFolder:
    """Blocks in one file, and an index of them in another, for one process and one user.

    Snapshots have two files of their own, `states` and `states-index`, beside them.

    The file `blocks` is an array of places. The file `index` has a header (magic, layout) and, for
    each place, an entry: the block's name, a checksum of its bytes, and one of the entry. A block
    is written before its entry, so that a process which is killed in between leaves no entry.
    Nothing is synced, which would take longer than the writes: after a power failure any part of
    both files may be missing, and a block counts only if both checksums are right.

    With a file for each block, reading took four times as long from disk and 1.3 times as long from
    the page cache, and writing three times as long (benchmarks/kv_tiers.py's blocks, 192 KiB each).

    `read` is for any thread, everything else for one at a time.
    """

    def __init__(
        self,
        path: Path,
        layout: str,
        block_bytes: int,
        num_places: int,
        *,
        files: Sequence[str] = ("blocks", "index"),
        beside: BlockFolder | None = None,
    ) -> None:
        """Open the first folder of this layout that no other process uses.

        Args:
            path: The folder, with a subfolder for each layout.
            layout: Digest of the layout of a block's bytes.
            block_bytes: Size of a block.
            num_places: The most blocks to hold. Others that are there are dropped.
            files: Names of both files.
            beside: Open the folder of these files, too; None for another.

        Raises:
            ModelError: It can't be used.
        """
        self._block_bytes = block_bytes
        self._num_places = num_places
        self._header = _MAGIC + bytes.fromhex(layout)
        self._found: dict[bytes, tuple[int, bytes]] = {}
        self._free: list[int] = []
        self._num_used = 0
        self._descriptors: list[int] = []
        try:
            if beside is None:
                self._place, folder = _take_folder(path / layout)
            else:  # a copy of the descriptor keeps the lock, too
                self._place, folder = beside._place, os.dup(beside._descriptors[0])
            self._descriptors.append(folder)
            for file in files:
                flags = os.O_RDWR | os.O_CREAT
                self._descriptors.append(_open_private(self._place / file, flags, folder))
            _, self._blocks, self._index = self._descriptors
            self._load()
        except OSError as error:
            self.close()
            raise ModelError(
                f"engine.kv_disk_path {str(path)!r} can't be used: {error.strerror}; give a folder "
                "that this user alone may write to"
            ) from None

    def names(self) -> list[bytes]:
        """Return the names of all blocks."""
        return list(self._found)

    def write(self, name: bytes, block: memoryview) -> None:
        """Write a block. Raises OSError; then there is none of that name."""
        self.drop(name)
        place = self._take_place()
        checksum = xxhash.xxh3_128_digest(block)
        try:
            _write(self._blocks, block, place * self._block_bytes)
            self._write_entry(place, _entry(place, name, checksum))
        except OSError:
            self._free.append(place)
            raise
        self._found[name] = (place, checksum)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Read a block to memory. Returns whether it is whole."""
        # A block that is dropped meanwhile is whole, or has another one's bytes and is not.
        place, checksum = self._found.get(name, (-1, b""))
        if place < 0:
            return False
        try:
            os.preadv(self._blocks, [block], place * self._block_bytes)
        except OSError:
            return False
        return xxhash.xxh3_128_digest(block) == checksum

    def uncache(self) -> None:
        """Let later reads come from the disk, as far as the system can. Raises OSError."""
        if hasattr(os, "posix_fadvise"):
            os.fdatasync(self._blocks)
            os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def drop(self, name: bytes) -> None:
        """Drop a block, if it is there. The file is empty again after the last one."""
        place, _ = self._found.pop(name, (-1, b""))
        if place < 0:
            return
        self._free.append(place)
        # An entry that stays is found by the next start, and is right or doesn't fit its bytes.
        with suppress(OSError):
            if self._found:
                self._write_entry(place, _NO_ENTRY)
            else:
                self._truncate(0)

    def close(self) -> None:
        """Leave the folder to other processes."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _load(self) -> None:
        """Find the whole entries whose blocks are not cut off."""
        size = _HEADER_BYTES + self._num_places * _ENTRY.size
        data = os.pread(self._index, min(size, os.fstat(self._index).st_size), 0)
        if data[:_HEADER_BYTES] != self._header:
            self._truncate(0)
            _write(self._index, self._header, 0)
            return
        whole = os.fstat(self._blocks).st_size // self._block_bytes
        self._num_used = min((len(data) - _HEADER_BYTES) // _ENTRY.size, whole)
        entries = memoryview(data)[_HEADER_BYTES : _HEADER_BYTES + self._num_used * _ENTRY.size]
        for place, entry in enumerate(_ENTRY.iter_unpack(entries)):
            name, checksum, _ = entry
            if b"".join(entry) == _entry(place, name, checksum) and name not in self._found:
                self._found[name] = (place, checksum)
            else:
                self._free.append(place)
        self._truncate(self._num_used)

    def _take_place(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used == self._num_places:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        self._num_used += 1
        return self._num_used - 1

    def _write_entry(self, place: int, entry: bytes) -> None:
        _write(self._index, entry, _HEADER_BYTES + place * _ENTRY.size)

    def _truncate(self, num_used: int) -> None:
        """Free the space after so many places."""
        os.ftruncate(self._blocks, num_used * self._block_bytes)
        os.ftruncate(self._index, _HEADER_BYTES + num_used * _ENTRY.size)
        self._free = [place for place in self._free if place < num_used]
        self._num_used = num_used


def _entry(place: int, name: bytes, checksum: bytes) -> bytes:
    # The place is in the checksum: an entry counts nowhere else, and zeros are none.
    return name + checksum + xxhash.xxh3_64_digest(name + checksum, seed=place + 1)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Raises OSError: not all could be written."""
    if os.pwrite(descriptor, data, offset) < len(data):
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def _take_folder(parent: Path) -> tuple[Path, int]:
    """Return the first unused subfolder, and a descriptor of it, which locks it."""
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = _open_private(parent, os.O_DIRECTORY)
    try:
        for number in range(MOST_FOLDERS):
            folder = parent / str(number)
            with suppress(FileExistsError):
                os.mkdir(folder.name, 0o700, dir_fd=place)
            lock = _open_private(folder, os.O_DIRECTORY, place)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return folder, lock
    finally:
        os.close(place)
    raise FileExistsError(17, f"more than {MOST_FOLDERS} executors use it")


def _open_private(path: Path, flags: int, place: int | None = None) -> int:
    """Open a folder (`O_DIRECTORY`) or file that no other user can read, replace or write to.

    A link could lead to a file of this user elsewhere, which would be overwritten.

    Args:
        path: The folder or file.
        flags: Flags of `os.open`.
        place: A descriptor of its parent; None to follow the path there.

    Raises:
        PermissionError: It is a link, of another kind, or not of this user alone.
        OSError: It can't be opened.
    """
    is_folder = bool(flags & os.O_DIRECTORY)
    kind, mode = ("folder", "700") if is_folder else ("file", "600")
    why = f"{path} is not a {kind} of this user alone (mode {mode}, no link)"
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path if place is None else path.name, flags, 0o600, dir_fd=place)
    except OSError as error:
        if error.errno in (ELOOP, ENOTDIR, ENXIO):
            raise PermissionError(EPERM, why) from None
        raise
    status = os.fstat(descriptor)
    right_kind = is_folder or (S_ISREG(status.st_mode) and status.st_nlink == 1)
    if not right_kind or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(EPERM, why)
    return descriptor
