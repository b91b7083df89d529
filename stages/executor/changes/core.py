"""Weight updates and releases of memory, decided: an event and the time in, effects out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import msgspec

from ....bus.control import (
    FinishUpdate,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReleaseMemory,
    ResumeMemory,
    TellWeightVersion,
    UpdateWeights,
)
from ....bus.weights import GroupWeights, InFlight, LocalWeights, StagedWeights
from ....config import WeightsError
from ....store.in_place import WeightsInPlace
from ..runner.weights.limits import WeightLimits
from .arguments import Operation, check_arguments
from .effects import (
    Answer,
    BeginRelease,
    Check,
    Combine,
    Effect,
    Fetch,
    Fetched,
    Job,
    Join,
    Leave,
    Log,
    MakeReady,
    Result,
    Resume,
    SendMemory,
    SendReady,
    SkipBroadcast,
)
from .parts import Origin, WeightParts
from .succession import Succession

_SECOND_NS = 1_000_000_000

_LEAST_FETCH_S = 0.001
"""What an update has for its fetching that has waited for its turn to the last moment."""


class _Unanswered(NamedTuple):
    """What somebody asks for, and the id under which he waits for the answer."""

    operation: Operation
    operation_id: str


@dataclass(frozen=True, slots=True)
class _Turn:
    """A part of an update that waits until nothing else is fetched."""

    ticket: int
    update: UpdateWeights
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Weights that wait for `FinishUpdate`, and are dropped when that does not come in time."""

    update: UpdateWeights
    fetched: Fetched
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class _Ready:
    """Weights that wait for a plan, and whose operation is answered when its step is done."""

    ticket: int
    version: int
    in_flight: InFlight
    origin: Origin | None


class UpdatesCore:
    """All that an executor knows of its weight updates and releases of memory.

    An update has three steps. The tensors are fetched while plans run. Batching is told, and its
    next plan says that they be put in place; only it can tell which KV is older. When that plan's
    step is done, whoever asked gets the answer.

    An update may come in parts, which are fetched and kept until `StagedWeights` asks for all. One
    that other executors make as well is fetched, checked and kept until `FinishUpdate`, so that it
    can still be given up when another executor refuses it.

    Memory is released like weights are put in place: batching is told, plans no more steps, and
    its next plan says it. Only batching can tell whose KV that is.

    1. One source is fetched at a time. Parts wait for their turn, in order; anything else is
       refused while weights are fetched, are prepared or wait for a plan.
    2. The version rises when a step is done that ran with the new weights, and never before.
    3. What fails leaves weights, version and what waits as they were; but parts of an update are
       dropped when one of them fails, since they will never be all.
    4. Each operation is answered once. What is under way when the stage ends is answered then.

    Each method is an event and returns what is to be done, in this order.
    """

    def __init__(self, limits: WeightLimits) -> None:
        """Args: what an update may bring at most."""
        self._limits = limits
        self._version = 0
        self._tickets = count(1)
        self._unanswered: dict[int, _Unanswered] = {}
        self._effects: list[Effect] = []
        # Whose tensors are on their way, and parts that wait until they are here.
        self._fetching: int | None = None
        self._turns: deque[_Turn] = deque()
        self._parts = WeightParts()
        self._prepared: _Prepared | None = None
        # An update that was given up while it was still fetched.
        self._given_up = ""
        # A prepared update that is made ready.
        self._finishing: int | None = None
        self._ready: _Ready | None = None
        # Changes of memory, the first of which is under way; whether batching is to release it.
        self._memory: deque[int] = deque()
        self._releasing = False
        self._succession = Succession()

    # --- what others may know -----------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights that made the last step."""
        return self._version

    @property
    def behind(self) -> int:
        """The version that the lane had when this executor joined it without; else 0."""
        return self._succession.behind

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The ids of operations that are not answered, oldest first."""
        return tuple(waiting.operation_id for waiting in self._unanswered.values())

    @property
    def fetching(self) -> bool:
        """Whether tensors are on their way."""
        return self._fetching is not None

    @property
    def waiting_parts(self) -> int:
        """How many wait for their turn to be fetched."""
        return len(self._turns)

    @property
    def prepared(self) -> str:
        """The name of the update that waits for `FinishUpdate`; "" when none does."""
        return self._prepared.update.prepare_as if self._prepared is not None else ""

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do; None while nothing waits."""
        deadlines = [turn.deadline_ns for turn in self._turns]
        if self._prepared is not None:
            deadlines.append(self._prepared.deadline_ns)
        return min(deadlines, default=None)

    # --- events: operations, and the stage ----------------------------------------------------

    def begin(self, operation: Operation, operation_id: str, now_ns: int) -> list[Effect]:
        """Somebody asks for something, and waits for the answer under this id."""
        ticket = next(self._tickets)
        self._unanswered[ticket] = _Unanswered(operation, operation_id)
        try:
            self._begin(ticket, operation, now_ns)
        except WeightsError as error:
            self._answer(ticket, error)
        return self._go_on(now_ns)

    def begin_epoch(self, leader: str) -> list[Effect]:
        """An admission begins an epoch; this executor takes part once all of it is done."""
        return self._succession.begin_epoch(leader)

    def epoch_begun(self, version: int, now_ns: int) -> list[Effect]:
        """This executor takes part. Batching has forgotten what it was told.

        Args:
            version: Of the weights in place.
            now_ns: The time.
        """
        self._effects.append(SendMemory())
        self._in_place(version)
        if self._ready is not None:
            self._effects.append(SendReady(self._ready.version, self._ready.in_flight))
        return self._go_on(now_ns)

    def step_done(
        self,
        version: int,
        now_ns: int,
        *,
        changed: bool,
        pending: bool,
        refused: WeightsError | None = None,
    ) -> list[Effect]:
        """A step is done.

        Args:
            version: Of the weights that made it.
            now_ns: The time.
            changed: Its plan had weights put in place. Batching went by it already, and may have
                heard of the memory that there was before since.
            pending: Whether memory waits to be released.
            refused: Why those weights could not be put in place.
        """
        self._in_place(version)
        if refused is not None:
            self._not_in_place(refused)
        if changed:
            self._effects.append(SendMemory())
        if self._releasing and not pending:
            self._answer(self._memory[0])
        return self._go_on(now_ns)

    def weights_lost(self, error: WeightsError, now_ns: int) -> list[Effect]:
        """A plan's weights could not be put in place, and none are: a new epoch is to begin."""
        self._not_in_place(error)
        return self._go_on(now_ns)

    def tick(self, now_ns: int) -> list[Effect]:
        """Time has passed."""
        return self._go_on(now_ns)

    def close(self) -> list[Effect]:
        """The stage ends: what will not be done any more is answered."""
        error = WeightsError(
            "the executor stopped before it was done; it starts again with all its memory and the "
            "weights of model_path, as version 0",
            code="weights_interrupted",
        )
        self._turns.clear()
        self._memory.clear()
        self._prepared = self._ready = None
        for ticket in list(self._unanswered):
            self._answer(ticket, error)
        return self._take_effects()

    def done(self, job: Job, result: Result, now_ns: int) -> list[Effect]:
        """What takes its time has ended, or failed and changed nothing that is in place."""
        if job.ticket not in self._unanswered:
            return []  # it was answered when the stage ended
        if isinstance(job, Resume):
            self._effects.append(SendMemory())  # of what failed a part may be there
        try:
            if isinstance(result, WeightsError):
                raise result
            self._go_on_with(job, result, now_ns)
        except WeightsError as error:
            self._answer(job.ticket, error)
        return self._go_on(now_ns)

    # --- events: what the lane remembers ------------------------------------------------------

    def record_read(self, record: WeightsInPlace | None) -> list[Effect]:
        """What the lane has, as far as it is known."""
        return self._succession.read(record)

    def restored(self, weights: WeightsInPlace) -> list[Effect]:
        """The lane's weights are in place."""
        self._version = weights.version
        fields: dict[str, object] = {"version": weights.version, "folder": weights.folder}
        origin = Origin(weights.folder, weights.stamp)
        return [
            Log("weights_restored", fields),
            *self._succession.put_in_place(weights.version, origin),
        ]

    def not_restored(self, weights: WeightsInPlace, why: str) -> list[Effect]:
        """The lane's weights can't be had."""
        return self._succession.fall_behind(weights.version, why)

    # --- operations ---------------------------------------------------------------------------

    def _begin(self, ticket: int, operation: Operation, now_ns: int) -> None:
        try:
            check_arguments(operation, self._limits)
        except WeightsError:
            if isinstance(operation, UpdateWeights):
                self._skip(operation)
            raise
        match operation:
            case UpdateWeights():
                self._begin_update(ticket, operation, now_ns)
            case FinishUpdate():
                self._finish(ticket, operation)
            case JoinWeightsGroup():
                self._effects.append(Join(ticket, operation))
            case LeaveWeightsGroup(group):
                self._effects.append(Leave(group))
                self._answer(ticket)
            case TellWeightVersion():
                self._answer(ticket)
            case ReleaseMemory() | ResumeMemory():
                self._memory.append(ticket)
                if len(self._memory) == 1:
                    self._change_memory(ticket)

    def _begin_update(self, ticket: int, update: UpdateWeights, now_ns: int) -> None:
        if not update.part_of:
            busy = self._fetching, self._prepared, self._finishing, self._ready
            if any(holder is not None for holder in busy):
                self._skip(update)
                raise _busy()
            self._fetch(ticket, update)
            return
        if isinstance(update.source, LocalWeights):
            raise WeightsError(
                "a state dict of this process can't be a part of an update, since it may change "
                "until the others come; pass all tensors at once"
            )
        deadline_ns = now_ns + int(update.timeout_s * _SECOND_NS)
        self._turns.append(_Turn(ticket, update, deadline_ns))

    def _fetch(self, ticket: int, update: UpdateWeights) -> None:
        self._fetching = ticket
        if isinstance(update.source, StagedWeights):
            # Now that all are there, what could not be converted by itself can be.
            tensors, origin = self._parts.take(update.source)
            self._effects.append(Combine(ticket, update, tensors, origin))
        else:
            self._effects.append(Fetch(ticket, update))

    def _go_on_with(self, job: Job, result: Result, now_ns: int) -> None:
        match job, result:
            case Fetch(ticket, update) | Combine(ticket, update), Fetched() as fetched:
                self._received(ticket, update, fetched)
            case Check(ticket, update, fetched), _ if update.part_of:
                self._keep_part(ticket, update, fetched)
            case Check(ticket, update, fetched), _:
                self._prepare(ticket, update, fetched, now_ns)
            case MakeReady(), int(version):
                self._made_ready(job, version)
            case BeginRelease(), True:
                self._releasing = True
                self._effects.append(SendMemory())
            case ((Join() | BeginRelease() | Resume()), _):
                self._answer(job.ticket)
            case _:
                raise TypeError(f"{type(job).__name__} can't result in {type(result).__name__}")

    def _received(self, ticket: int, update: UpdateWeights, fetched: Fetched) -> None:
        if update.part_of and not fetched.converted:
            self._keep_part(ticket, update, fetched)
        elif update.part_of or update.prepare_as:
            self._effects.append(Check(ticket, update, fetched))
        else:
            self._make_ready(ticket, update, fetched, update.version)

    def _keep_part(self, ticket: int, update: UpdateWeights, fetched: Fetched) -> None:
        self._parts.add(update.part_of, fetched.tensors, fetched.origin, self._limits)
        self._answer(ticket)

    def _prepare(self, ticket: int, update: UpdateWeights, fetched: Fetched, now_ns: int) -> None:
        self._succession.check(fetched.covers)
        if update.prepare_as == self._given_up:
            raise WeightsError("the update was given up", code="weights_incomplete")
        deadline_ns = now_ns + int(update.timeout_s * _SECOND_NS)
        self._prepared = _Prepared(update, fetched, deadline_ns)
        self._answer(ticket)

    def _finish(self, ticket: int, finish: FinishUpdate) -> None:
        prepared = self._prepared
        if prepared is not None and self.prepared == finish.prepared:
            self._prepared = None
            if finish.version is None:
                self._answer(ticket)
                return
            self._finishing = ticket
            self._make_ready(ticket, prepared.update, prepared.fetched, finish.version)
        elif finish.version is None:
            fetching = self._operation(self._fetching) if self._fetching is not None else None
            if isinstance(fetching, UpdateWeights) and fetching.prepare_as == finish.prepared:
                # Others may be given up meanwhile that were refused at once.
                self._given_up = finish.prepared
            self._answer(ticket)
        else:
            raise WeightsError(
                "the weights that this executor had prepared are not there any more: it was "
                "started anew, or was not told in time to put them in place; send them again",
                code="weights_incomplete",
            )

    def _make_ready(
        self, ticket: int, update: UpdateWeights, fetched: Fetched, version: int | None
    ) -> None:
        self._succession.check(fetched.covers)
        if version is None and self.behind:
            version = self.behind + 1  # a number that the lane has had means other weights
        self._effects.append(MakeReady(ticket, update, fetched, version))

    def _made_ready(self, job: MakeReady, version: int) -> None:
        origin = job.fetched.origin if job.fetched.covers else None
        self._ready = _Ready(job.ticket, version, job.update.in_flight, origin)
        self._let_go(job.ticket)
        self._effects.append(SendReady(version, job.update.in_flight))

    def _in_place(self, version: int) -> None:
        """These weights made a step. It may be one of the epoch before, that is told late."""
        self._version = max(self._version, version)
        ready = self._ready
        if ready is not None and version >= ready.version:
            self._ready = None
            self._effects.append(Log("weights_in_place", {"version": version}))
            self._effects += self._succession.put_in_place(version, ready.origin)
            self._answer(ready.ticket)

    def _not_in_place(self, error: WeightsError) -> None:
        """Those that wait for a plan were dropped when it came."""
        if (ready := self._ready) is not None:
            self._ready = None
            self._answer(ready.ticket, error)

    def _change_memory(self, ticket: int) -> None:
        match self._operation(ticket):
            case ReleaseMemory(tags):
                self._effects.append(BeginRelease(ticket, tags))
            case ResumeMemory(tags):
                self._effects.append(Resume(ticket, tags))

    def _skip(self, update: UpdateWeights) -> None:
        """What it broadcasts is received by nobody, and must not be taken for what comes later."""
        if isinstance(update.source, GroupWeights):
            self._effects.append(SkipBroadcast(update.source.group))

    # --- their order and their end ------------------------------------------------------------

    def _go_on(self, now_ns: int) -> list[Effect]:
        """What every event ends with: turns and deadlines."""
        while self._turns and self._fetching is None:
            turn = self._turns.popleft()
            left_s = max((turn.deadline_ns - now_ns) / _SECOND_NS, _LEAST_FETCH_S)
            try:
                self._fetch(turn.ticket, msgspec.structs.replace(turn.update, timeout_s=left_s))
            except WeightsError as error:
                self._answer(turn.ticket, error)
        for turn in [turn for turn in self._turns if turn.deadline_ns <= now_ns]:
            self._turns.remove(turn)
            self._skip(turn.update)
            self._answer(turn.ticket, _busy())
        if self._prepared is not None and self._prepared.deadline_ns <= now_ns:
            self._prepared = None
            reason = "nobody asked for them"
            self._effects.append(Log("prepared_weights_dropped", {"reason": reason}, warning=True))
        return self._take_effects()

    def _operation(self, ticket: int) -> Operation:
        """One that is not answered."""
        return self._unanswered[ticket].operation

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _answer(self, ticket: int, error: WeightsError | None = None) -> None:
        """The end of an operation: gives up what it holds."""
        operation, operation_id = self._unanswered.pop(ticket)
        if error is not None and ticket == self._fetching and _is_part(operation):
            self._parts.drop()  # they will never be all
        self._let_go(ticket)
        answer = Answer(operation, operation_id, self._version, self.behind, error)
        self._effects.append(answer)

    def _let_go(self, ticket: int) -> None:
        """Whoever waits for what this operation has may have it."""
        if ticket == self._fetching:
            self._fetching = None
        if ticket == self._finishing:
            self._finishing = None
        if self._memory and ticket == self._memory[0]:
            self._memory.popleft()
            self._releasing = False
            if self._memory:
                self._change_memory(self._memory[0])


def _is_part(operation: Operation) -> bool:
    return isinstance(operation, UpdateWeights) and bool(operation.part_of)


def _busy() -> WeightsError:
    return WeightsError(
        "a weight update is under way already; wait until it is in place", code="weights_busy"
    )
