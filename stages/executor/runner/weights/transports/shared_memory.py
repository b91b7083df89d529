"""Weights through POSIX shared memory: the trainer writes, the executor copies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from typing import Self

import torch
from torch import Tensor

from ......bus.weights import SharedMemoryWeights, TensorMeta
from ......config import WeightsError, shown
from ......config.temporary import SHARED_MEMORY, new_name, own, sweep
from ..checks import UNLIMITED, WeightLimits, check_stored
from .layout import Begin, as_tensor, dtype_of, meta_of, read_file, sizes_of, unhurried

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")

_ALIGNMENT = 64

BUCKET_BYTES = 256 << 20


class SharedWeights:
    """A trainer's weights in shared memory, for an executor on the same machine.

    ```python
    with SharedWeights(model.state_dict()) as shared:
        await client.update_weights(shared.source)
        ...  # train on
        shared.update()
        await client.update_weights(shared.source)
    ```

    The executor copies them before it answers, so they may change after the answer. The memory is
    freed at the end of the block, and also if this process is killed: Python's resource tracker, a
    process shared by all processes that `multiprocessing` started together, frees it after the last
    of them. If it was killed too, the next `SharedWeights` or pipeline does.

    Attributes:
        source: The argument for `update_weights`.
    """

    def __init__(self, state_dict: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Allocate the memory and fill it.

        Args:
            state_dict: Tensors by name, of any dtype and any strides, on any device.
            bucket_bytes: Size of a segment; a larger tensor has its own.

        Raises:
            WeightsError: Shared memory is short, or a tensor can't be read: it is sparse,
                quantised, on the meta device, or its storage was freed.
        """
        check_stored(state_dict)
        self._tensors = dict(state_dict)
        metas = tuple(meta_of(name, tensor) for name, tensor in self._tensors.items())
        sizes, places = _lay_out(self._tensors, metas, bucket_bytes)
        self._segments: list[SharedMemory] = []
        self._locks: list[int] = []
        sweep()
        try:
            for size in sizes:
                segment, lock = _reserve(size)
                self._segments.append(segment)
                self._locks.append(lock)
            self.source = SharedMemoryWeights(
                tuple(segment.name.removeprefix("/") for segment in self._segments), metas, places
            )
            self.update()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def update(self, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Fill the memory again. An executor that reads meanwhile gets a mixture, so await it.

        Args:
            state_dict: Tensors of the same names, shapes and dtypes; the first ones, with their
                present values, when None.

        Raises:
            WeightsError: The tensors differ, or can't be read.
        """
        check_stored(self._tensors if state_dict is None else state_dict)
        if state_dict is not None:
            metas = tuple(meta_of(name, tensor) for name, tensor in state_dict.items())
            if metas != self.source.tensors:
                raise WeightsError("these are not the tensors of the first call; share them anew")
            self._tensors = dict(state_dict)
        memory = [torch.frombuffer(segment.buf, dtype=torch.uint8) for segment in self._segments]
        try:
            for meta, tensor in _views(memory, self.source):
                tensor.copy_(self._tensors[meta.name])
                del tensor
        finally:
            # A segment with views can't be closed.
            memory.clear()

    def close(self) -> None:
        """Free the memory. Executors keep their copies."""
        while self._segments:
            segment = self._segments.pop()
            segment.close()
            segment.unlink()
        while self._locks:
            os.close(self._locks.pop())


def read_shared_memory(
    source: SharedMemoryWeights, limits: WeightLimits = UNLIMITED
) -> dict[str, Tensor]:
    """Copy the tensors out of shared memory.

    The message is checked against the segments' sizes before anything is allocated, and nothing is
    mapped: a segment that shrinks meanwhile is an error, not a signal. One segment is open at a
    time, to limit descriptors.

    Raises:
        WeightsError: A segment is missing, or the message does not match it or the limits.
    """
    tensors: dict[str, Tensor] = {}
    read_shared_memory_each(source, limits, lambda _: tensors.__setitem__)
    return {meta.name: tensors[meta.name] for meta in source.tensors}


def read_shared_memory_each(
    source: SharedMemoryWeights, limits: WeightLimits, begin: Begin
) -> None:
    """Copy the tensors like `read_shared_memory`, but hand over those of each segment when it has
    come."""
    sizes = sizes_of(source.tensors, limits)
    if len(source.places) != len(sizes):
        raise WeightsError(
            f"{len(sizes)} tensors have {len(source.places)} places", remedy="give one for each"
        )
    if len(set(source.segments)) < len(source.segments):
        raise WeightsError("a segment is named twice; name each once")
    held: dict[int, list[tuple[TensorMeta, int, int]]] = {}
    try:
        room = [_size_of(name) for name in unhurried(source.segments)]
        limits.check_bytes(sum(room))
        for meta, size, place in unhurried(zip(source.tensors, sizes, source.places, strict=True)):
            _check_place(meta, size, place, room)
            held.setdefault(place[0], []).append((meta, size, place[1]))
        take = begin([meta.name for meta in source.tensors])
        for segment, members in held.items():
            data = _copied(source.segments[segment], room[segment])
            for meta, size, offset in unhurried(members):
                take(meta.name, as_tensor(data[offset : offset + size], meta))
    except OSError as error:
        raise WeightsError(
            f"shared memory can't be read: {error.strerror}", remedy="share them anew"
        ) from None


def _size_of(name: str) -> int:
    with _opened(name) as file:
        return os.fstat(file).st_size


def _copied(name: str, size: int) -> Tensor:
    with _opened(name) as file:
        return read_file(file, 0, size)


def _views(
    memory: Sequence[Tensor], source: SharedMemoryWeights
) -> Iterator[tuple[TensorMeta, Tensor]]:
    """Iterate over the tensors in these segments, `[bytes]`, uint8 each."""
    sizes = sizes_of(source.tensors)
    for meta, size, (segment, offset) in zip(source.tensors, sizes, source.places, strict=True):
        yield meta, as_tensor(memory[segment][offset : offset + size], meta)


def _lay_out(
    tensors: Mapping[str, Tensor], metas: tuple[TensorMeta, ...], most: int
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Return segment sizes and each tensor's place. Names of one tensor share a place."""
    used: list[int] = []
    places: list[tuple[int, int]] = []
    taken: dict[object, tuple[int, int]] = {}
    for meta, size in zip(metas, sizes_of(metas), strict=True):
        tensor = tensors[meta.name]
        same = (tensor.device, tensor.data_ptr(), tensor.stride(), meta.dtype, meta.shape)
        if size and same in taken:
            places.append(taken[same])
            continue
        if not used or used[-1] + size > most:
            used.append(0)
        place = taken[same] = (len(used) - 1, used[-1])
        places.append(place)
        used[-1] += -(-size // _ALIGNMENT) * _ALIGNMENT
    return used, tuple(places)


def _reserve(size: int) -> tuple[SharedMemory, int]:
    """Allocate a segment, and a lock that protects it from sweeps."""
    while True:
        segment = SharedMemory(new_name("tensors"), create=True, size=max(size, 1))
        lock = own(SHARED_MEMORY / segment.name)
        if lock is not None:
            break
        segment.close()
    try:
        with _opened(segment.name.removeprefix("/"), os.O_RDWR) as file:
            # Otherwise a lack of memory would kill the process at the first write.
            os.posix_fallocate(file, 0, segment.size)
    except BaseException as error:
        segment.close()
        segment.unlink()
        os.close(lock)
        if isinstance(error, OSError):
            raise WeightsError(
                f"{size} bytes of shared memory can't be allocated ({error.strerror}); "
                f"enlarge {SHARED_MEMORY}, or send the weights another way"
            ) from None
        raise
    return segment, lock


@contextmanager
def _opened(name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a segment, not by Python's SharedMemory, which would remove it at exit."""
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise WeightsError(f"{shown(name)} is no name of shared memory")
    try:
        file = os.open(SHARED_MEMORY / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise WeightsError(
            f"there is no shared memory {shown(name)}; the trainer must keep it until it is read, "
            "and be on the executor's machine (in containers: with a common /dev/shm)"
        ) from None
    try:
        yield file
    finally:
        os.close(file)


def _check_place(meta: TensorMeta, size: int, place: tuple[int, int], room: list[int]) -> None:
    segment, offset = place
    name = shown(meta.name)
    if not 0 <= segment < len(room):
        raise WeightsError(f"{name} is in segment {shown(segment)} of {len(room)}; share them anew")
    if offset < 0 or offset + size > room[segment]:
        raise WeightsError(
            f"{name} is at {shown(offset)} to {shown(offset + size)} of {room[segment]} bytes",
            remedy="share them anew",
        )
    if offset % dtype_of(meta).itemsize:
        raise WeightsError(f"{name} is at {offset}, where no {meta.dtype} begins; share them anew")
