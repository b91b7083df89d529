"""The part of batching that has snapshots of recurrent state made, and starts sequences from
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import partial
from typing import Any, NamedTuple

from .....bus.control import ReplicaCapacity
from .....bus.kv_events import DEVICE
from .....bus.parts.states import StateCapacity, StatePlan, StateSave, StateStart
from .....bus.sections import Sections
from .....bus.steps import StepSummary
from .....config import EngineConfig
from ...allocation import NO_NAMES, Allocation, States
from ...plans import PlanDraft, SentPlan
from ...sequence import Sequence, SequenceStatus
from .. import Core, Part
from .pool import Snapshots
from .prefills import Prefill, Prefills

PROMPT_SHARE = 4
"""At most one in so many snapshots is of one prompt's every `engine.state_snapshot_blocks`."""


class Save(NamedTuple):
    """A snapshot in a plan in flight.

    Attributes:
        seq: Its sequence.
        num_tokens: As in StateSave.
        number: The snapshot's number.
        prefill: The prefill that it is of; None for one of generated tokens.
    """

    seq: Sequence
    num_tokens: int
    number: int
    prefill: Prefill | None


class RecurrentStates(Part, States):
    """The snapshots of a replica whose layers have a recurrent state.

    A sequence starts with the longest prefix whose blocks and snapshot are there; what it has in
    common with others beyond that it computes again. Snapshots are made at the ends of blocks:

    1. Where the blocks of a prompt match further than the snapshots: the second request that
       shares a beginning pays for it, the third one starts there. One that comes while the first
       is still being computed waits for it.
    2. At the end of a prompt's last block that leaves a token to compute.
    3. Every `engine.state_snapshot_blocks` blocks of a prompt.
    4. After each block of generated tokens. A running sequence has one of these, for its next turn
       or after a preemption; the one before is given up, unless another sequence has started with
       it.

    A snapshot is found under the name of its block, once the step that makes it is back. So it is
    of these tokens, scope, weights and adapter; its number says nothing of them.

    Attributes:
        snapshots: All snapshots.
    """

    exists = True

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        own = StateCapacity.find(capacity.parts)
        assert own is not None
        self.snapshots = Snapshots(own.num_snapshots, self)
        self._cache = core.cache
        self._every = config.state_snapshot_blocks
        self._most_held = int(config.kv_session_share * own.num_snapshots)
        self._prefills = Prefills(core.cache)
        self._running: dict[int, Prefill] = {}  # by sequence
        # Names of the snapshots that sequences own.
        self._own: dict[int, bytes] = {}
        self._in_flight: dict[int, list[Save]] = {}  # by step
        self._held: dict[Allocation, bytes] = {}
        # Those with which sequences are about to start: they keep their numbers until the next plan
        # is made, whose loads come before its sequences.
        self._reserved: list[bytes] = []
        # Those whose block was evicted. The sequence that took it may start with another block of
        # the same name, so they are dropped when the next plan begins.
        self._orphans: list[bytes] = []
        # Snapshots that plans in flight load, and the step; 0 before it is known.
        self._loads: dict[bytes, int] = {}
        self._audit: StateSave | None = None
        self._counts = {"taken": 0, "hits": 0, "recomputed_tokens": 0}
        core.cache.states = self
        core.cache.followers = (*core.cache.followers, self)

    # --- the cache's view ---------------------------------------------------------------------

    def usable(self, allocation: Allocation, num_blocks: int) -> int:
        names = self._cache.names_of(allocation, num_blocks)
        allocation.num_found = num_blocks
        while num_blocks and names[num_blocks - 1] not in self.snapshots:
            num_blocks -= 1
        below = self._cache.below
        if below.exists and num_blocks < allocation.num_found and self.snapshots.num_takable:
            return below.reach(names, num_blocks)
        return num_blocks

    def follows(self, allocation: Allocation, num_blocks: int) -> bool:
        if self._reserved and not self.snapshots.num_takable:
            names = self._cache.names_of(allocation, allocation.num_found)
            if self._cache.below.reach(names, num_blocks) > num_blocks:
                return True  # the next plan has numbers again
        saves = self.snapshots.number > 0
        follows = self._prefills.follows(allocation, num_blocks, saves=saves)
        if num_blocks and not follows and self._cache.below.exists:
            self._reserve(allocation, num_blocks)
        return follows

    def sections(self, allocation: Allocation, num_cached: int) -> Sections:
        if not num_cached:
            return ()
        if self._cache.below.exists:
            self._reserve(allocation, num_cached // self._cache.block_size)
        return (StateStart(self.snapshots.use(self._name(allocation, num_cached))),)

    def hold(self, allocation: Allocation) -> None:
        num_tokens = len(allocation.block_ids) * self._cache.block_size
        if num_tokens and self.snapshots.num_held < self._most_held:
            name = self._held[allocation] = self._name(allocation, num_tokens)
            self.snapshots.hold(name)

    def release(self, allocation: Allocation) -> None:
        if (name := self._held.pop(allocation, None)) is not None:
            self.snapshots.release(name)

    def demote(self, allocation: Allocation, *, stores: bool) -> None:
        name = self._name(allocation, len(allocation.block_ids) * self._cache.block_size)
        if (number := self.snapshots.number_of(name)) >= 0:
            if stores:
                self._cache.below.store_state(name, number)
            self.snapshots.demote(name)

    def evicted(self, block_id: int, name: bytes) -> None:
        if not self._cache.below.exists:  # it is of no use without its block
            self._orphans.append(name)

    def forgotten(self) -> None:
        self.snapshots.clear()
        self._in_flight.clear()
        self._prefills.clear()
        self._running.clear()
        self._own.clear()
        self._loads.clear()
        self._audit = None

    def retire(self, adapter: str) -> Set[bytes]:
        self.snapshots.drop_adapter(adapter)
        return NO_NAMES

    def check(self) -> None:
        saves = (save for saves in self._in_flight.values() for save in saves)
        numbers = [save.number for save in saves]
        self.snapshots.check(numbers if self._audit is None else [*numbers, self._audit.snapshot])

    def made(self, name: bytes) -> None:
        """A snapshot can be found; see `SnapshotFollower`."""
        if self.log is not None:
            self.log.store_below(DEVICE, name)

    def given_out(self, name: bytes, number: int) -> None:
        """A snapshot's number is about to be given out again."""
        self._cache.below.store_state(name, number)

    def dropped(self, name: bytes) -> None:
        """A snapshot can't be found any more."""
        if self.log is not None:
            self.log.remove_below(DEVICE, name)

    def number_of(self, name: bytes) -> int:
        return self.snapshots.number_of(name)

    def name_of(self, number: int) -> bytes | None:
        return self.snapshots.name_of(number)

    def last(self, seq_id: int, allocation: Allocation, num_blocks: int) -> tuple[int, int]:
        size = self._cache.block_size
        for end in range(num_blocks, 0, -1):
            if (number := self.snapshots.number_of(allocation.names[end - 1])) >= 0:
                break
        else:
            end, number = 0, -1
        for saves in self._in_flight.values():
            for save in saves:
                if save.seq.seq_id == seq_id and end < save.num_tokens // size <= num_blocks:
                    end, number = save.num_tokens // size, save.number
        return end, number

    def audit(self, seq_id: int, num_tokens: int) -> int:
        if (number := self.snapshots.take()) is None:
            return -1
        self._audit = StateSave(seq_id, num_tokens, number)
        return number

    def end_audit(self) -> None:
        if self._audit is not None:
            self.snapshots.give_back(self._audit.snapshot)
            self._audit = None

    # --- the core's hooks ---------------------------------------------------------------------

    def start(self, seq: Sequence, new: dict[str, Any]) -> None:
        self._leave(seq.seq_id)
        if seq.num_cached == len(seq.token_ids):
            return  # it shares a prefill, and gets a copy of the state there
        size, found = self._cache.block_size, seq.allocation.num_found
        new["parts"] += self.sections(seq.allocation, seq.num_cached)
        cached = seq.num_cached // size
        self._counts["hits"] += cached > 0
        prefill = self._running[seq.seq_id] = self._prefills.begin(seq.allocation, cached)
        if seq.allocation.may_reuse:
            self._counts["recomputed_tokens"] += (found - cached) * size
        else:
            found = 0
        last = (len(seq.token_ids) - 1) // size
        regular = range(self._every, last, self._every) if self._every else ()
        most = self.snapshots.number // PROMPT_SHARE
        for point in {found, last, *(regular[-most:] if most else ())}:
            if point > cached:
                self._prefills.promise(prefill, point)

    def end(self, seq: Sequence) -> None:
        self._leave(seq.seq_id)

    def begin(self, now_ns: int) -> None:
        self._prefills.end_expected()
        self._end_reservations()
        for name in self._orphans:
            self.snapshots.drop(name)
        self._orphans.clear()

    def planned(self, draft: PlanDraft) -> None:
        started = {new.seq_id for new in draft.new}
        for seq_id in draft.forget:
            if seq_id not in started:
                self._leave(seq_id)
        self._end_reservations()
        self._loads = {name: step or draft.step_id for name, step in self._loads.items()}
        saves: list[Save] = []
        for seq, num_tokens in zip(draft.seqs, draft.num_tokens.values(), strict=False):
            if seq.seq_id in self._running:
                self._save_prompt(seq, saves)
            end = seq.num_scheduled
            if num_tokens and not end % self._cache.block_size and end >= seq.num_to_prefill:
                # Drafts of this plan come after the state, those of plans in flight before it.
                own = draft.decision.num_drafts.get(seq.seq_id, 0)
                if seq.num_drafting == own:
                    self._save_own(seq, saves)
        if saves:
            self._in_flight[draft.step_id] = saves
            self._counts["taken"] += len(saves)
            sections = [StateSave(each.seq.seq_id, each.num_tokens, each.number) for each in saves]
            draft.parts.append(StatePlan(tuple(sections)))
        elif self._audit is not None and self._audit.seq_id in draft.num_tokens:
            draft.parts.append(StatePlan((self._audit,)))

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sequence]:
        if self._loads:
            self._loads = {
                name: step for name, step in self._loads.items() if step != result.step_id
            }
        for save in self._in_flight.pop(result.step_id, ()):
            if save.prefill is not None:
                save.prefill.num_in_flight -= 1
                self._prefills.withdraw(save.prefill, save.num_tokens)
                self._end_if_done(save.seq.seq_id, save.prefill)
            self._keep(save)
        return ()

    def lose(self) -> None:
        for saves in self._in_flight.values():
            for save in saves:
                self.snapshots.give_back(save.number)
        for name in self._loads:  # perhaps never loaded
            self.snapshots.drop(name)
        self._loads.clear()
        self._in_flight.clear()
        self._prefills.clear()
        self._running.clear()
        for seq_id in [*self._own]:
            self._leave(seq_id)

    def numbers(self) -> Mapping[str, int]:
        return {
            "state_snapshots": len(self.snapshots),
            "state_snapshots_total": self.snapshots.number,
        }

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        return {"states": counts}

    # --- internals ----------------------------------------------------------------------------

    def _name(self, allocation: Allocation, num_tokens: int) -> bytes:
        return self._cache.names_of(allocation, num_tokens // self._cache.block_size)[-1]

    def _take_for(self, allocation: Allocation, name: bytes) -> int:
        """Return a number to load a snapshot to, which can be found from here on."""
        number = self.snapshots.take()
        assert number is not None, "`usable` found a number"
        self.snapshots.keep(name, number, allocation.scope.adapter)
        self._loads[name] = 0
        return number

    def _reserve(self, allocation: Allocation, num_blocks: int) -> None:
        """Load the snapshot with which an allocation is about to start, if it is not here, and keep
        it until the next plan is made."""
        name = allocation.names[num_blocks - 1]
        if name not in self.snapshots:
            self._cache.below.load_state(name, partial(self._take_for, allocation, name))
        self._reserved.append(name)
        self.snapshots.hold(name)

    def _end_reservations(self) -> None:
        for name in self._reserved:
            self.snapshots.release(name)
        self._reserved.clear()

    def _is_shared(self, allocation: Allocation) -> bool:
        """Whether others may start in a state that a sequence computes: no weights, no flush and no
        version of its adapter came since it started."""
        return self._cache.is_current(allocation)

    def _keep(self, save: Save) -> None:
        """Let a snapshot be found whose step is back."""
        seq, allocation = save.seq, save.seq.allocation
        # The executor drops rows of sequences that ended with an earlier step.
        if seq.status is SequenceStatus.FINISHED or not self._is_shared(allocation):
            self.snapshots.give_back(save.number)
            return
        name, owner = self._name(allocation, save.num_tokens), -1
        if save.prefill is None and seq.status is SequenceStatus.RUNNING:
            owner = seq.seq_id
            before = self._own.get(owner)
            if before is not None and self.snapshots.is_owned(before, owner):
                self.snapshots.drop(before)
            self._own[owner] = name
        if self.snapshots.keep(name, save.number, allocation.scope.adapter, owner):
            self._cache.below.made_state(save.number, allocation)

    def _save_prompt(self, seq: Sequence, saves: list[Save]) -> None:
        """Save the state at the points of a prompt that a plan passes."""
        prefill = self._running[seq.seq_id]
        is_shared = self._is_shared(seq.allocation)
        for point in self._prefills.advance(prefill, seq.num_scheduled):
            number = None
            if is_shared and self._name(seq.allocation, point) not in self.snapshots:
                number = self.snapshots.take()
            if number is None:
                self._prefills.withdraw(prefill, point)
                continue
            prefill.num_in_flight += 1
            saves.append(Save(seq, point, number, prefill))
        self._end_if_done(seq.seq_id, prefill)

    def _save_own(self, seq: Sequence, saves: list[Save]) -> None:
        """Save the state after a block of generated tokens, in place of the sequence's last one."""
        if not self._is_shared(seq.allocation):
            return
        number, before = self.snapshots.take(for_owner=True), self._own.get(seq.seq_id)
        if number is None and before is not None and self.snapshots.is_owned(before, seq.seq_id):
            self.snapshots.drop(before)
            number = self.snapshots.take(for_owner=True)
        if number is not None:
            saves.append(Save(seq, seq.num_scheduled, number, None))

    def _end_if_done(self, seq_id: int, prefill: Prefill) -> None:
        is_planned = prefill.num_planned >= prefill.num_tokens
        if is_planned and not prefill.num_in_flight and self._running.get(seq_id) is prefill:
            self._prefills.end(self._running.pop(seq_id))

    def _leave(self, seq_id: int) -> None:
        """Take note that a sequence runs no more: what it owned is kept as others are."""
        if (prefill := self._running.pop(seq_id, None)) is not None:
            self._prefills.end(prefill)
        name = self._own.pop(seq_id, None)
        if name is not None and self.snapshots.is_owned(name, seq_id):
            self.snapshots.use(name)
