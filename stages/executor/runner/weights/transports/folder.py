"""Weights from a folder on disk, in Transformers' format.

Not by the safetensors library: it holds the GIL while reading, which would block the process's
other stages, and holds the file and the tensors in memory at once.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from ......bus.weights import TensorMeta
from ......config import WeightsError, cut, shown
from ...checkpoint import INDEX, UNREADABLE, WEIGHTS, Index
from ..checks import UNLIMITED, WeightLimits
from .layout import Begin, as_tensor, dtype_of, read_file, sizes_of, unhurried

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtypes of safetensors."""

_MOST_HEADER_BYTES = 100_000_000  # the limit of the format

_SHOWN_PATH = 400
"""Characters."""


class _Entry(msgspec.Struct):
    """A tensor's entry in a header; `data_offsets` are in bytes from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Layout(NamedTuple):
    """The tensors of a file, and their bounds in its `num_bytes` after `first`."""

    metas: list[TensorMeta]
    places: list[tuple[int, int]]
    first: int
    num_bytes: int


# Raw: names are counted before their values are decoded.
_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)
_index = msgspec.json.Decoder(Index)


def read_folder(path: str, limits: WeightLimits = UNLIMITED) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint's folder, or of one safetensors file.

    In a folder, the files that Transformers would load, or all safetensors files if none has those
    names. Files are read, not mapped: their writer may replace them at once.

    Args:
        path: Path of the folder or file. Only regular files are read.
        limits: Longer lists are not parsed.

    Raises:
        WeightsError: A file is missing, unreadable or cut off, the index does not match, or the
            limits are exceeded.
    """
    tensors: dict[str, Tensor] = {}
    with readable(path):
        for file, layout in _laid_out(path, limits):
            tensors |= _read(file, layout)
    return tensors


def read_folder_each(path: str, limits: WeightLimits, begin: Begin) -> None:
    """Read the tensors like `read_folder`, but hand over each when it has come."""
    with readable(path):
        found = _laid_out(path, limits)
        take = begin([meta.name for _, layout in found for meta in layout.metas])
        for path_of, layout in found:
            with opened(path_of) as file:
                for meta, (start, end) in unhurried(zip(layout.metas, layout.places, strict=True)):
                    data = read_file(file, layout.first + start, end - start)
                    take(meta.name, as_tensor(data, meta))


def metadata_of(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises WeightsError if it can't be read."""
    with readable(str(path)), opened(path) as file:
        length = min(int.from_bytes(os.pread(file, 8, 0), "little"), _MOST_HEADER_BYTES)
        try:
            found = _names.decode(os.pread(file, length, 8)).get("__metadata__", b"{}")
            return msgspec.json.decode(found, type=dict[str, str])
        except UNREADABLE as error:
            raise _not_whole(path, shown(str(error))) from None


def _laid_out(path: str, limits: WeightLimits) -> list[tuple[Path, _Layout]]:
    """Return the files to read, and the places of their tensors."""
    found: list[tuple[Path, _Layout]] = []
    file_of: dict[str, str] = {}
    num_bytes = 0
    files, index = _files(Path(path), limits)
    for file in files:
        left = WeightLimits(limits.tensors - len(file_of), limits.num_bytes - num_bytes)
        layout = _lay_out(file, left)
        names = [meta.name for meta in layout.metas]
        if twice := file_of.keys() & set(names):
            name = shown(min(twice))
            raise WeightsError(
                f"{_named(file)} has {name}, which is also in another file",
                remedy="write each tensor once",
            )
        file_of |= dict.fromkeys(names, file.name)
        num_bytes += layout.num_bytes
        found.append((file, layout))
    for name, shard in unhurried(index.items()):
        if file_of.get(name) != shard:
            raise WeightsError(
                f"{INDEX} says that {shown(name)} is in {shown(shard)}, where it is not; the two "
                "are not of one checkpoint, so write the folder again"
            )
    return found


def stamp_of(path: str, limits: WeightLimits = UNLIMITED) -> str:
    """Return a stamp of the files that `read_folder` reads, which changes with them.

    Raises:
        WeightsError: As `read_folder`.
    """
    digest = hashlib.sha256()
    with readable(path):
        for file in _files(Path(path), limits)[0]:
            status = file.stat()
            place = (file.name, status.st_ino, status.st_size, status.st_mtime_ns)
            digest.update(repr(place).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Raises WeightsError for an OSError."""
    try:
        yield
    except OSError as error:
        file = error.filename or path
        raise WeightsError(
            f"{_named(file)} can't be read: {error.strerror}",
            remedy="name one that the executor may read",
        ) from None


def _named(path: Path | str | bytes) -> str:
    """Return a path, which may not be text, for a message."""
    return cut(ascii(os.fspath(path)), _SHOWN_PATH)


def _files(place: Path, limits: WeightLimits) -> tuple[list[Path], dict[str, str]]:
    """Return the files to read, in order, and each tensor's file if there is an index."""
    if not place.is_dir():
        return [place], {}
    if (place / WEIGHTS).is_file():
        return [place / WEIGHTS], {}
    if (place / INDEX).is_file():
        return _shards(place, limits)
    files = list(islice(place.glob("*.safetensors"), limits.tensors + 1))
    limits.check_tensors(len(files))  # each has at least one
    if not files:
        raise WeightsError(
            f"there is no .safetensors file in {_named(place)}; write one by save_pretrained()"
        )
    return sorted(files), {}


def _shards(place: Path, limits: WeightLimits) -> tuple[list[Path], dict[str, str]]:
    with opened(place / INDEX) as file:
        length = os.fstat(file).st_size
        _check_list(place / INDEX, length, limits)
        content = os.pread(file, length, 0)
    try:
        index = _index.decode(content).weight_map
    except UNREADABLE as error:
        raise WeightsError(
            f"can't read {_named(place / INDEX)}: {shown(str(error))}; it must hold a weight_map "
            "from tensors to files"
        ) from None
    limits.check_tensors(len(index))
    names = sorted(set(index.values()))
    for name in names:
        if "\0" in name or Path(name).name != name:
            raise WeightsError(
                f"{_named(place / INDEX)} names {shown(name)}, which is not beside it"
            )
        if not (place / name).is_file():
            raise WeightsError(
                f"{_named(place / name)} is missing, one of {len(names)} files that {INDEX} names; "
                "write the folder again"
            )
    return [place / name for name in names], index


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file. Opening others, such as a FIFO, might block."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise WeightsError(f"{_named(path)} is not a regular file; name a folder or a file")
        yield file
    finally:
        os.close(file)


def _lay_out(path: Path, limits: WeightLimits) -> _Layout:
    """Return the places of a file's tensors."""
    with opened(path) as file:
        length = os.fstat(file).st_size
        header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
        if length < 8 or header_bytes > min(length - 8, _MOST_HEADER_BYTES):
            raise _not_whole(path, f"its {length} bytes can't hold its header")
        _check_list(path, header_bytes, limits)
        room = length - 8 - header_bytes
        limits.check_bytes(room)
        metas, places = _entries(path, os.pread(file, header_bytes, 8), room, limits)
    return _Layout(metas, places, 8 + header_bytes, room)


def _read(path: Path, layout: _Layout) -> dict[str, Tensor]:
    """Return a file's tensors."""
    with opened(path) as file:
        data = read_file(file, layout.first, layout.num_bytes)
    tensors: dict[str, Tensor] = {}
    for meta, (start, end) in unhurried(zip(layout.metas, layout.places, strict=True)):
        part = data[start:end]
        # Some writers don't align tensors to their dtype.
        aligned = start % dtype_of(meta).itemsize == 0
        tensors[meta.name] = as_tensor(part if aligned else part.clone(), meta)
    return tensors


def _check_list(path: Path, length: int, limits: WeightLimits) -> None:
    """Raises WeightsError for a list that is too long to be parsed."""
    if length > limits.header_bytes:
        raise WeightsError(
            f"the list of tensors in {_named(path)} has {length} bytes, more than "
            f"{limits.tensors} tensors need, the most that this model can take; send those of "
            "its architecture, or raise engine.max_weight_tensors"
        )


def _entries(
    path: Path, header: bytes, room: int, limits: WeightLimits
) -> tuple[list[TensorMeta], list[tuple[int, int]]]:
    """Return the tensors of a file, and their bounds in the data of `room` bytes."""
    try:
        raw_entries = _names.decode(header)
        raw_entries.pop("__metadata__", None)
        limits.check_tensors(len(raw_entries))
        entries = {name: _entry.decode(raw) for name, raw in unhurried(raw_entries.items())}
    except UNREADABLE as error:
        raise _not_whole(path, shown(str(error))) from None
    metas = [
        TensorMeta(name, DTYPES.get(entry.dtype, entry.dtype), entry.shape)
        for name, entry in unhurried(entries.items())
    ]
    places = [entry.data_offsets for entry in entries.values()]
    sizes = sizes_of(metas, limits)
    for meta, size, (start, end) in unhurried(zip(metas, sizes, places, strict=True)):
        if not 0 <= start <= end <= room or end - start != size:
            raise _not_whole(
                path, f"{shown(meta.name)} is at {shown(start)} to {shown(end)} of {room} bytes"
            )
    if sum(sizes) != room:
        # Overlapping tensors would take more memory than the file, and gaps would be kept.
        raise _not_whole(path, f"its tensors have {sum(sizes)} of {room} bytes")
    return metas, places


def _not_whole(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{_named(path)} is cut off or no safetensors file ({why}); write it again")
