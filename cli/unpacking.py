"""Unpacks a model's archive, and trusts nothing in it.

Only plain files and folders come out. A model needs no links, and with links an archive can write
outside of its folder whatever checks its paths (CVE-2025-4517 of tarfile's own `data` filter).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import stat
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Protocol, cast

from ..config import ModelError, shown

MOST_MEMBERS = 10_000
"""Files and folders of one archive. The largest models have a few hundred."""

MOST_NAME_BYTES = 255
"""Of a file's name, as file systems have it."""

MOST_PATH_BYTES = 1024
MOST_DEPTH = 16
"""Folders within each other."""

MOST_RATIO = 50
"""Bytes unpacked for each of the archive. Weights hardly shrink, and text to a tenth."""

_SLACK_BYTES = 64 << 20
"""What small archives may have beyond that ratio."""

_MOST_HEADER_BYTES = 32 << 20
"""Between two files of a tar, and in all of a zip: what is read into memory to find files."""

_PIECE = 1 << 20

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, ValueError, RuntimeError),
)
"""What is raised by archives that are none, or broken, and by those that mean harm."""


class Refused(ValueError):
    """An archive with something that no model needs."""


class _Member(NamedTuple):
    """A file or a folder of an archive.

    Attributes:
        path: As the archive has it.
        is_folder: Else it is a plain file.
        size: Of the file as it is declared, in bytes.
        content: None for a folder.
    """

    path: str
    is_folder: bool
    size: int
    content: IO[bytes] | None


class _Readable(Protocol):
    """What is needed of a file, or of what decompresses one."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class _Headers:
    """A file of which only so much may be read at a time, but for the members' contents."""

    def __init__(self, file: _Readable) -> None:
        self._file = file
        self._left: int | None = _MOST_HEADER_BYTES

    def contents(self) -> None:
        """What follows is content, whose size is checked elsewhere."""
        self._left = None

    def headers(self) -> None:
        """Headers follow."""
        self._left = _MOST_HEADER_BYTES

    def read(self, size: int = -1) -> bytes:
        if self._left is None:
            return self._file.read(size)
        found = b"" if size > self._left else self._file.read(size if size >= 0 else self._left)
        self._left -= max(size, len(found))
        if self._left <= 0:
            raise Refused(f"its headers have more than {_MOST_HEADER_BYTES} bytes")
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Does nothing; whoever has opened the file closes it."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a tar or a zip into a folder that is empty.

    Args:
        archive: A zip by its suffix, else a tar, compressed or not.

    Raises:
        ModelError: It is broken, has what no model needs, or would not fit.
        OSError: The folder can't be written.
    """
    free = shutil.disk_usage(folder).free
    writer = _Writer(folder, free, archive.stat().st_size * MOST_RATIO + _SLACK_BYTES)
    try:
        with archive.open("rb") as file:
            is_zip = archive.suffix.lower() == ".zip"
            for member in _zipped(file) if is_zip else _tarred(file, writer):
                writer.add(member)
    except _BROKEN as error:
        # The next try has it anew.
        archive.unlink()
        raise ModelError(f"{archive.name} can't be unpacked: {error}") from None


class _Writer:
    """Writes members, within the bounds of one archive."""

    def __init__(self, folder: Path, free: int, most: int) -> None:
        """Args: where to; how many bytes are free there; how many the archive may have."""
        self._folder = folder
        self._free = free
        self._most = most
        self._members = 0
        self._declared = 0
        self._unpacked = 0
        # Of each path as file systems may compare it: as it was first, and whether it is a folder.
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], bool]] = {}

    def add(self, member: _Member) -> None:
        """Writes a member.

        Raises:
            Refused: It is what no model needs.
            ModelError: There is no room for it.
        """
        self._members += 1
        if self._members > MOST_MEMBERS:
            raise Refused(f"it has more than {MOST_MEMBERS} files and folders")
        parts = _parts(member.path)
        if not parts:
            if member.is_folder:
                return
            raise Refused(f"the file {shown(member.path)} has no name")
        self._enter(parts, member)
        if member.size < 0:
            raise Refused(f"{shown(member.path)} has a negative size")
        self._declared += member.size
        if self._declared > self._free:
            raise ModelError(
                f"the archive holds {self._declared} bytes or more, and {self._free} are free in "
                f"{self._folder}"
            )
        self._check(self._declared)
        path = self._folder.joinpath(*parts)
        if member.content is None:
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        written = 0
        with path.open("xb") as out:
            while piece := member.content.read(_PIECE):
                written += len(piece)
                if written > member.size:
                    raise Refused(f"{shown(member.path)} is longer than it says")
                out.write(piece)
        if written < member.size:
            raise Refused(f"{shown(member.path)} is shorter than it says")
        self.count(written)

    def count(self, size: int) -> None:
        """Counts bytes that came out of the archive.

        Raises:
            Refused: They are too many for its size.
        """
        self._unpacked += size
        self._check(self._unpacked)

    def _check(self, size: int) -> None:
        if size > self._most:
            raise Refused(
                f"it unpacks to {size} bytes or more, over {MOST_RATIO} times its own size"
            )

    def _enter(self, parts: tuple[str, ...], member: _Member) -> None:
        """Raises Refused: the path is that of another file, on some file system at least."""
        for length in range(1, len(parts) + 1):
            own, is_folder = parts[:length], member.is_folder or length < len(parts)
            key = tuple(unicodedata.normalize("NFC", part).casefold() for part in own)
            before, was_folder = self._known.get(key, (own, True))
            if before != own or not was_folder or (key in self._known and not is_folder):
                raise Refused(f"{shown(member.path)} is there twice, as {shown('/'.join(before))}")
            self._known[key] = (own, is_folder)


def _parts(path: str) -> tuple[str, ...]:
    """The parts of a path, which stays in its folder and has a name on every file system.

    Raises:
        Refused: It does not.
    """
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if path.startswith("/") or ".." in parts or "\\" in path or (parts and ":" in parts[0]):
        raise Refused(f"{shown(path)} may be outside of its folder")
    if not path.isprintable():
        raise Refused(f"{shown(path)} has characters that can't be shown")
    if len(path.encode()) > MOST_PATH_BYTES or len(parts) > MOST_DEPTH:
        raise Refused(
            f"{shown(path)} has over {MOST_PATH_BYTES} bytes, or is over {MOST_DEPTH} folders deep"
        )
    if any(len(part.encode()) > MOST_NAME_BYTES for part in parts):
        raise Refused(f"{shown(path)} has a name of over {MOST_NAME_BYTES} bytes")
    return parts


def _tarred(file: IO[bytes], writer: _Writer) -> Iterator[_Member]:
    with _decompressed(file) as stream:
        headers = _Headers(cast(_Readable, stream))
        with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as tar:
            while (found := tar.next()) is not None:
                if not (found.isfile() or found.isdir()) or found.issparse():
                    raise Refused(f"{shown(found.name)} is no plain file and no folder")
                if found.isdir():
                    yield _Member(found.name, True, 0, None)
                    continue
                headers.contents()
                yield _Member(found.name, False, found.size, tar.extractfile(found))
                headers.headers()
        # Behind its end is what tells whether bytes were lost; tarfile does not look there.
        while piece := stream.read(_PIECE):
            writer.count(len(piece))


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    """What a compressed file holds, by its first bytes."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if start.startswith(b"BZh"):
        return cast(IO[bytes], bz2.BZ2File(file))
    if start == b"\xfd7zXZ\0":
        return cast(IO[bytes], lzma.LZMAFile(file))
    return file


def _zipped(file: IO[bytes]) -> Iterator[_Member]:
    headers = _Headers(file)
    with zipfile.ZipFile(cast(IO[bytes], headers)) as opened:
        headers.contents()
        for found in opened.infolist():
            kind = stat.S_IFMT(found.external_attr >> 16)
            if found.is_dir():
                yield _Member(found.filename, True, 0, None)
            elif kind not in (0, stat.S_IFREG):
                raise Refused(f"{shown(found.filename)} is no plain file and no folder")
            else:
                with opened.open(found) as content:
                    yield _Member(found.filename, False, found.file_size, content)
