"""Updates stored in a folder, from which a restarted executor has them again.

A folder per update, a safetensors file per part. Files are complete when they have their names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from .....config import WeightsError, shown
from .transports.folder import STORED_DTYPES, readable
from .transports.layout import as_bytes, meta_of

_ENTRY_BYTES = 240
"""Room in a file's header for one tensor beside its name: its dtype, 12 sizes, and its place."""

_FROM_CHECKPOINT = ".checkpoint"


class StoredPart(NamedTuple):
    """A file of an update.

    Attributes:
        path: The file.
        checkpoint: Whether its names are a checkpoint's, as in `as_parameters`.
    """

    path: Path
    checkpoint: bool


class StoredUpdates:
    """The updates of one executor. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the executor's own. It is made with the first part."""
        self.folder = folder

    def begin(self, update: str, number: int | None, *, checkpoint: bool) -> PartWriter:
        """Begin to store a part.

        Args:
            update: The update's name.
            number: The part's number, which replaces an earlier part of it; None for the next.
            checkpoint: As in `StoredPart`.
        """
        folder = self._folder_of(update)
        with readable(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        number = len(self.parts(update)) if number is None else number
        kind = _FROM_CHECKPOINT if checkpoint else ""
        return PartWriter(folder / f"part-{number:05}{kind}.safetensors")

    def parts(self, update: str) -> list[StoredPart]:
        """Return the complete parts of an update in order; none of an unknown one."""
        found = sorted(self._folder_of(update).glob("part-*.safetensors"))
        return [StoredPart(path, _FROM_CHECKPOINT in path.suffixes) for path in found]

    def check(self, update: str, number: int) -> list[StoredPart]:
        """Return the parts of an update.

        Args:
            update: Its name.
            number: Their number; 0 for as many as there are.

        Raises:
            WeightsError: Some are missing.
        """
        parts = self.parts(update)
        names = [f"part-{index:05}" for index in range(len(parts))]
        if (
            not parts
            or len(parts) != (number or len(parts))
            or names != [each.path.name.partition(".")[0] for each in parts]
        ):
            raise WeightsError(
                f"{len(parts)} of the update's {number or 'several'} parts are stored here; send "
                "all of them again",
                code="weights_incomplete",
            )
        return parts

    def forget(self, kept: Collection[str]) -> None:
        """Remove all updates but these."""
        if not self.folder.is_dir():
            return
        for each in self.folder.iterdir():
            if each.name not in kept:
                shutil.rmtree(each, ignore_errors=True)

    def _folder_of(self, update: str) -> Path:
        if not update.isalnum():
            raise WeightsError(f"an update's name is letters and digits, not {shown(update)}")
        return self.folder / update


class PartWriter:
    """Writes a part's file, tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_suffix(".partial")
        self._entries: dict[str, object] = {}
        self._room = 0
        self._end = 0
        self._file = -1

    def begin(self, names: Sequence[str]) -> None:
        """Open the file, with room for the header of these tensors."""
        self._entries.clear()
        self.close()
        self._room = 64 + sum(len(msgspec.json.encode(name)) + _ENTRY_BYTES for name in names)
        self._end = 8 + self._room
        with readable(str(self._partial)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._file = os.open(self._partial, flags, 0o600)

    def take(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. Raises WeightsError, for example for a full disk."""
        meta, data = meta_of(name, tensor), as_bytes(tensor).cpu().numpy().data
        if (kind := STORED_DTYPES.get(meta.dtype)) is None:
            raise WeightsError(f"{shown(name)} is {meta.dtype}, which safetensors can't store")
        first = self._end - 8 - self._room
        place = (first, first + len(data))
        self._entries[name] = {"dtype": kind, "shape": meta.shape, "data_offsets": place}
        with readable(str(self._partial)):
            for piece in _pieces(data):
                self._end += os.pwrite(self._file, piece, self._end)

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Write all tensors."""
        self.begin([*tensors])
        for name, tensor in tensors.items():
            self.take(name, tensor)

    def finish(self) -> None:
        """Give the file its name; it replaces a former part of this number."""
        header = msgspec.json.encode(self._entries)
        if len(header) > self._room:
            raise WeightsError("the tensors' shapes are too long to be stored")
        with readable(str(self._path)):
            os.pwrite(self._file, self._room.to_bytes(8, "little") + header.ljust(self._room), 0)
            self.close()
            for former in self._path.parent.glob(f"{self._path.name.partition('.')[0]}.*"):
                if former != self._partial and former != self._path:
                    former.unlink()
            self._partial.replace(self._path)

    def close(self) -> None:
        """Close the file. Without `finish` it is no part."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _pieces(data: memoryview, most: int = 1 << 24) -> Iterator[memoryview]:
    """Yield pieces of this many bytes, each of which is written by one call."""
    for start in range(0, len(data), most):
        yield data[start : start + most]
