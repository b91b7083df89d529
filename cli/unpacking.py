"""Unpacks a model's archive, which may be hostile.

Only plain files and folders are accepted. A model needs no links, and with links an archive can
write outside of its folder despite checks of its paths (CVE-2025-4517 of tarfile's `data` filter).
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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Protocol, cast

from ..config import ModelError, shown

MOST_MEMBERS = 10_000
"""Files and folders in an archive. The largest models have a few hundred."""

MOST_NAME_BYTES = 255
"""Length of a file's name, the limit of most file systems."""

MOST_PATH_BYTES = 1024
MOST_DEPTH = 16
"""Nested folders."""

MOST_RATIO = 50
"""Unpacked bytes per byte of the archive. Weights hardly shrink, and text to a tenth."""

_SLACK_BYTES = 64 << 20
"""Unpacked bytes of a small archive beyond that ratio."""

_MOST_HEADER_BYTES = 32 << 20
"""Read into memory between two files of a tar, or for all files of a zip."""

_PIECE = 1 << 20

_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError),
    *(EOFError, ValueError, RuntimeError),
)
"""Raised for files that are no archives, for broken and for hostile archives."""


class Refused(ValueError):
    """An archive has content that no model needs."""


class _Member(NamedTuple):
    """A file or a folder of an archive.

    Attributes:
        path: As in the archive.
        is_folder: Whether it is a folder, else a plain file.
        size: Declared size in bytes.
        content: None for a folder.
    """

    path: str
    is_folder: bool
    size: int
    content: IO[bytes] | None


class _Readable(Protocol):
    """A file, or a decompressor."""

    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, whence: int = 0, /) -> int: ...
    def tell(self) -> int: ...


class _Headers:
    """A file with a limit on bytes read outside of the members' contents."""

    def __init__(self, file: _Readable) -> None:
        self._file = file
        self._left: int | None = _MOST_HEADER_BYTES

    def contents(self) -> None:
        """Content follows, whose size is checked elsewhere."""
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
        """Do nothing: the opener closes the file."""


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or a zip into an empty folder.

    Args:
        archive: A zip by its suffix, else a tar, compressed or not.

    Raises:
        ModelError: It is broken or hostile, or would not fit.
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
        # The next attempt downloads it again.
        archive.unlink()
        raise ModelError(f"{archive.name} can't be unpacked: {error}") from None


@dataclass
class _Writer:
    """Writes members, within the bounds of one archive.

    Attributes:
        folder: The target.
        free: Free bytes there.
        most: Most bytes of the archive's content.
    """

    folder: Path
    free: int
    most: int

    def __post_init__(self) -> None:
        self._members = 0
        self._declared = 0
        self._unpacked = 0
        # By path as file systems may compare it: the first spelling, and whether it is a folder.
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], bool]] = {}

    def add(self, member: _Member) -> None:
        """Write a member.

        Raises:
            Refused: No model needs it.
            ModelError: The disk has too little space.
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
        if self._declared > self.free:
            raise ModelError(
                f"the archive holds {self._declared} bytes or more, and {self.free} are free in "
                f"{self.folder}"
            )
        self._check(self._declared)
        path = self.folder.joinpath(*parts)
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
        """Count unpacked bytes.

        Raises:
            Refused: They are too many for the archive's size.
        """
        self._unpacked += size
        self._check(self._unpacked)

    def _check(self, size: int) -> None:
        if size > self.most:
            raise Refused(
                f"it unpacks to {size} bytes or more, over {MOST_RATIO} times its own size"
            )

    def _enter(self, parts: tuple[str, ...], member: _Member) -> None:
        """Raises Refused: the path is another file's, at least on some file system."""
        for length in range(1, len(parts) + 1):
            own, is_folder = parts[:length], member.is_folder or length < len(parts)
            key = tuple(unicodedata.normalize("NFC", part).casefold() for part in own)
            before, was_folder = self._known.get(key, (own, True))
            if before != own or not was_folder or (key in self._known and not is_folder):
                raise Refused(f"{shown(member.path)} is there twice, as {shown('/'.join(before))}")
            self._known[key] = (own, is_folder)


def _parts(path: str) -> tuple[str, ...]:
    """Return the parts of a path that stays in its folder and is valid on every file system.

    Raises:
        Refused: It is not.
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
        # A checksum follows, which shows lost bytes; tarfile does not read it.
        while piece := stream.read(_PIECE):
            writer.count(len(piece))


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return a decompressor by the first bytes, or the file itself."""
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
