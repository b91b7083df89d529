"""KV blocks as files of one folder, which survive a restart."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR

import xxhash

from .....config import ModelError

_SUFFIX = ".kv"
_UNFINISHED = ".part"
_MAGIC = b"nanokv01"
_HEADER_BYTES = len(_MAGIC) + 16 + 16 + 16

MOST_FOLDERS = 1024
"""Executors with the same layout that may share a folder at a time."""


def file_bytes(block_bytes: int) -> int:
    """Return the size of the file of a block with so many bytes."""
    return _HEADER_BYTES + block_bytes


class BlockFolder:
    """One file per block, for one process and one user.

    A file is a header (magic, layout, name, checksum of the bytes) and the block's bytes. It gets
    its name when it is whole; anything else is dropped when the folder is opened, or read.
    """

    def __init__(self, path: Path, layout: str, block_bytes: int) -> None:
        """Open the first folder of this layout that no other process uses.

        Raises:
            ModelError: It can't be used.
        """
        self._layout = bytes.fromhex(layout)
        self._file_bytes = file_bytes(block_bytes)
        try:
            self._folder, self._lock = _take_folder(path / layout)
        except OSError as error:
            raise ModelError(
                f"engine.kv_disk_path {str(path)!r} can't be used: {error.strerror}; give a folder "
                "that this user may write to"
            ) from None

    def names(self) -> list[bytes]:
        """Return the names of all whole blocks, and delete other files. A folder that can't be read
        has none."""
        found: list[bytes] = []
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                name = _name_of(entry.name)
                # The other thread may delete a file meanwhile.
                with suppress(OSError):
                    if name is not None and entry.stat().st_size == self._file_bytes:
                        found.append(name)
                    elif entry.name.endswith((_SUFFIX, _UNFINISHED)):
                        os.unlink(entry.path)
        return found

    def write(self, name: bytes, block: memoryview) -> None:
        """Write a block. Raises OSError; then there is no file of that name."""
        path = self._path(name)
        unfinished = path.with_suffix(_UNFINISHED)
        checksum = xxhash.xxh3_128_digest(block)
        try:
            with unfinished.open("wb") as file:
                file.write(_MAGIC + self._layout + name + checksum)
                file.write(block)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, name: bytes, block: memoryview) -> bool:
        """Read a block into a buffer. Returns whether it is whole; if not, its file is deleted."""
        path = self._path(name)
        header = bytearray(_HEADER_BYTES)
        try:
            with path.open("rb") as file:
                size = file.readinto(header) + file.readinto(block)
                size += len(file.read(1))
        except OSError:
            size = 0
        wanted = _MAGIC + self._layout + name
        if size == self._file_bytes and header == wanted + xxhash.xxh3_128_digest(block):
            return True
        self.drop(name)
        return False

    def drop(self, name: bytes) -> None:
        """Delete a block, if it is there."""
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError:
            return  # it stays until the folder is opened again, and is never read

    def close(self) -> None:
        """Leave the folder to other processes."""
        os.close(self._lock)

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}{_SUFFIX}"


def _take_folder(parent: Path) -> tuple[Path, int]:
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(parent)
    for number in range(MOST_FOLDERS):
        folder = parent / str(number)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return folder, lock
    raise FileExistsError(17, f"more than {MOST_FOLDERS} executors use it")


def _check_private(folder: Path) -> None:
    """Raises PermissionError: another user could read or replace its files."""
    status = folder.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or not S_ISDIR(status.st_mode):
        raise PermissionError(1, f"{folder} is not a folder of this user alone (mode 700)")


def _name_of(file: str) -> bytes | None:
    stem, dot, suffix = file.partition(".")
    try:
        name = bytes.fromhex(stem)
    except ValueError:
        return None
    return name if dot + suffix == _SUFFIX and len(name) == 16 else None
