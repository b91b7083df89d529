"""The interface between the core and its optional parts: hooks one way, the core's methods back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Protocol

from ...bus.control import Cancel, Internal, ReplicaCapacity
from ...bus.messages import AdmittedRequest, RequestInfo, SequenceSpec
from ...bus.steps import NewSequence, StepSummary
from ...bus.weights import InFlight
from ...config import EngineConfig, SchedulerConfig
from .allocation import Allocation
from .cache import KVCacheManager
from .index import SequenceIndex
from .plans import PlanDraft, SentPlan
from .report import Counters, Report
from .schedule import SchedulerOutput, StepLimit
from .sequence import Sequence


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
    def part(self, name: str) -> Any: ...
    def add(self, request: AdmittedRequest, deadline_ns: int | None = None) -> None: ...
    def new_sequence(self, request: AdmittedRequest, spec: SequenceSpec) -> Sequence: ...
    def cancel(self, cancel: Cancel) -> None: ...
    def interrupt(self, in_flight: InFlight, why: str) -> None: ...
    def recompute(self, matches: Callable[[Sequence], bool] = ...) -> None: ...


class Part:
    """An optional feature. The hooks here do nothing; the core calls only overridden ones.

    A part keeps its own state; what belongs to a sequence it may keep in `Sequence.extras`.

    Attributes:
        handles: Types of the messages that `receive` takes.
    """

    handles: ClassVar[tuple[type[Internal], ...]] = ()

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
