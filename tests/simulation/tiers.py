"""KV tiers of the simulated executor: blocks in host slots, on a disk, and of other executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from nano_inference.bus.control import AuditedBlock, TierCapacity, TiersChanged
from nano_inference.bus.steps import KVMove
from nano_inference.stages.executor.runner.tiers.changes import StateChanges, TierChanges

from .loop import SimulatedLoop, SimulatedProcess

Block = tuple[list[int], list[tuple[int, int]]]
"""A block's KV: the hash at each position, and the weights and adapter that computed it."""

WRITE_NS, READ_NS = 900_000, 700_000
"""Mean time to write a block to disk, and to read it or one of another executor."""

POLL_NS = 1_500_000
"""Nanoseconds between two reads of the other executor's step by a fetch."""

MOST_WAIT_NS = 60_000_000_000

UNREADABLE, UNWRITABLE = 0.03, 0.03
"""The share of blocks that can't be read or written."""


class SimulatedTiers:
    """`BlockTiers` without bytes. The work of its threads takes simulated time here.

    Attributes:
        capacity: The size of the tiers.
        states: Those of snapshots, if the model has recurrent state.
        slots: The host slots.
        offered: The name under which other executors may read a slot.
        step: The last step whose blocks are offered.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        random: Random,
        process: SimulatedProcess | None,
        memory: list[Any],
        peers: dict[str, SimulatedTiers],
        disk: dict[bytes, Any],
        num_slots: int,
        disk_blocks: int,
        weight_version: int,
        factor: Callable[[], float],
        blocks: SimulatedTiers | None = None,
    ) -> None:
        """Set up empty slots.

        Args:
            loop, random, factor: Run and draw the time that moves take.
            process: The executor's.
            memory: Its KV cache.
            peers: All tiers by their addresses; these are added.
            disk: The blocks on disk by name, which outlive the process.
            num_slots, disk_blocks: The size of the tiers.
            weight_version: Version of the weights as they were loaded.
            blocks: The tiers of blocks, if these are of snapshots.
        """
        self._loop, self._random, self._factor = loop, random.random, factor
        self._process, self._memory, self._peers, self._disk = process, memory, peers, disk
        self.states: SimulatedTiers | None = None
        self._changes: Any = TierChanges()
        if blocks is not None:
            self._changes, blocks.states = StateChanges(blocks._changes), self
        self._writes: list[KVMove | tuple[KVMove, Any]] = []
        self.slots: list[Any] = [([], []) for _ in range(num_slots)]
        self.offered: dict[int, bytes] = {}
        self.step = 0
        address = f"executor-{len(peers)}"
        peers[address] = self
        self.capacity = TierCapacity(
            host_slots=num_slots,
            disk_blocks=disk_blocks,
            layout="simulated",
            model="as loaded",
            weight_version=weight_version,
            incarnation=f"{random.getrandbits(64):016x}",
            load_ns=1_000,
            fetch_ns=2_000,
            token_ns=20_000,
            address=address,
        )
        if blocks is not None:
            blocks.capacity = msgspec.structs.replace(blocks.capacity, states=self.capacity)

    # --- the interface of BlockTiers ----------------------------------------------------------

    def follow(self, wake: Callable[[], None]) -> None:
        self._changes.follow(wake)

    def apply(self, moves: Sequence[KVMove]) -> None:
        for move in moves:
            if move.state and self.states is not None:
                self.states.apply([msgspec.structs.replace(move, state=False)])
                continue
            match move.kind:
                case "store":
                    self._store(move)
                    if move.write:
                        self._write(move)
                case "write":
                    self._write(move)
                case "load":
                    self._memory[move.block_id] = _copied(self.slots[move.slot])
                case "fetch" if move.source:
                    self._later(READ_NS, self._receive, move, self._generation, self._loop.now_ns)
                case "fetch":
                    self._later(READ_NS, self._read, move, self._generation)
                case "drop":
                    self._later(WRITE_NS, self._write_next)
                    self._writes.append(move)
                case _:
                    loaded, computed = (str(self._memory[i]) for i in (move.other, move.block_id))
                    audited = AuditedBlock(move.name, loaded, computed)
                    self._changes.add(TiersChanged(audited=(audited,)))

    def offer(self, moves: Sequence[KVMove], step: int) -> None:
        for move in moves:
            tiers = self.states if move.state and self.states is not None else self
            if move.block_id >= 0:
                tiers._store(move)
            tiers.offered[move.slot] = move.name
        self.step = step
        if self.states is not None:
            self.states.step = step

    def reset(self) -> None:
        self.step = 0
        self._changes.reset()
        if self.states is not None:
            self.states.step = 0

    def on_disk(self) -> TiersChanged:
        while self._writes:
            self._write_next()
        states = self.states.on_disk() if self.states is not None else None
        return TiersChanged(stored=tuple(self._disk), whole=True, states=states)

    def take_changes(self) -> TiersChanged | None:
        changes: TiersChanged | None = self._changes.take()
        return changes

    def take_transfers(self) -> list[object]:
        """None is recorded."""
        return []

    def close(self) -> None:
        """Finish pending writes; no other executor can read the slots any more."""
        while self._writes:
            self._write_next()
        self.offered.clear()
        self._process = None
        if self.states is not None:
            self.states.close()

    # --- moves --------------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        generation: int = self._changes.generation
        return generation

    @property
    def is_reachable(self) -> bool:
        """Whether other executors can read the slots."""
        return self._process is not None and self._process.alive

    def _later(self, mean_ns: int, function: Callable[..., None], *args: object) -> None:
        delay_ns = int(mean_ns * 2 * self._random() * self._factor())
        self._loop.call_in(delay_ns, function, *args)

    def _store(self, move: KVMove) -> None:
        self.offered.pop(move.slot, None)
        self.slots[move.slot] = _copied(self._memory[move.block_id])

    def _write(self, move: KVMove) -> None:
        self._later(WRITE_NS, self._write_next)
        self._writes.append((move, _copied(self.slots[move.slot])))

    def _write_next(self) -> None:
        if not self._writes:
            return
        write = self._writes.pop(0)
        if isinstance(write, KVMove):
            self._disk.pop(write.name, None)
        elif self._random() < UNWRITABLE:
            self._changes.add(TiersChanged(lost=(write[0].name,)))
        else:
            self._disk[write[0].name] = write[1]
            self._changes.add(TiersChanged(stored=(write[0].name,)))

    def _read(self, move: KVMove, generation: int) -> None:
        block = self._disk.get(move.name)
        if block is not None and self._random() < UNREADABLE:
            block = None
            del self._disk[move.name]
        self._end_fetch(move, block, generation)

    def _receive(self, move: KVMove, generation: int, asked_ns: int) -> None:
        peer = self._peers.get(move.source)
        is_over = self._loop.now_ns - asked_ns > MOST_WAIT_NS or generation != self._generation
        reachable = peer is not None and peer.is_reachable
        if peer is not None and reachable and peer.step < move.step and not is_over:
            self._loop.call_in(POLL_NS, self._receive, move, generation, asked_ns)
            return
        block: Any = None
        if peer is not None and reachable and peer.offered.get(move.other) == move.source_name:
            block = peer.slots[move.other]
        self._end_fetch(move, None if self._random() < UNREADABLE else block, generation)

    def _end_fetch(self, move: KVMove, block: Any, generation: int) -> None:
        if generation != self._generation:  # its slot has another use
            return
        if block is None:
            self._changes.add(TiersChanged(lost=(move.name,)), generation)
            return
        self.offered.pop(move.slot, None)
        self.slots[move.slot] = _copied(block)
        self._changes.add(TiersChanged(fetched=(move.name,)), generation)


def _copied(unit: Any) -> Any:
    if not isinstance(unit[0], list):
        return unit  # a state, which is never changed
    return list(unit[0]), list(unit[1])
