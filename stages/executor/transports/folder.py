"""Weights from a folder on disk, in Transformers' format.

The safetensors library is not what reads them: it holds Python's lock all the while, so the
process's other stages would stand still, and it has the file and the tensors in memory at once.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from ....bus.weights import TensorMeta
from ....config import ModelError, WeightsError
from ..checkpoint import INDEX, WEIGHTS, check_checkpoint, read_index
from .layout import as_tensor, dtype_of, read_file, sizes_of

_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8"},
    "BOOL": "bool",
}
"""What safetensors calls torch's dtypes."""

_MOST_HEADER_BYTES = 100_000_000  # the limit of the format


class _Entry(msgspec.Struct):
    """What a header says of a tensor; `data_offsets` are bytes from the header's end on."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_folder(path: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint's folder, or of one safetensors file.

    In a folder it is the files that Transformers would load, or if there are none of their names,
    all of them. They are read, not mapped: whoever wrote them may write them again at once.

    Raises:
        WeightsError: There are no such files, one can't be read or is not whole, or the index
            does not fit them.
    """
    tensors: dict[str, Tensor] = {}
    for file in _files(Path(path)):
        try:
            part = _read(file)
        except OSError as error:
            raise WeightsError(f"{file} can't be read: {error.strerror}") from None
        if twice := tensors.keys() & part.keys():
            raise WeightsError(f"{file} has {min(twice)!r}, which another file has as well")
        tensors |= part
    return tensors


def stamp_of(path: str) -> str:
    """Tells whether the files that `read_folder` reads are still those that it has read.

    Raises:
        WeightsError: As `read_folder`.
    """
    digest = hashlib.sha256()
    for file in _files(Path(path)):
        try:
            found = file.stat()
        except OSError as error:
            raise WeightsError(f"{file} can't be read: {error.strerror}") from None
        place = (file.name, found.st_ino, found.st_size, found.st_mtime_ns)
        digest.update(repr(place).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    try:
        check_checkpoint(place)
        if (place / WEIGHTS).is_file():
            return [place / WEIGHTS]
        if (place / INDEX).is_file():
            return _shards(place)
    except ModelError as error:
        raise WeightsError(error.message) from None
    files = sorted(place.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"there is no .safetensors file in {place}; save_pretrained writes one")
    return files


def _shards(place: Path) -> list[Path]:
    names = sorted(set(read_index(place / INDEX).values()))
    for name in names:
        if Path(name).name != name:
            raise WeightsError(f"{place / INDEX} names {name!r:.200}, which is not beside it")
    return [place / name for name in names]


def _read(path: Path) -> dict[str, Tensor]:
    with path.open("rb", buffering=0) as stream:
        file = stream.fileno()
        length = os.fstat(file).st_size
        header_bytes = int.from_bytes(os.pread(file, 8, 0), "little")
        if length < 8 or header_bytes > min(length - 8, _MOST_HEADER_BYTES):
            raise _not_whole(path, f"its {length} bytes can't hold its header")
        metas, places = _entries(path, os.pread(file, header_bytes, 8), length - 8 - header_bytes)
        data = read_file(file, 8 + header_bytes, length - 8 - header_bytes)
    found: dict[str, Tensor] = {}
    for meta, (start, end) in zip(metas, places, strict=True):
        part = data[start:end]
        # Some writers put a tensor where one of its dtype can't be looked at.
        aligned = start % dtype_of(meta).itemsize == 0
        found[meta.name] = as_tensor(part if aligned else part.clone(), meta)
    return found


def _entries(
    path: Path, header: bytes, room: int
) -> tuple[list[TensorMeta], list[tuple[int, int]]]:
    """The tensors of a file, and where each begins and ends in the data, of `room` bytes."""
    try:
        content: dict[str, Any] = msgspec.json.decode(header, type=dict[str, Any])
        content.pop("__metadata__", None)
        entries = msgspec.convert(content, dict[str, _Entry])
        metas = [
            TensorMeta(name, _DTYPES.get(entry.dtype, entry.dtype), entry.shape)
            for name, entry in entries.items()
        ]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_whole(path, str(error)) from None
    places = [entry.data_offsets for entry in entries.values()]
    for meta, size, (start, end) in zip(metas, sizes_of(metas), places, strict=True):
        if not 0 <= start <= end <= room or end - start != size:
            raise _not_whole(path, f"{meta.name!r:.200} is at {start} to {end} of {room} bytes")
    return metas, places


def _not_whole(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is cut off or no safetensors file ({why}); write it again")
