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
from typing import IO, NamedTuple, cast

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
        content: None for a folder.
        size: Declared size in bytes.
    """

    path: str
    content: IO[bytes] | None = None
    size: int = 0


class _Headers:
    """A file with a limit on bytes read outside of the members' contents.

    Attributes:
        left: Bytes until the limit; None while content follows, whose size is checked elsewhere.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.left: int | None = _MOST_HEADER_BYTES
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if self.left is None:
            return self._file.read(size)
        found = b"" if size > self.left else self._file.read(size if size >= 0 else self.left)
        self.left -= max(size, len(found))
        if self.left <= 0:
            raise Refused(f"its headers have more than {_MOST_HEADER_BYTES} bytes")
        return found

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
            if member.content is None:
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
            own, is_folder = parts[:length], member.content is None or length < len(parts)
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
        headers = _Headers(stream)
        with tarfile.open(fileobj=cast(IO[bytes], headers), mode="r:") as tar:
            while (found := tar.next()) is not None:
                if found.isdir():
                    yield _Member(found.name)
                    continue
                if not found.isfile() or found.issparse():
                    raise Refused(f"{shown(found.name)} is no plain file and no folder")
                headers.left = None
                yield _Member(found.name, tar.extractfile(found), found.size)
                headers.left = _MOST_HEADER_BYTES
        # A checksum follows, which shows lost bytes; tarfile does not read it.
        while piece := stream.read(_PIECE):
            writer.count(len(piece))


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return a decompressor by the first bytes, or the file itself."""
    start = file.read(6)
    file.seek(0)
    for magic, module in ((b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ\0", lzma)):
        if start.startswith(magic):
            return cast(IO[bytes], module.open(file))
    return file


def _zipped(file: IO[bytes]) -> Iterator[_Member]:
    headers = _Headers(file)
    with zipfile.ZipFile(cast(IO[bytes], headers)) as opened:
        headers.left = None
        for found in opened.infolist():
            if found.is_dir():
                yield _Member(found.filename)
            elif stat.S_IFMT(found.external_attr >> 16) not in (0, stat.S_IFREG):
                raise Refused(f"{shown(found.filename)} is no plain file and no folder")
            else:
                with opened.open(found) as content:
                    yield _Member(found.filename, content, found.file_size)
