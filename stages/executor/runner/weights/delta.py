"""Deltas between two versions of weights: the elements of which the bits have changed.

A delta is a mapping of named tensors of bytes, so that every transport of weights carries one: a
safetensors file, shared memory, a group, or a message. One of them, `DELTA_HEAD`, lists the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from .....bus.weights import DeltaWeights, FolderWeights, TensorMeta
from .....config import WeightsError, shown
from .checks import DELTA_HEAD as HEAD
from .checks import LARGEST_VERSION, check_stored
from .files import write_tensors
from .transports.folder import read_folder
from .transports.layout import as_bytes, as_tensor, distinct, meta_of, num_bytes

_DENSE = 1 / 4
"""The changed part of a tensor from which all its elements are sent: a gap and the changed bits of
an element take more than its zeros then."""

_LEVEL = 3
"""Zstandard's. Level 1 is 10 % larger, and level 9 four times as slow for 2 % less."""

_NUMBERS: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}

Bits = NDArray[np.unsignedinteger]


class DeltaEntry(msgspec.Struct, frozen=True, array_like=True):
    """One changed tensor.

    Attributes:
        meta: Its name, dtype and shape, those of the model.
        before, after: XXH3 of its bytes, 128 bits, before and after the change.
        changed: Number of its elements that change.
        gap_bytes: Width of a distance between two changed elements; 0: all elements are sent.
    """

    meta: TensorMeta
    before: bytes
    after: bytes
    changed: Annotated[int, msgspec.Meta(ge=0)]
    gap_bytes: int


class DeltaHead(msgspec.Struct, frozen=True, array_like=True):
    """The description of a delta.

    Attributes:
        format: 1.
        base_version: The version of the weights that it changes.
        tensors: The changed tensors.
    """

    format: int
    base_version: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_VERSION)]
    tensors: tuple[DeltaEntry, ...]


class Changes(NamedTuple):
    """The changed elements of a tensor.

    Attributes:
        places: `[changed]`, rising: indices into the flattened tensor; None for all.
        bits: `[changed]`: the bits that change, for XOR.
    """

    places: NDArray[np.int64] | None
    bits: Bits


class WeightDelta(Mapping[str, Tensor]):
    """The changed elements between two versions of a model's weights.

    The mapping is the delta's own tensors of bytes: `SharedWeights(delta)`,
    `WeightsGroup.broadcast(delta)` and safetensors' `save_file(dict(delta))` transport it.

    Attributes:
        head: The base version, and the changed tensors.
        elements: Number of changed elements.
        num_bytes: Bytes of the delta.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Read a delta from its tensors.

        Raises:
            WeightsError: `weights_delta`: they are no delta, or not all of one.
        """
        self._tensors = dict(tensors)
        self.head = _head(self._tensors)
        self.elements = sum(entry.changed for entry in self.head.tensors)
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @classmethod
    def between(
        cls, old: Mapping[str, Tensor], new: Mapping[str, Tensor], *, base_version: int
    ) -> Self:
        """Return the delta from one version to another. Bits are compared, and not values.

        Args:
            old: The weights of the base version as the engine has them: by the model's parameter
                names, in its dtype.
            new: The next weights; other dtypes are cast, as the engine does. Tensors that are
                missing stay as they are.
            base_version: The version of `old` at the engine.

        Raises:
            WeightsError: The tensors don't match, or can't be read.
        """
        check_stored(old)
        check_stored(new)
        entries: list[DeltaEntry] = []
        tensors: dict[str, Tensor] = {}
        unchanged: tuple[DeltaEntry, Tensor] | None = None
        for name, tensor in distinct(new).items():
            if name not in old or name == HEAD or tensor.shape != old[name].shape:
                raise WeightsError(f"the old weights have no {shown(name)} of this shape")
            entry, data = _encode(name, old[name], tensor.to(old[name].dtype))
            if entry.changed:
                entries.append(entry)
                tensors[name] = data
            elif unchanged is None:
                unchanged = entry, data
        if not entries and unchanged is not None:
            # So that its base is checked, too.
            entries, tensors = [unchanged[0]], {unchanged[0].meta.name: unchanged[1]}
        head = msgspec.msgpack.encode(DeltaHead(1, base_version, tuple(entries)))
        return cls({HEAD: _tensor_of(head), **tensors})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a delta from a file of `save`.

        Raises:
            WeightsError: It can't be read, or is no delta.
        """
        return cls(read_folder(os.fspath(path)))

    def save(self, path: str | os.PathLike[str]) -> FolderWeights:
        """Write a safetensors file, which appears under its name once it is on the disk.

        Returns:
            Its source, for executors that can read the file.
        """
        write_tensors(Path(path), self._tensors)
        return FolderWeights(os.fspath(path))

    @property
    def source(self) -> DeltaWeights:
        """The delta in a message, for executors anywhere."""
        return DeltaWeights(tuple((name, _bytes_of(data)) for name, data in self._tensors.items()))

    def apply(self, old: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the new values of the changed tensors, on the CPU.

        Args:
            old: The weights of the base version, by name.

        Raises:
            WeightsError: `weights_base`: those are other weights. `weights_delta`: the delta is
                damaged.
        """
        found = {}
        for entry in self.head.tensors:
            if (base := old.get(entry.meta.name)) is None:
                raise WeightsError(f"the old weights have no {shown(entry.meta.name)}")
            check_base(entry, base)
            found[entry.meta.name] = changed_tensor(entry, base, self.changes(entry))
        return found

    def changes(self, entry: DeltaEntry) -> Changes:
        """Return the changed elements of a tensor.

        Raises:
            WeightsError: `weights_delta`: they are cut off, repeated or out of range.
        """
        meta = entry.meta
        size = num_bytes(meta)
        width = as_width(meta)
        sent = entry.changed if entry.gap_bytes else size // width
        raw = _decompressed(meta.name, self[meta.name], sent * (entry.gap_bytes + width))
        gaps, bits = (
            raw[: sent * entry.gap_bytes],
            _from_planes(raw[sent * entry.gap_bytes :], width),
        )
        if not entry.gap_bytes:
            return Changes(None, bits)
        places = (
            np.cumsum(_from_planes(gaps, entry.gap_bytes), dtype=np.uint64).astype(np.int64) - 1
        )
        # A distance of 0 repeats an element; a sum that overflows falls below the one before.
        if sent and (places[0] < 0 or places[-1] >= size // width or (np.diff(places) <= 0).any()):
            raise damaged(f"the elements of {shown(meta.name)} are repeated or out of range")
        return Changes(places, bits)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return (
            f"WeightDelta(base_version={self.head.base_version}, elements={self.elements}, "
            f"num_bytes={self.num_bytes})"
        )


def damaged(why: str) -> WeightsError:
    """Return the error for a delta that is not whole."""
    return WeightsError(f"the delta is damaged: {why}; send it again", code="weights_delta")


def other_base(why: str) -> WeightsError:
    """Return the error for a delta of other weights than those in place."""
    return WeightsError(
        f"the delta is of other weights than those in place: {why}; send all weights, and then "
        "deltas from those",
        code="weights_base",
    )


def digest(tensor: Tensor) -> bytes:
    """Return XXH3 of a tensor's bytes, 128 bits."""
    return xxhash.xxh3_128_digest(as_bytes(tensor).cpu().numpy().data)


def check_base(entry: DeltaEntry, base: Tensor) -> None:
    """Check that a delta changes these bits.

    Raises:
        WeightsError: `weights_base`: they are others.
    """
    if meta_of(entry.meta.name, base) != entry.meta:
        own = f"{str(base.dtype).removeprefix('torch.')}{[*base.shape]}"
        raise other_base(
            f"{shown(entry.meta.name)} is {own} here, and {entry.meta.dtype}{[*entry.meta.shape]} "
            "in the delta"
        )
    if digest(base) != entry.before:
        raise other_base(f"{shown(entry.meta.name)} has another checksum")


def changed_tensor(entry: DeltaEntry, base: Tensor, changes: Changes) -> Tensor:
    """Return a tensor with its changes.

    Raises:
        WeightsError: `weights_delta`: the result has another checksum.
    """
    new = as_bytes(base).cpu().numpy().copy()
    bits = new.view(changes.bits.dtype)
    if changes.places is None:
        bits ^= changes.bits
    else:
        bits[changes.places] ^= changes.bits
    found = as_tensor(torch.from_numpy(new), entry.meta)
    if digest(found) != entry.after:
        raise damaged(f"{shown(entry.meta.name)} has another checksum after it")
    return found


def as_width(meta: TensorMeta) -> int:
    """Return the bytes of an element. Raises WeightsError for an unknown dtype."""
    return num_bytes(TensorMeta(meta.name, meta.dtype, ()))


def _encode(name: str, old: Tensor, new: Tensor) -> tuple[DeltaEntry, Tensor]:
    meta = meta_of(name, old)
    width = as_width(meta)
    before, after = (as_bytes(tensor).cpu().numpy().view(_NUMBERS[width]) for tensor in (old, new))
    changed = before ^ after
    places = np.flatnonzero(changed)
    raw, gap_bytes = _planes(changed), 0
    if len(places) < _DENSE * max(changed.size, 1):
        gaps = np.diff(places, prepend=-1)
        most = int(gaps.max(initial=0))
        gap_bytes = next(size for size, kind in _NUMBERS.items() if most <= np.iinfo(kind).max)
        raw = _planes(gaps.astype(_NUMBERS[gap_bytes])) + _planes(changed[places])
    entry = DeltaEntry(meta, digest(old), digest(new), len(places), gap_bytes)
    return entry, _tensor_of(_compressed(raw))


def _planes(numbers: NDArray[Any]) -> bytes:
    """Return the first bytes of all numbers, then the second ones, and so on: the high bytes of
    gaps and of changes are mostly zero, and alike compresses best beside alike."""
    width = numbers.dtype.itemsize
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, width).T.tobytes()


def _from_planes(raw: NDArray[np.uint8], width: int) -> Bits:
    numbers = np.ascontiguousarray(raw.reshape(width, -1).T)
    return numbers.reshape(-1).view(_NUMBERS[width])


def _compressed(raw: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compress(raw)


def _decompressed(name: str, data: Tensor, size: int) -> NDArray[np.uint8]:
    """Return the bytes of a frame, of which the size is known."""
    import zstandard

    frame = _bytes_of(data)
    try:
        if zstandard.frame_content_size(frame) != size:
            raise damaged(f"{shown(name)} is not of {size} bytes")
        raw = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise damaged(f"{shown(name)} is cut off or altered ({error})") from None
    return np.frombuffer(raw, np.uint8)


def _head(tensors: Mapping[str, Tensor]) -> DeltaHead:
    if (data := tensors.get(HEAD)) is None:
        raise damaged("it has no head")
    try:
        head = msgspec.msgpack.decode(_bytes_of(data), type=DeltaHead)
    except (msgspec.DecodeError, RecursionError) as error:
        raise damaged(f"its head can't be read ({shown(str(error))})") from None
    if head.format != 1:
        raise damaged(f"its format is {head.format}, and this version reads 1")
    names = [entry.meta.name for entry in head.tensors]
    if len({*names}) != len(names) or {HEAD, *names} != tensors.keys():
        raise damaged("its tensors are not those that its head names")
    for entry in head.tensors:
        if entry.gap_bytes not in (0, *_NUMBERS):
            raise damaged(f"{shown(entry.meta.name)} has distances of {entry.gap_bytes} bytes")
        if entry.changed * as_width(entry.meta) > num_bytes(entry.meta):
            raise damaged(f"{shown(entry.meta.name)} has fewer elements than change")
    return head


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(data: Tensor) -> bytes:
    return as_bytes(data).cpu().numpy().tobytes()
