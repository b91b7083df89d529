"""Weights that are read into memory while what loads them is imported."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from ..config import EngineConfig

HUGE_PAGE = 2 << 20
"""Bytes of a large page, on x86 and with the default pages of others."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SIZES = {"BF16": 2, "F16": 2, "F32": 4}
_CHUNK_BYTES, _CHUNK_TENSORS = 64 << 20, 512
_WORTH_BYTES = 64 << 20
_MOST_HEADER_BYTES = 100_000_000  # the format's limit

_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri")
_LOADER = "transformers.modeling_utils"


class Index(msgspec.Struct):
    """The index of a checkpoint: each tensor's file."""

    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """A tensor in the header of a file; the entry of the file's metadata has other fields."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Model(msgspec.Struct):
    """Fields of config.json of models whose tensors Transformers joins, casts or distributes."""

    text_config: object = None
    quantization_config: object = None
    num_experts: object = None
    num_local_experts: object = None
    n_routed_experts: object = None


class ReadTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor that is being read.

    Attributes:
        dtype: Its type in the terms of safetensors.
        shape: Its shape.
        memory: Its memory, in pages of its own.
        done: Ends once the memory is filled.
    """

    dtype: str
    shape: tuple[int, ...]
    memory: memoryview
    done: Future[None]


class _Chunk(msgspec.Struct):
    """Buffers that are filled with what follows one another in a file."""

    path: Path
    file: int
    start: int
    buffers: list[memoryview] = []
    done: Future[None] = msgspec.field(default_factory=Future)


def pages(size: int, *, huge: bool) -> memoryview:
    """Return anonymous memory, zeros, which is allocated when it is written.

    Args:
        size: Its bytes.
        huge: Use large pages if it fills one and the system has them. What fills none is in small
            ones: a large page that is partly used is resident as a whole, which takes 4 % more
            memory for a model of 3 GB in 250 tensors.

    Raises:
        OSError: There is not enough memory.
    """
    huge = huge and size >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    # Room to start at the boundary of a large page.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(size, 1) + huge * HUGE_PAGE, flags=flags)
    start = 0
    if huge:
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    return memoryview(memory)[start : start + size]


class Reading:
    """Tensors of files, read by threads that need no interpreter lock meanwhile.

    Attributes:
        tensors: The tensors by name; {} if some are no floats of 16 or 32 bits.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the files' headers, and begin to read. Raises OSError or MsgspecError."""
        self.tensors: dict[str, ReadTensor] = {}
        # All processors but one, which imports meanwhile.
        threads = max(1, min(4, (os.cpu_count() or 2) - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
        chunks: list[_Chunk] = []
        for path in paths:
            file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, file)
            size = int.from_bytes(os.pread(file, 8, 0), "little")
            header = os.pread(file, min(size, _MOST_HEADER_BYTES), 8)
            entries = msgspec.json.decode(header, type=dict[str, _Entry])
            entries.pop("__metadata__", None)
            if any(each.dtype not in _SIZES for each in entries.values()):
                self.tensors.clear()
                return
            chunks += self._chunks(path, file, 8 + size, entries)
        for chunk in chunks:
            self._pool.submit(self._read, chunk)
        self._pool.shutdown(wait=False)

    def stop(self) -> None:
        """Leave the rest unread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _chunks(
        self, path: Path, file: int, start: int, entries: dict[str, _Entry]
    ) -> Iterator[_Chunk]:
        """Allocate a file's tensors, and iterate over groups of consecutive ones."""
        chunk, end = _Chunk(path, file, start), 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            memory = pages(math.prod(entry.shape) * _SIZES[entry.dtype], huge=True)
            first = start + entry.data_offsets[0]
            full = end - chunk.start >= _CHUNK_BYTES or len(chunk.buffers) == _CHUNK_TENSORS
            if full or first != end:
                if chunk.buffers:
                    yield chunk
                chunk, end = _Chunk(path, file, first), first
            end += len(memory)
            if memory:
                chunk.buffers.append(memory)
            self.tensors[name] = ReadTensor(entry.dtype, entry.shape, memory, chunk.done)
        yield chunk

    def _read(self, chunk: _Chunk) -> None:
        buffers, start = chunk.buffers, chunk.start
        try:
            while buffers:
                count = os.preadv(chunk.file, buffers, start)
                if not count:
                    raise EOFError(f"{chunk.path} is cut off")
                start += count
                while buffers and count >= len(buffers[0]):
                    count -= len(buffers.pop(0))
                if count:
                    buffers[0] = buffers[0][count:]
        except BaseException as error:  # noqa: BLE001
            chunk.done.set_exception(error)
        else:
            chunk.done.set_result(None)


_begun: dict[tuple[Path, ...], Reading] = {}


def read_ahead(config: EngineConfig) -> None:
    """Begin to read the weights of the settings' model, if the imports of its loader take time.

    Does nothing for what is probably loaded in another way, or onto another device, or is small.
    """
    folder = config.model_folder
    if (
        _LOADER in sys.modules
        or not hasattr(mmap, "MADV_HUGEPAGE")
        or config.huge_pages != "auto"
        or config.quantization != "auto"
        or config.num_ranks > 1
        or config.rank_invariant
        or config.device not in ("auto", "cpu")
        or (config.device == "auto" and any(map(os.path.exists, _DEVICES)))
    ):
        return
    with suppress(OSError, ValueError, msgspec.MsgspecError):  # loading says what is wrong
        model = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Model)
        if model != _Model():
            return
        paths = [folder / WEIGHTS]
        if not paths[0].is_file():
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=Index)
            paths = [folder / name for name in {*index.weight_map.values()}]
        if sum(path.stat().st_size for path in paths) < _WORTH_BYTES:
            return
        _begun[tuple(sorted(paths))] = Reading(paths)


def reading_of(paths: Iterable[Path]) -> Reading:
    """Return the begun reading of files, or begin it. Raises OSError or MsgspecError."""
    files = tuple(sorted({*paths}))
    return _begun.pop(files, None) or Reading(files)


def stop_reading() -> None:
    """End readings that no model has taken."""
    while _begun:
        _begun.popitem()[1].stop()
