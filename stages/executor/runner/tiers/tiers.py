"""Moves of KV blocks between the cache, host memory and disk."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from .....bus.control import AuditedBlock, TierCapacity, TiersChanged
from .....bus.messages import KVMove
from .....config import EngineConfig, ModelError
from ..kv_cache import KVCache, block_bytes
from ..loaded_model import LoadedModel
from ..system_memory import zeros
from .block_folder import BlockFolder, file_bytes
from .layout import BlockLayout, weights_digest

MOST_BYTES_IN_FLIGHT = 64 << 20
"""Copies of blocks that wait to be written. A block beyond that is not written: it is lost."""

STAGING_BYTES = 1 << 28
"""Host memory that reading from disk takes at most, if `kv_host_bytes` doesn't give it more."""

_LEAST_SLOTS = 16
_TRIALS = 3


class BlockTiers:
    """Host slots, and a folder of blocks on disk.

    All methods are for the thread that runs the steps, except where they say otherwise. Files are
    read and written by two threads; what they have done is returned by `take_changes`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        cache: KVCache,
        weight_version: int,
        token_ns: int,
        *,
        exact: bool = False,
    ) -> None:
        """Allocate the host's slots, and open the folder.

        Args:
            config: The settings, with a tier.
            model: The model.
            cache: Its KV cache.
            weight_version: Of the model's weights.
            token_ns: Time to compute one token of a prompt.
            exact: Whether KV computed again has the same bits.

        Raises:
            ModelError: The model has no KV, or memory or folder can't be used.
        """
        if not model.layers:
            raise ModelError(
                "the model keeps no KV, so engine.kv_host_bytes and engine.kv_disk_path must be "
                "left out"
            )
        self._cache = cache
        size = block_bytes(model, cache.block_size)
        layout = BlockLayout.of(model, cache)
        slots = _num_slots(config, model, cache.block_size, size)
        try:
            shape = (slots, size // model.dtypes.kv_cache.itemsize)
            self._slots = zeros(shape, model.dtypes.kv_cache, torch.device("cpu"))
        except RuntimeError as error:
            raise ModelError(f"engine.kv_host_bytes can't be allocated: {error}") from None
        self._bytes: npt.NDArray[np.uint8] = self._slots.view(torch.uint8).numpy()
        # Of the one thread that reads: new memory for each block would cost more than reading it.
        self._read_buffer = np.empty_like(self._bytes[0])
        self._folder: BlockFolder | None = None
        disk_blocks = 0
        if config.kv_disk_path:
            disk_blocks = config.kv_disk_bytes // file_bytes(size)
            if not disk_blocks:
                raise ModelError(
                    f"engine.kv_disk_bytes is {config.kv_disk_bytes}, and one block takes "
                    f"{file_bytes(size)}; raise it"
                )
            self._folder = BlockFolder(Path(config.kv_disk_path), layout.digest, size)
        # Raised by `reset`: a fetch from before must not write to a slot that was given away.
        self._generation = 0
        self._lock = threading.Lock()
        self._bytes_in_flight = 0
        self._changes: list[TiersChanged] = []
        self._wake: Callable[[], None] = lambda: None
        self._changed = threading.Event()
        self._writer = ThreadPoolExecutor(1, "kv-write")
        self._reader = ThreadPoolExecutor(1, "kv-read")
        try:
            load_ns, fetch_ns = self._measure()
        except ModelError:
            self.close()
            raise
        self.capacity = TierCapacity(
            host_slots=slots,
            disk_blocks=disk_blocks,
            layout=layout.digest,
            weights=weights_digest(model.module),
            weight_version=weight_version,
            incarnation=secrets.token_hex(8),
            load_ns=load_ns,
            fetch_ns=fetch_ns,
            token_ns=token_ns,
            exact=exact,
        )

    def follow(self, wake: Callable[[], None]) -> None:
        """Call a function, from any thread, when there are changes to take."""
        self._wake = wake

    def apply(self, moves: Sequence[KVMove]) -> None:
        """Apply moves in order; those of files in the background."""
        for run in _runs(moves):
            match run[0].kind:
                case "store":
                    self._store(run)
                case "load":
                    self._load(run)
                case "fetch":
                    for move in run:
                        self._reader.submit(self._fetch, move, self._generation)
                case "drop":
                    for move in run:
                        self._writer.submit(self._drop, move.name)
                case "compare":
                    audited = tuple(map(self._compare, run))
                    self._report(TiersChanged(audited=audited))

    def reset(self) -> None:
        """Drop the fetches in flight. Slots and files stay as they are."""
        with self._lock:
            self._generation += 1

    def on_disk(self) -> TiersChanged:
        """Return all blocks on disk, behind those that are being written."""
        if self._folder is None:
            return TiersChanged(whole=True)
        return TiersChanged(
            stored=tuple(self._writer.submit(self._folder.names).result()), whole=True
        )

    def take_changes(self) -> TiersChanged | None:
        """Return what threads have done since the last call; None for nothing. Any thread."""
        with self._lock:
            changes, self._changes = self._changes, []
            self._changed.clear()
        if not changes:
            return None
        return TiersChanged(
            stored=tuple(name for each in changes for name in each.stored),
            fetched=tuple(name for each in changes for name in each.fetched),
            lost=tuple(name for each in changes for name in each.lost),
            audited=tuple(block for each in changes for block in each.audited),
        )

    def wait(self, timeout_s: float) -> None:
        """Wait until there are changes to take."""
        self._changed.wait(timeout_s)

    def close(self) -> None:
        """End the threads, once the blocks in flight are written."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        if self._folder is not None:
            self._folder.close()

    # --- cache and host -----------------------------------------------------------------------

    def _parts(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Each tensor of the cache, `[blocks, numbers]`, and its columns of the slots."""
        start = 0
        for layer in zip(self._cache.keys, self._cache.values, strict=True):
            for tensor in layer:
                blocks = tensor.view(tensor.shape[0], -1)
                yield blocks, self._slots[:, start : start + blocks.shape[1]]
                start += blocks.shape[1]

    def _store(self, moves: Sequence[KVMove]) -> None:
        slots = torch.tensor([move.slot for move in moves])
        block_ids = torch.tensor([move.block_id for move in moves], device=self._device)
        for blocks, columns in self._parts():
            columns[slots] = blocks.index_select(0, block_ids).cpu()
        for move in moves:
            if move.write:
                self._write(move)

    def _load(self, moves: Sequence[KVMove]) -> None:
        slots = torch.tensor([move.slot for move in moves])
        block_ids = torch.tensor([move.block_id for move in moves], device=self._device)
        for blocks, columns in self._parts():
            blocks.index_copy_(0, block_ids, columns[slots].to(self._device))

    def _compare(self, move: KVMove) -> AuditedBlock:
        digests = []
        for block_id in (move.other, move.block_id):
            digest = xxhash.xxh3_128()
            for blocks, _ in self._parts():
                digest.update(blocks[block_id].cpu().view(torch.uint8).numpy().data)
            digests.append(digest.hexdigest())
        return AuditedBlock(move.name, *digests)

    @property
    def _device(self) -> torch.device:
        return self._cache.keys[0].device

    # --- disk ---------------------------------------------------------------------------------

    def _write(self, move: KVMove) -> None:
        data = self._bytes[move.slot]
        with self._lock:
            fits = self._bytes_in_flight + data.nbytes <= MOST_BYTES_IN_FLIGHT
            self._bytes_in_flight += data.nbytes * fits
        if fits:
            # A copy: the slot may be given away before it is written.
            self._writer.submit(self._write_copy, move.name, data.copy())
        else:
            self._report(TiersChanged(lost=(move.name,)))

    def _write_copy(self, name: bytes, data: npt.NDArray[np.uint8]) -> None:
        assert self._folder is not None
        try:
            self._folder.write(name, data.data)
            change = TiersChanged(stored=(name,))
        except OSError:
            change = TiersChanged(lost=(name,))
        with self._lock:
            self._bytes_in_flight -= data.nbytes
        self._report(change)

    def _fetch(self, move: KVMove, generation: int) -> None:
        assert self._folder is not None
        names, whole = (move.name,), False
        try:
            whole = self._folder.read(move.name, self._read_buffer.data)
        finally:
            # In any case: a sequence waits for the report.
            with self._lock:
                current = generation == self._generation
                if whole and current:
                    self._bytes[move.slot] = self._read_buffer
            if current:
                self._report(TiersChanged(fetched=names) if whole else TiersChanged(lost=names))

    def _drop(self, name: bytes) -> None:
        assert self._folder is not None
        self._folder.drop(name)

    def _report(self, change: TiersChanged) -> None:
        with self._lock:
            self._changes.append(change)
            self._changed.set()
        self._wake()

    # --- measuring ----------------------------------------------------------------------------

    def _measure(self) -> tuple[int, int]:
        """Return the times to load a block, and to read one from disk, in ns.

        Raises:
            ModelError: The folder can't be written to.
        """
        padding, name = self._cache.padding_block, bytes(16)
        move = KVMove("load", name, slot=0, block_id=padding)
        load_ns = min(_timed(lambda: self._load([move])) for _ in range(_TRIALS))
        if self._folder is None:
            return load_ns, 0
        data = self._bytes[0].copy()
        try:
            self._folder.write(name, data.data)
        except OSError as error:
            raise ModelError(
                f"engine.kv_disk_path can't be written to: {error.strerror}; give another folder"
            ) from None
        folder = self._folder
        fetch_ns = min(_timed(lambda: folder.read(name, data.data)) for _ in range(_TRIALS))
        folder.drop(name)
        return load_ns, fetch_ns


def _num_slots(config: EngineConfig, model: LoadedModel, block_size: int, size: int) -> int:
    """Return the number of host slots, for blocks of `size` bytes. Raises ModelError: none fits."""
    slots = config.kv_host_bytes // size
    if config.kv_disk_path:
        # At most half of the slots wait for the disk, and a prompt needs all of its blocks.
        needed = 2 * -(-model.max_model_len // block_size)
        return max(slots, min(needed, STAGING_BYTES // size), _LEAST_SLOTS)
    if not slots:
        raise ModelError(
            f"engine.kv_host_bytes is {config.kv_host_bytes}, and one block takes {size}; "
            "raise it, or set it to 0"
        )
    return slots


def _runs(moves: Iterable[KVMove]) -> Iterator[list[KVMove]]:
    """Split moves into runs of one kind, in which no slot is named twice."""
    run: list[KVMove] = []
    slots: set[int] = set()
    for move in moves:
        if run and (move.kind != run[0].kind or move.slot in slots):
            yield run
            run, slots = [], set()
        run.append(move)
        slots.add(move.slot)
    if run:
        yield run


def _timed(work: Callable[[], object]) -> int:
    started = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - started
