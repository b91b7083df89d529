"""Optional parts of batching, a module or a folder for each: their hooks, and the list of all.

A part is made if it is configured, or with the first message or request that concerns it. Until
then its module is not imported. CONTRIBUTING.md shows how one is added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ....bus.control import Cancel, ReplicaCapacity
from ....bus.messages import AdmittedRequest, RequestInfo, SequenceSpec
from ....bus.sections import Sections, name_of
from ....bus.steps import NewSequence, StepSummary
from ....bus.weights import InFlight
from ....config import EngineConfig, SchedulerConfig
from ...parts import Kind, Parts
from ...parts import Part as BasePart
from ..allocation import Allocation
from ..cache import KVCacheManager
from ..index import SequenceIndex
from ..plans import PlanDraft, SentPlan
from ..report import Counters, Report
from ..schedule import SchedulerOutput, StepLimit
from ..sequence import Sequence


class Core(Protocol):
    """The batching core, as its parts see it; `BatchingCore` describes the members."""

    limits: SchedulerConfig
    cache: KVCacheManager
    steps_ahead: int
    paused: bool
    lacks: tuple[str, ...]
    index: SequenceIndex
    waiting: deque[Sequence]
    running: list[Sequence]
    sent: deque[SentPlan]
    report: Report
    counters: Counters

    @property
    def rests(self) -> bool: ...
    def find(self, kind: type[Kind]) -> Kind | None: ...
    def add(self, request: AdmittedRequest, deadline_ns: int | None = None) -> None: ...
    def new_sequence(self, request: AdmittedRequest, spec: SequenceSpec) -> Sequence: ...
    def cancel(self, cancel: Cancel) -> None: ...
    def interrupt(self, in_flight: InFlight, why: str) -> None: ...
    def recompute(self, matches: Callable[[Sequence], bool] = ...) -> None: ...


class Part(BasePart):
    """Base class of parts.

    A part keeps its own state; what belongs to a sequence it may keep in `Sequence.extras`.
    """

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        self.core = core

    def receive(self, message: Any, now_ns: int, deadline_ns: int | None) -> object:
        """Apply a message; return the reply, if there is one. `deadline_ns`: of its request."""

    # --- sequences ----------------------------------------------------------------------------

    def accept(self, request: AdmittedRequest, deadline_ns: int | None) -> bool:
        """Return whether a dispatched request can run here. A part that refuses it ends it."""
        return True

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        """Prepare a new sequence."""

    def start(self, seq: Sequence, new: dict[str, Any]) -> None:
        """A waiting sequence starts with its blocks; `new`: fields of its NewSequence."""

    def end(self, seq: Sequence) -> None:
        """A sequence has ended. Plans in flight may name it."""

    def leave(self, seq: Sequence) -> None:
        """A sequence that has ended has given back its blocks."""

    def ends_elsewhere(self, request_id: str) -> bool:
        """A request is cancelled; return whether sequences of it run elsewhere."""
        return False

    def requests(self) -> Iterable[RequestInfo]:
        """Return the requests that have sequences outside the index."""
        return ()

    # --- plans, in this order -----------------------------------------------------------------

    def begin(self, now_ns: int) -> None:
        """A plan is about to be made."""

    def choose(self, num_waiting: int) -> tuple[Seq[Sequence], int] | None:
        """Return the running sequences of the next plan, and how many may start beside them."""

    def limit(self) -> StepLimit:
        """Return the limit of the prefills of a step."""
        raise NotImplementedError

    def relieve(
        self,
        decision: SchedulerOutput,
        starting: Seq[Sequence],
        decide: Callable[[int], SchedulerOutput],
    ) -> bool:
        """Give back blocks that no sequence holds, if that lets more sequences run.

        Args:
            decision: Without these blocks.
            starting: Sequences that may start.
            decide: Returns the decision with so many free blocks.

        Returns:
            Whether blocks were given back, so that it is to be decided anew.
        """
        return False

    def extend(self, decision: SchedulerOutput) -> SchedulerOutput:
        """Return a decision with more work in the blocks and tokens that it leaves over."""
        return decision

    def rest(self, step_id: int) -> NewSequence | None:
        """Nothing else runs or waits: return a sequence of no request to compute in a step."""
        return None

    def is_urgent(self) -> bool:
        """Whether a plan has to be made even without rows."""
        return False

    def fit(self, draft: PlanDraft) -> None:
        """Correct the rows, whose sequences have their blocks."""

    def planned(self, draft: PlanDraft) -> None:
        """Add sections to the plan, whose rows are complete."""

    def absorb(self, sent: SentPlan, result: StepSummary) -> Iterable[Sequence]:
        """Apply a step's result before the core does; return sequences that end here with it."""
        return ()

    # --- failures and reports -----------------------------------------------------------------

    def lose(self) -> None:
        """The plans in flight never come back."""

    def reset(self) -> None:
        """All sequences are dropped."""

    def restart(self, capacity: ReplicaCapacity) -> None:
        """An executor without sequences, perhaps the same, begins a new epoch."""

    def wake_at_ns(self) -> int | None:
        """Return when the next plan is due although nothing happens; None for never."""

    def num_spare_blocks(self) -> int:
        """Return the number of blocks that `relieve` may give back."""
        return 0

    def allocations(self) -> Iterable[Allocation]:
        """Return blocks that are held for no sequence."""
        return ()

    def numbers(self) -> Mapping[str, int]:
        """Return present numbers, by name."""
        return {}

    def take_counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return what was counted since the last call: numbers by name, by the name of a group."""
        return {}


def has(sections: Sections, name: str) -> bool:
    """Whether a section of this name is among these."""
    return any(name_of(section) == name for section in sections)


class Entry(NamedTuple):
    """A part that a core may have.

    Attributes:
        made_by: The class, or "module:class" under this folder.
        configured: Whether settings and executor have it from the start.
        wanted: Whether a request needs it.
        messages: Names of messages that need it.
    """

    made_by: str | type[Part]
    configured: Callable[[EngineConfig, ReplicaCapacity], bool] = lambda config, capacity: False
    wanted: Callable[[AdmittedRequest], bool] = lambda request: False
    messages: tuple[str, ...] = ()

    def load(self) -> type[Part]:
        """Import the class."""
        if not isinstance(self.made_by, str):
            return self.made_by
        module, _, name = self.made_by.partition(":")
        found: type[Part] = getattr(import_module(f".{module}", __name__), name)
        return found


PARTS = (
    Entry("accounts:Accounts", configured=lambda config, capacity: True),
    Entry(
        "pipelining:Pipelining",
        configured=lambda config, capacity: capacity.pipeline_stages > 1,
    ),
    Entry(
        "speculation:Speculation",
        configured=lambda config, capacity: (
            config.speculation == "auto" and has(capacity.parts, "DraftCapacity")
        ),
    ),
    Entry("memory:MemoryRelease", messages=("MemoryState",)),
    Entry("weights:WeightChanges", messages=("WeightsReady",)),
    Entry(
        "adapters:Adapters",
        configured=lambda config, capacity: has(capacity.parts, "AdapterCapacity"),
        wanted=lambda request: bool(request.info.adapter),
        messages=("AdapterReady",),
    ),
    Entry(
        "images.part:Images",
        configured=lambda config, capacity: has(capacity.parts, "ImageCapacity"),
    ),
    Entry(
        "snapshots.part:RecurrentStates",
        configured=lambda config, capacity: has(capacity.parts, "StateCapacity"),
    ),
    Entry(
        "handover.arrivals:Arrivals",
        wanted=lambda request: has(request.parts, "HandoverRoute"),
        messages=("AnnounceSequence", "AnnounceBlocks", "Handover", "WithdrawSequences"),
    ),
    Entry(
        "handover.departures:Departures",
        wanted=lambda request: has(request.parts, "HandoverRoute"),
        messages=("ReleaseBlocks",),
    ),
    Entry("kv_events:KVEvents", configured=lambda config, _: config.kv_events),
    Entry(
        "tiers.part:Tiers",
        configured=lambda config, capacity: has(capacity.parts, "TierCapacity"),
    ),
    Entry(
        "sessions:Sessions",
        wanted=lambda request: has(request.parts, "SessionTurn"),
        messages=("ControlSession",),
    ),
)
"""All parts, in the order in which their hooks are called."""


class BatchingParts(Parts[Part]):
    """The parts of a core, which are made when they are needed."""

    def __init__(self, core: Core, config: EngineConfig, entries: Seq[Entry]) -> None:
        super().__init__(Part)
        self._core, self._config, self._entries = core, config, entries
        self._made: dict[Entry, Part] = {}

    def make_configured(self, capacity: ReplicaCapacity) -> None:
        """Make the parts that settings and executor have, as before any other call."""
        self._capacity = capacity
        self._make(entry for entry in self._entries if entry.configured(self._config, capacity))

    def make_for(self, request: AdmittedRequest) -> None:
        """Make the parts that a request needs."""
        self._make(entry for entry in self._entries if entry.wanted(request))

    def handlers(self, message: object) -> list[Part]:
        name = type(message).__name__
        self._make(entry for entry in self._entries if name in entry.messages)
        return super().handlers(message)

    def _make(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry not in self._made:
                self._made[entry] = entry.load()(self._core, self._config, self._capacity)
                self.use(self._made[each] for each in self._entries if each in self._made)
