"""Recurrent state of the rule executor: the tokens that it is of, and what computed each."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from nano_inference.bus.control import AuditedBlock, TiersChanged
from nano_inference.bus.parts.states import StatePlan, StateStart
from nano_inference.bus.steps import KVMove, NewSequence, StepPlan

from ...sections import read


class Stamp(NamedTuple):
    """A token of a state, and the weights and the adapter's version that computed it."""

    token: int
    weights: int
    adapter: int


State = tuple[Stamp, ...] | None


class RuleSnapshotTiers:
    """Snapshots in host slots and on disk.

    Attributes:
        offered: Name of the snapshot in each host slot that other executors may read.
    """

    def __init__(self, snapshots: list[State]) -> None:
        self.snapshots = snapshots
        self.host: dict[int, State] = {}
        self.disk: dict[bytes, State] = {}
        self.offered: dict[int, bytes] = {}
        self.changes: deque[TiersChanged] = deque()
        self.fetches: deque[KVMove] = deque()

    def move(self, move: KVMove) -> None:
        match move.kind:
            case "store":
                self._put(move.slot, self.snapshots[move.block_id])
                if move.write:
                    self._write(move)
            case "write":
                self._write(move)
            case "load":
                assert self.host[move.slot] is not None
                self.snapshots[move.block_id] = self.host[move.slot]
            case "fetch":
                self.fetches.append(move)
            case "offer":
                if move.block_id >= 0:
                    assert self.snapshots[move.block_id] is not None, "it is not made yet"
                    self._put(move.slot, self.snapshots[move.block_id])
                self.offered[move.slot] = move.name
            case "drop":
                self.disk.pop(move.name, None)
            case "compare":
                both = (str(self.snapshots[number]) for number in (move.other, move.block_id))
                self.changes.append(TiersChanged(audited=(AuditedBlock(move.name, *both),)))

    def change(
        self, peers: Mapping[str, RuleSnapshotTiers], *, is_patient: bool
    ) -> TiersChanged | None:
        """The next change of the threads; None for none."""
        if not self.fetches:
            return self.changes.popleft() if self.changes else None
        move = self.fetches.popleft()
        if move.source:
            peer = peers[move.source]
            offered = peer.offered.get(move.other) == move.source_name
            found = peer.host[move.other] if offered else None
        else:
            found = self.disk.get(move.name)
        if found is None and move.source and is_patient:
            self.fetches.append(move)
            return None
        if found is None:
            return TiersChanged(lost=(move.name,))
        self._put(move.slot, found)
        return TiersChanged(fetched=(move.name,))

    def _put(self, slot: int, state: State) -> None:
        self.offered.pop(slot, None)
        self.host[slot] = state

    def _write(self, move: KVMove) -> None:
        self.disk[move.name] = self.host[move.slot]
        self.changes.append(TiersChanged(stored=(move.name,)))


class RuleStates:
    """The states of an executor's sequences, and its snapshots.

    A sequence that starts in the state of other tokens, weights or adapters fails, and so does a
    snapshot of a state that the step doesn't pass.
    """

    # Whether a sequence may start in the state of other tokens.
    trusts = False

    def __init__(self, num_snapshots: int) -> None:
        self.snapshots: list[State] = [None] * num_snapshots
        self._states: dict[int, list[Stamp]] = {}
        self._weights = 0
        self._adapters: dict[str, int] = {}
        self.num_saved = 0
        self.tiers = RuleSnapshotTiers(self.snapshots)

    def apply(self, plan: StepPlan) -> None:
        """Apply a plan, up to its rows."""
        self._weights = read(plan).weight_version or self._weights
        self._adapters.update(read(plan).adapters)
        if "kv_cache" in read(plan).release:
            self.snapshots[:] = [None] * len(self.snapshots)
        for new in plan.new:
            self._states[new.seq_id] = self._first(new)

    def compute(self, new: NewSequence, token_ids: list[int]) -> None:
        """Compute the next tokens of a sequence."""
        version = self._adapters.get(new.info.adapter, 0)
        self._states[new.seq_id] += [Stamp(each, self._weights, version) for each in token_ids]

    def share(self, seq_id: int, source: int) -> None:
        """Copy the state of a sequence whose prefill another one shares."""
        self._states[seq_id] = list(self._states[source])

    def save(self, plan: StepPlan, ran: set[int]) -> None:
        """Make a plan's snapshots, but of rows that were dropped."""
        numbers = dict(zip(plan.seq_ids, plan.num_tokens, strict=True))
        saves = (StatePlan.find(plan.parts) or StatePlan(())).saves
        assert len({save.snapshot for save in saves}) == len(saves), "a number was given out twice"
        for save in saves:
            assert save.seq_id in numbers
            if save.seq_id not in ran:
                continue
            state = self._states[save.seq_id]
            assert 0 <= len(state) - save.num_tokens < numbers[save.seq_id], "the step passes by it"
            self.snapshots[save.snapshot] = tuple(state[: save.num_tokens])
            self.num_saved += 1

    def length(self, seq_id: int) -> int:
        return len(self._states[seq_id])

    def forget(self) -> None:
        """Forget all sequences, and the fetches in flight."""
        self._states.clear()
        self.tiers.fetches.clear()

    def _first(self, new: NewSequence) -> list[Stamp]:
        start = StateStart.find(new.parts)
        if new.num_cached in (0, len(new.token_ids)):
            assert start is None
            return []
        assert start is not None, "KV is cached, and the state is not"
        state = self.snapshots[start.snapshot]
        version = self._adapters.get(new.info.adapter, 0)
        right = [Stamp(t, self._weights, version) for t in new.token_ids[: new.num_cached]]
        assert state is not None, "the snapshot was never made"
        assert self.trusts or list(state) == right, "it starts in a foreign state"
        return list(state)
