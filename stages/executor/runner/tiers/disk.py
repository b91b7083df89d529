"""The disk tier: a folder of blocks, written in the background."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .....bus.control import TiersChanged
from .....config import EngineConfig, ModelError
from .block_folder import BlockFolder, file_bytes
from .changes import TierChanges

MOST_BYTES_IN_FLIGHT = 64 << 20
"""Copies of blocks that wait to be written. A block beyond that is not written: it is lost."""

_TRIALS = 3


class DiskTier:
    """Blocks in files, written and deleted in order by a thread.

    Attributes:
        num_blocks: That fit the size limit.
    """

    def __init__(
        self, config: EngineConfig, layout: str, block_bytes: int, changes: TierChanges
    ) -> None:
        """Open the folder.

        Args:
            config: The settings, with `kv_disk_path`.
            layout: Digest of the layout of a block's bytes.
            block_bytes: Size of a block.
            changes: Where writes are reported, as stored or lost.

        Raises:
            ModelError: It can't be used.
        """
        self.num_blocks = config.kv_disk_bytes // file_bytes(block_bytes)
        if not self.num_blocks:
            raise ModelError(
                f"engine.kv_disk_bytes is {config.kv_disk_bytes}, and one block takes "
                f"{file_bytes(block_bytes)}; raise it"
            )
        self._folder = BlockFolder(Path(config.kv_disk_path), layout, block_bytes)
        self._changes = changes
        self._lock = threading.Lock()
        self._bytes_in_flight = 0
        self._writer = ThreadPoolExecutor(1, "kv-write")

    def write(self, name: bytes, block: npt.NDArray[np.uint8]) -> None:
        """Write a block in the background. Its bytes may change after the call."""
        with self._lock:
            fits = self._bytes_in_flight + block.nbytes <= MOST_BYTES_IN_FLIGHT
            self._bytes_in_flight += block.nbytes * fits
        if fits:
            self._writer.submit(self._write, name, block.copy())
        else:
            self._changes.add(TiersChanged(lost=(name,)))

    def read(self, name: bytes, block: memoryview) -> bool:
        """Read a block, from any thread. Returns whether it is whole."""
        return self._folder.read(name, block)

    def drop(self, name: bytes) -> None:
        """Delete a block, behind the writes in flight."""
        self._writer.submit(self._folder.drop, name)

    def names(self) -> tuple[bytes, ...]:
        """Return the names of all blocks, behind the writes in flight."""
        return tuple(self._writer.submit(self._folder.names).result())

    def measure_ns(self, block: npt.NDArray[np.uint8]) -> int:
        """Return the time to read a block, with memory to read it to.

        Raises:
            ModelError: The folder can't be written to.
        """
        name = bytes(16)
        try:
            self._folder.write(name, block.data)
        except OSError as error:
            raise ModelError(
                f"engine.kv_disk_path can't be written to: {error.strerror}; give another folder"
            ) from None
        times = []
        for _ in range(_TRIALS):
            started = time.perf_counter_ns()
            self._folder.read(name, block.data)
            times.append(time.perf_counter_ns() - started)
        self._folder.drop(name)
        return min(times)

    def close(self) -> None:
        """Leave the folder, once the blocks in flight are written."""
        self._writer.shutdown()
        self._folder.close()

    def _write(self, name: bytes, block: npt.NDArray[np.uint8]) -> None:
        try:
            self._folder.write(name, block.data)
            change = TiersChanged(stored=(name,))
        except OSError:
            change = TiersChanged(lost=(name,))
        with self._lock:
            self._bytes_in_flight -= block.nbytes
        self._changes.add(change)
