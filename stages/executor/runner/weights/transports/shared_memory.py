"""Weights through POSIX shared memory: the trainer lays them down, the executor copies them out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType

import torch
from torch import Tensor

from ......bus.weights import SharedMemoryWeights, TensorMeta
from ......config import WeightsError, shown
from ......config.temporary import SHARED_MEMORY, new_name, own, sweep
from ..limits import UNLIMITED, WeightLimits
from ..storage import check_stored
from .layout import as_tensor, dtype_of, meta_of, read_file, sizes_of, unhurried

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

    The executor copies them before it answers, so they may change as soon as it has. The memory is
    given back at the end of the block, and also when this process is killed: Python's resource
    tracker, a process of its own, removes what is left. It is one for all processes that
    `multiprocessing` started together, and then does it when the last of them has gone. Where it
    was killed too, the next one who shares weights, or starts a pipeline, does it.

    Attributes:
        source: Where the weights are, as `update_weights` takes it.
    """

    def __init__(self, state_dict: Mapping[str, Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Reserves the memory and fills it.

        Args:
            state_dict: Tensors by name, of any dtype and any strides, on any device.
            bucket_bytes: Size of a piece of shared memory; a larger tensor has one for itself.

        Raises:
            WeightsError: There is not enough shared memory, or the numbers of a tensor can't be
                read: it is sparse, quantised, on the meta device, or its storage was freed.
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

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @torch.no_grad()
    def update(self, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Fills the memory anew. An executor that reads meanwhile gets a mixture, so await it.

        Args:
            state_dict: The same names, shapes and dtypes as at first; the first tensors, with
                what is in them now, when None.

        Raises:
            WeightsError: The tensors are others, or their numbers can't be read.
        """
        check_stored(self._tensors if state_dict is None else state_dict)
        if state_dict is not None:
            metas = tuple(meta_of(name, tensor) for name, tensor in state_dict.items())
            if metas != self.source.tensors:
                raise WeightsError("these tensors are others than at first; share them anew")
            self._tensors = dict(state_dict)
        memory = [torch.frombuffer(segment.buf, dtype=torch.uint8) for segment in self._segments]
        try:
            for meta, tensor in _views(memory, self.source):
                tensor.copy_(self._tensors[meta.name])
                del tensor
        finally:
            # A segment that is still looked at can't be closed.
            memory.clear()

    def close(self) -> None:
        """Gives the memory back. What an executor has copied, it keeps."""
        while self._segments:
            segment = self._segments.pop()
            segment.close()
            segment.unlink()
        while self._locks:
            os.close(self._locks.pop())


def read_shared_memory(
    source: SharedMemoryWeights, limits: WeightLimits = UNLIMITED
) -> dict[str, Tensor]:
    """Copies the tensors out of shared memory.

    All that the message says is checked against the sizes of what is there before anything is
    allocated, and nothing is mapped: a segment that shrinks meanwhile is an error, not a signal.
    One segment is open at a time, so that many leave the process its descriptors.

    Raises:
        WeightsError: A segment is missing, or the message does not fit what is there or the limits.
    """
    sizes = sizes_of(source.tensors, limits)
    if len(source.places) != len(sizes):
        raise WeightsError(f"{len(sizes)} tensors have {len(source.places)} places")
    if len(set(source.segments)) < len(source.segments):
        raise WeightsError("a segment is named twice")
    try:
        room = [_size_of(name) for name in unhurried(source.segments)]
        limits.check_bytes(sum(room))
        for meta, size, place in unhurried(zip(source.tensors, sizes, source.places, strict=True)):
            _check_place(meta, size, place, room)
        memory = [_copied(name, size) for name, size in zip(source.segments, room, strict=True)]
    except OSError as error:
        raise WeightsError(f"shared memory can't be read: {error.strerror}") from None
    return {meta.name: tensor for meta, tensor in unhurried(_views(memory, source))}


def _size_of(name: str) -> int:
    with _opened(name) as file:
        return os.fstat(file).st_size


def _copied(name: str, size: int) -> Tensor:
    with _opened(name) as file:
        return read_file(file, 0, size)


def _views(
    memory: Sequence[Tensor], source: SharedMemoryWeights
) -> Iterator[tuple[TensorMeta, Tensor]]:
    """The tensors in these segments, `[bytes]`, uint8 each."""
    sizes = sizes_of(source.tensors)
    for meta, size, (segment, offset) in zip(source.tensors, sizes, source.places, strict=True):
        yield meta, as_tensor(memory[segment][offset : offset + size], meta)


def _lay_out(
    tensors: Mapping[str, Tensor], metas: tuple[TensorMeta, ...], most: int
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Sizes of the segments, and each tensor's place. Names of one tensor share a place."""
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
    """A segment, and what keeps others from sweeping it."""
    while True:
        segment = SharedMemory(new_name("tensors"), create=True, size=max(size, 1))
        lock = own(SHARED_MEMORY / segment.name)
        if lock is not None:
            break
        segment.close()
    try:
        with _opened(segment.name.removeprefix("/"), os.O_RDWR) as file:
            # Else the memory would be looked for when it is written, and its lack kill the process.
            os.posix_fallocate(file, 0, segment.size)
    except BaseException as error:
        segment.close()
        segment.unlink()
        os.close(lock)
        if isinstance(error, OSError):
            raise WeightsError(
                f"{size} bytes of shared memory are not to be had ({error.strerror}); enlarge "
                f"{SHARED_MEMORY}, or send the weights another way"
            ) from None
        raise
    return segment, lock


@contextmanager
def _opened(name: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    """A descriptor of a segment; without Python's SharedMemory, which would remove it at exit."""
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise WeightsError(f"{shown(name)} names no shared memory")
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
        raise WeightsError(f"{name} is in segment {shown(segment)} of {len(room)}")
    if offset < 0 or offset + size > room[segment]:
        raise WeightsError(
            f"{name} is at {shown(offset)} to {shown(offset + size)} of {room[segment]} bytes"
        )
    if offset % dtype_of(meta).itemsize:
        raise WeightsError(f"{name} is at {offset}, where no {meta.dtype} begins")
