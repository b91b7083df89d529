"""Moves of KV blocks between the cache, host memory and disk."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from .....bus.control import TierCapacity, TiersChanged
from .....bus.steps import KVMove
from .....config import EngineConfig, ModelError
from ..kv_cache import KVCache, block_bytes
from ..loaded_model import LoadedModel
from ..system_memory import zeros
from .changes import TierChanges
from .disk import DiskTier
from .fetches import Fetches
from .host_slots import HostSlots
from .layout import BlockLayout, model_digest
from .peer_fetches import PeerFetches
from .transports.peers import Transfer
from .transports.slots import SharedSlots
from .transports.tcp import BlockServer

STAGING_BYTES = 1 << 28
"""Host memory that reading from disk takes at most, if `kv_host_bytes` doesn't give it more."""

_LEAST_SLOTS = 16
_READERS = 2
_TRIALS = 3


class BlockTiers:
    """Host slots, and a folder of blocks on disk.

    All methods are for the thread that runs the steps, except where they say otherwise. What other
    threads have done is returned by `take_changes`.

    Attributes:
        slots: The host slots.
        capacity: The size and speed of the tiers.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        cache: KVCache,
        weight_version: int,
        token_ns: int,
        *,
        computation: str = "",
        shares: bool = False,
    ) -> None:
        """Allocate the host's slots, and open the folder.

        Args:
            config: The settings, with a tier if the slots are not shared.
            model: The model.
            cache: Its KV cache.
            weight_version: Version of the model's weights.
            token_ns: Time to compute one token of a prompt.
            computation: Digest of what the numbers of the KV depend on, besides the weights.
            shares: Whether to exchange blocks with other executors.

        Raises:
            ModelError: The model has no KV, or memory or folder can't be used.
        """
        if not model.layers:
            raise ModelError(
                "the model keeps no KV, so engine.kv_host_bytes and engine.kv_disk_path must be "
                "left out"
            )
        size = block_bytes(model, cache.block_size)
        layout = BlockLayout.of(model, cache).digest
        num_slots = _num_slots(config, model, cache.block_size, size, shares=shares)
        shared, memory = _host_memory(config, num_slots, size, shares=shares)
        self.slots = HostSlots(cache, memory, shared)
        self._changes = TierChanges()
        self._shared = shared
        self._server: BlockServer | None = None
        self._receipts = PeerFetches(self.slots, self._changes, config.kv_secret)
        self._disk: DiskTier | None = None
        if config.kv_disk_path:
            self._disk = disk = DiskTier(config, layout, size, self._changes)
            self._reads = Fetches(self.slots, self._changes, disk.read, _READERS, "kv-read")
        try:
            if shared is not None and config.kv_listen:
                self._server = BlockServer(shared, config.kv_listen, config.kv_secret)
            self.capacity = TierCapacity(
                host_slots=num_slots,
                disk_blocks=self._disk.num_blocks if self._disk is not None else 0,
                layout=layout,
                model=model_digest(model.module, computation),
                weight_version=weight_version,
                incarnation=secrets.token_hex(8),
                load_ns=self._measure_load_ns(cache.padding_block),
                fetch_ns=self._disk.measure_ns(self.slots.memory[0]) if self._disk else 0,
                token_ns=token_ns,
                address=self._address(),
            )
        except ModelError:
            self.close()
            raise

    def follow(self, wake: Callable[[], None]) -> None:
        """Call a function, from any thread, when there are changes to take."""
        self._changes.follow(wake)

    def apply(self, moves: Sequence[KVMove]) -> None:
        """Apply moves in order; those of files in the background."""
        for run in _runs(moves):
            match run[0].kind:
                case "store":
                    self.slots.store(run)
                    memory = self.slots.memory
                    if blocks := [(move.name, memory[move.slot]) for move in run if move.write]:
                        assert self._disk is not None
                        self._disk.write(blocks)
                case "load":
                    self.slots.load(run)
                case "fetch":
                    self._receipts.submit([move for move in run if move.source])
                    if from_disk := [move for move in run if not move.source]:
                        self._reads.submit(from_disk)
                case "write":
                    assert self._disk is not None
                    memory = self.slots.memory
                    self._disk.write([(move.name, memory[move.slot]) for move in run])
                case "drop":
                    assert self._disk is not None
                    for move in run:
                        self._disk.drop(move.name)
                case "compare":
                    self._changes.add(TiersChanged(audited=tuple(map(self.slots.compare, run))))

    def offer(self, moves: Sequence[KVMove], step: int) -> None:
        """Let other executors read the blocks that a step has computed."""
        assert self._shared is not None, "no other executor may read the slots"
        for run in _runs(moves):
            self.slots.offer(run)
        self._shared.set_step(step)

    def reset(self) -> None:
        """Drop the fetches in flight. Slots and files stay as they are."""
        if self._shared is not None:
            self._shared.set_step(0)
        self._changes.reset()
        self._receipts.reset()

    def on_disk(self) -> TiersChanged:
        """Return all blocks on disk, after those that are being written. Any thread."""
        names = self._disk.names() if self._disk is not None else ()
        return TiersChanged(stored=names, whole=True)

    def take_changes(self) -> TiersChanged | None:
        """Return what threads have done since the last call; None for nothing. Any thread."""
        return self._changes.take()

    def take_transfers(self) -> list[Transfer]:
        """Return the transfers from other executors since the last call. Any thread."""
        return self._receipts.take_transfers()

    def wait(self, timeout_s: float) -> None:
        """Wait until there are changes to take. Any thread."""
        self._changes.wait(timeout_s)

    def close(self) -> None:
        """End the threads, once the blocks in flight are written."""
        self._receipts.close()
        if self._server is not None:
            self._server.close()
        if self._shared is not None:
            self._shared.close()
        if self._disk is not None:
            self._reads.close()
            self._disk.close()

    def _address(self) -> str:
        """Return where other executors read the slots; "" if they may not."""
        if self._shared is None:
            return ""
        tcp = self._server.address if self._server is not None else ""
        return msgspec.structs.replace(self._shared.address, tcp=tcp).encode()

    def _measure_load_ns(self, block_id: int) -> int:
        """Return the time to load a block, with a place that holds none."""
        move, times = KVMove("load", b"", slot=0, block_id=block_id), []
        for _ in range(_TRIALS):
            started = time.perf_counter_ns()
            self.slots.load([move])
            times.append(time.perf_counter_ns() - started)
        return min(times)


def _num_slots(
    config: EngineConfig, model: LoadedModel, block_size: int, size: int, *, shares: bool
) -> int:
    """Return the number of host slots, for blocks of `size` bytes. Raises ModelError: none fits."""
    slots = config.kv_host_bytes // size
    if config.kv_disk_path or shares:
        # At most half of the slots are being fetched, and a prompt needs all of its blocks.
        needed = 2 * -(-model.max_model_len // block_size)
        return max(slots, min(needed, STAGING_BYTES // size), _LEAST_SLOTS)
    if not slots:
        raise ModelError(
            f"engine.kv_host_bytes is {config.kv_host_bytes}, and one block takes {size}; "
            "raise it, or set it to 0"
        )
    return slots


def _host_memory(
    config: EngineConfig, num_slots: int, size: int, *, shares: bool
) -> tuple[SharedSlots | None, npt.NDArray[np.uint8]]:
    huge = config.huge_pages == "auto"
    try:
        if shares:
            shared = SharedSlots(num_slots, size)
            return shared, shared.bytes
        memory = zeros((num_slots, size), torch.uint8, torch.device("cpu"), huge=huge)
    except (RuntimeError, OSError) as error:
        raise ModelError(f"engine.kv_host_bytes can't be allocated: {error}") from None
    array: npt.NDArray[np.uint8] = memory.numpy()
    return None, array


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
