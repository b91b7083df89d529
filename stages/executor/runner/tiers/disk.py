"""The disk tier: a folder of blocks, written in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .....bus.control import TiersChanged
from .....config import EngineConfig, ModelError
from .block_folder import BlockFolder, places_within
from .changes import Changes
from .units import UnitKind

MOST_BYTES_IN_FLIGHT = 64 << 20
"""Copies of blocks that wait to be written. A block beyond that is not written: it is lost."""

_TRIALS = 8

Block = npt.NDArray[np.uint8]


class DiskTier:
    """Blocks on disk, written and dropped in order by a thread.

    Attributes:
        num_blocks: Number of blocks within the size limit.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout: str,
        kind: UnitKind,
        changes: Changes,
        beside: DiskTier | None = None,
    ) -> None:
        """Open the folder.

        Args:
            config: The settings, with `kv_disk_path`.
            layout: Digest of the layout of a block's bytes.
            kind: Kind of the units.
            changes: Receives reports of writes, as stored or lost.
            beside: Opens the folder of this tier; None for another.

        Raises:
            ModelError: It can't be used.
        """
        size = kind.num_bytes
        self.num_blocks = places_within(kind.part_of(config.kv_disk_bytes), size)
        if not self.num_blocks:
            raise kind.too_small("kv_disk_bytes", config.kv_disk_bytes)
        folder: BlockFolder | None = beside._folder if beside is not None else None
        self._folder: BlockFolder = BlockFolder(
            Path(config.kv_disk_path),
            layout,
            size,
            self.num_blocks,
            files=kind.files,
            beside=folder,
        )
        self._changes = changes
        # Copies wait in buffers that are used again: new memory takes four times as long to fill.
        self._buffers: list[Block] = []
        self._num_unmade = -(-MOST_BYTES_IN_FLIGHT // size)
        self._writer = ThreadPoolExecutor(1, "kv-write")

    def write(self, blocks: Sequence[tuple[bytes, Block]]) -> None:
        """Write named blocks in the background. Their bytes may change after the call."""
        copies: list[tuple[bytes, Block]] = []
        lost: list[bytes] = []
        for name, block in blocks:
            if (copy := self._take_buffer(block)) is None:
                lost.append(name)
            else:
                np.copyto(copy, block)
                copies.append((name, copy))
        if copies:
            self._writer.submit(self._write, copies)
        if lost:
            self._changes.add(TiersChanged(lost=tuple(lost)))

    def read(self, name: bytes, block: memoryview) -> bool:
        """Read a block, from any thread. Returns whether it is whole; if not, it is dropped."""
        whole = self._folder.read(name, block)
        if not whole:
            self.drop(name)
        return whole

    def drop(self, name: bytes) -> None:
        """Drop a block, after the writes in flight. Any thread."""
        self._writer.submit(self._folder.drop, name)

    def names(self) -> tuple[bytes, ...]:
        """Return the names of all blocks, after the writes in flight. Any thread."""
        return tuple(self._writer.submit(self._folder.names).result())

    def measure_ns(self, block: Block) -> int:
        """Return the time to read a block, with memory to read it to.

        Raises:
            ModelError: The folder can't be written to.
        """
        found = self._folder.names()
        name, times = (found or [bytes(16)])[0], []
        try:
            if not found:
                self._folder.write(name, block.data)
            for _ in range(_TRIALS):
                self._folder.uncache()
                started = time.perf_counter_ns()
                self._folder.read(name, block.data)
                times.append(time.perf_counter_ns() - started)
        except OSError as error:
            raise ModelError(
                f"engine.kv_disk_path can't be written to: {error.strerror}; give another folder"
            ) from None
        if not found:
            self._folder.drop(name)
        return min(times)

    def close(self) -> None:
        """Leave the folder, once the blocks in flight are written."""
        self._writer.shutdown()
        self._folder.close()

    def _take_buffer(self, block: Block) -> Block | None:
        if self._buffers:
            return self._buffers.pop()
        if not self._num_unmade:
            return None
        self._num_unmade -= 1
        return np.empty_like(block)

    def _write(self, blocks: Sequence[tuple[bytes, Block]]) -> None:
        stored, lost = [], []
        for name, block in blocks:
            try:
                self._folder.write(name, block.data)
                stored.append(name)
            except OSError:
                lost.append(name)
            self._buffers.append(block)
        self._changes.add(TiersChanged(stored=tuple(stored), lost=tuple(lost)))
