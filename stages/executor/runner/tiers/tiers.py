"""Moves of KV blocks and snapshots between the cache, host memory and disk."""

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
from ..kv_cache import KVCache
from ..loaded_model import LoadedModel
from ..system_memory import zeros
from .changes import Changes, StateChanges, TierChanges
from .disk import DiskTier
from .fetches import Fetches
from .host_slots import HostSlots
from .layout import BlockLayout, model_digest
from .peer_fetches import PeerFetches
from .transports.peers import Transfer
from .transports.slots import SharedSlots
from .transports.tcp import BlockServer
from .units import UnitKind, kinds_of

_READERS = 2
_TRIALS = 3


class UnitTiers:
    """Host slots, and files on disk, for one kind of unit: blocks, or snapshots.

    All methods are for the thread that runs the steps, except where they say otherwise.

    Attributes:
        slots: The host slots.
        shared: The same for other executors; None if they may not read it.
        num_slots: Number of host slots.
        num_on_disk: Most units on disk; 0 for no disk.
        load_ns: As in TierCapacity, as `fetch_ns`.
    """

    def __init__(
        self,
        config: EngineConfig,
        kind: UnitKind,
        layout: str,
        changes: Changes,
        *,
        shares: bool,
        beside: UnitTiers | None = None,
    ) -> None:
        """Allocate the host's slots, and open the files.

        Args:
            config: The settings.
            kind: Kind of the units.
            layout: Digest of the layout of all kinds' bytes.
            changes: Receives what threads have done.
            shares: Whether to exchange units with other executors.
            beside: Units of another kind of the same executor.

        Raises:
            ModelError: Memory or folder can't be used.
        """
        self.num_slots = kind.num_slots(config, shares=shares)
        self.shared, memory = _host_memory(config, self.num_slots, kind.num_bytes, shares=shares)
        self.slots = HostSlots(kind.units, memory, self.shared)
        self.receipts = PeerFetches(self.slots, changes, config.kv_secret)
        self.num_on_disk = self.fetch_ns = 0
        self._changes = changes
        self._disk: DiskTier | None = None
        if config.kv_disk_path:
            neighbour = beside._disk if beside is not None else None
            self._disk = disk = DiskTier(config, layout, kind, changes, neighbour)
            self._reads = Fetches(self.slots, changes, disk.read, _READERS, "kv-read")
        try:
            self.load_ns = self._measure_load_ns(kind.trial)
            if self._disk is not None:
                self.num_on_disk = self._disk.num_blocks
                self.fetch_ns = self._disk.measure_ns(memory[0])
        except ModelError:
            self.close()
            raise

    def apply(self, run: Sequence[KVMove]) -> None:
        """Apply moves of one kind, in which no slot is named twice; those of files in the
        background."""
        match run[0].kind:
            case "store":
                self.slots.store(run)
                self._write([move for move in run if move.write])
            case "load":
                self.slots.load(run)
            case "fetch":
                self.receipts.submit([move for move in run if move.source])
                if from_disk := [move for move in run if not move.source]:
                    self._reads.submit(from_disk)
            case "write":
                self._write(run)
            case "drop":
                assert self._disk is not None
                for move in run:
                    self._disk.drop(move.name)
            case "compare":
                self._changes.add(TiersChanged(audited=tuple(map(self.slots.compare, run))))
            case "offer":
                self.slots.offer(run)

    def set_step(self, step: int) -> None:
        """Note that the units of a step are offered; 0: a new epoch begins."""
        if self.shared is not None:
            self.shared.set_step(step)

    def on_disk(self) -> TiersChanged:
        """Return all units on disk, after those that are being written. Any thread."""
        names = self._disk.names() if self._disk is not None else ()
        return TiersChanged(stored=names, whole=True)

    def address(self, server: BlockServer | None) -> str:
        """Return where other executors read the slots; "" if they may not."""
        if self.shared is None:
            return ""
        tcp = server.address if server is not None else ""
        return msgspec.structs.replace(self.shared.address, tcp=tcp).encode()

    def close(self) -> None:
        """End the threads, once the units in flight are written."""
        self.receipts.close()
        if self.shared is not None:
            self.shared.close()
        if self._disk is not None:
            self._reads.close()
            self._disk.close()

    def _write(self, moves: Sequence[KVMove]) -> None:
        if moves:
            assert self._disk is not None
            memory = self.slots.memory
            self._disk.write([(move.name, memory[move.slot]) for move in moves])

    def _measure_load_ns(self, trial: int) -> int:
        """Return the time to load a unit, with one that no sequence reads."""
        move, times = KVMove("load", b"", slot=0, block_id=trial), []
        for _ in range(_TRIALS):
            started = time.perf_counter_ns()
            self.slots.load([move])
            times.append(time.perf_counter_ns() - started)
        return min(times)


class BlockTiers:
    """The tiers of an executor's blocks, and of its snapshots if the model has a recurrent state.

    All methods are for the thread that runs the steps, except where they say otherwise. What other
    threads have done is returned by `take_changes`.

    Attributes:
        blocks: The tiers of blocks.
        states: The tiers of snapshots; None for a model without recurrent state.
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
        layout = BlockLayout.of(model, cache).digest
        self._changes = TierChanges()
        self._kinds: list[UnitTiers] = []
        self._server: BlockServer | None = None
        try:
            blocks, *states = kinds_of(config, cache, model.max_model_len)
            self.blocks = UnitTiers(config, blocks, layout, self._changes, shares=shares)
            self._kinds.append(self.blocks)
            self.states: UnitTiers | None = None
            for kind in states:
                changes = StateChanges(self._changes)
                self.states = UnitTiers(
                    config, kind, layout, changes, shares=shares, beside=self.blocks
                )
                self._kinds.append(self.states)
            if shares and config.kv_listen:
                slots = [each.shared for each in self._kinds if each.shared is not None]
                self._server = BlockServer(slots[0], config.kv_listen, config.kv_secret)
                for each in slots[1:]:
                    self._server.add(each)
            self.capacity = TierCapacity(
                host_slots=self.blocks.num_slots,
                disk_blocks=self.blocks.num_on_disk,
                layout=layout,
                model=model_digest(model.module, computation),
                weight_version=weight_version,
                incarnation=secrets.token_hex(8),
                load_ns=self.blocks.load_ns,
                fetch_ns=self.blocks.fetch_ns,
                token_ns=token_ns,
                address=self.blocks.address(self._server),
            )
            if (own := self.states) is not None:
                capacity = msgspec.structs.replace(
                    self.capacity,
                    host_slots=own.num_slots,
                    disk_blocks=own.num_on_disk,
                    load_ns=own.load_ns,
                    fetch_ns=own.fetch_ns,
                    address=own.address(self._server),
                )
                self.capacity = msgspec.structs.replace(self.capacity, states=capacity)
        except ModelError:
            self.close()
            raise

    @property
    def slots(self) -> HostSlots:
        """The host slots of blocks."""
        return self.blocks.slots

    def follow(self, wake: Callable[[], None]) -> None:
        """Call a function, from any thread, when there are changes to take."""
        self._changes.follow(wake)

    def apply(self, moves: Sequence[KVMove]) -> None:
        """Apply moves in order; those of files in the background."""
        for run in _runs(moves):
            self._tiers_of(run[0]).apply(run)

    def offer(self, moves: Sequence[KVMove], step: int) -> None:
        """Let other executors read the blocks that a step has computed."""
        self.apply(moves)
        for kind in self._kinds:
            kind.set_step(step)

    def reset(self) -> None:
        """Drop the fetches in flight. Slots and files stay as they are."""
        for kind in self._kinds:
            kind.set_step(0)
        self._changes.reset()
        for kind in self._kinds:
            kind.receipts.reset()

    def on_disk(self) -> TiersChanged:
        """Return all blocks on disk, after those that are being written. Any thread."""
        found = self.blocks.on_disk()
        if self.states is not None:
            found = msgspec.structs.replace(found, states=self.states.on_disk())
        return found

    def take_changes(self) -> TiersChanged | None:
        """Return what threads have done since the last call; None for nothing. Any thread."""
        return self._changes.take()

    def take_transfers(self) -> list[Transfer]:
        """Return the transfers from other executors since the last call. Any thread."""
        return [each for kind in self._kinds for each in kind.receipts.take_transfers()]

    def wait(self, timeout_s: float) -> None:
        """Wait until there are changes to take. Any thread."""
        self._changes.wait(timeout_s)

    def close(self) -> None:
        """End the threads, once the blocks in flight are written."""
        if self._server is not None:
            self._server.close()
        for kind in self._kinds:
            kind.close()

    def _tiers_of(self, move: KVMove) -> UnitTiers:
        if not move.state:
            return self.blocks
        assert self.states is not None, "the model has no recurrent state"
        return self.states


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
        raise ModelError(
            f"engine.kv_host_bytes can't be allocated: {error}",
            remedy="lower it, or give the process more memory",
        ) from None
    array: npt.NDArray[np.uint8] = memory.numpy()
    return None, array


def _runs(moves: Iterable[KVMove]) -> Iterator[list[KVMove]]:
    """Split moves into runs of one kind, in which no slot is named twice."""
    run: list[KVMove] = []
    slots: set[int] = set()
    for move in moves:
        same = run and (move.kind, move.state) == (run[0].kind, run[0].state)
        if run and (not same or move.slot in slots):
            yield run
            run, slots = [], set()
        run.append(move)
        slots.add(move.slot)
    if run:
        yield run
