"""Staged changes of weights, adapters and memory, decided: events and time in, effects out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import count
from typing import NamedTuple

import msgspec
from torch import Tensor

from ....bus import control
from ....bus.control import AdapterReady, LoadAdapter, UnloadAdapter, UpdateWeights, WeightsReady
from ....bus.parts.adapters import AdaptersPlan
from ....bus.parts.weights import WeightsPlan
from ....bus.steps import StepPlan
from ....bus.weights import GroupWeights, LocalWeights, StagedWeights
from ....config import AdapterError, WeightsError, shown
from ....store.in_place import WeightsInPlace
from ..runner.shards import NewShard, NewWeight
from ..runner.weights.checks import UNLIMITED, WeightLimits, busy
from . import effects as do
from .arguments import Operation, check_arguments
from .succession import Succession

_SECOND_NS = 1_000_000_000

_LEAST_FETCH_S = 0.001
"""The time to fetch that remains for an update that waited for its turn to the last moment."""

AdapterOperation = LoadAdapter | UnloadAdapter

_ASK_AGAIN_NS = 2 * _SECOND_NS
"""When the decision about an update is read again, if the store couldn't be reached."""

_WEIGHTS = ""
"""Key of the weights among staged changes; adapters have their ids."""


class _Turn(NamedTuple):
    """A part of an update that waits until no other source is fetched."""

    ticket: int
    update: UpdateWeights
    deadline_ns: int


class _Prepared(NamedTuple):
    """Weights that wait for `FinishUpdate`, until a deadline."""

    update: UpdateWeights
    fetched: do.Fetched
    deadline_ns: int


class _Staged(msgspec.Struct, frozen=True):
    """A change that waits for a plan. Its operation is answered when the plan's step is done."""

    ticket: int
    version: int
    message: WeightsReady | AdapterReady
    origin: do.WeightsOrigin | None = None


class ChangesCore:
    """An executor's state of weight updates, adapter changes and releases of memory.

    A change has three steps. The tensors are read and checked while plans run, and staged. Batching
    receives a message, and its next plan puts the change in place; only batching can tell which KV
    is older. When that plan's step is done, the operation is answered.

    An update may come in parts, which are fetched and kept until `StagedWeights` asks for all. An
    update that other executors make as well is fetched, checked and kept until `FinishUpdate`, so
    that it can be dropped when another executor refuses it.

    Memory is released likewise: batching receives a message, plans no more steps, and its next
    plan releases the memory.

    1. One source of weights is fetched at a time. Parts wait for their turn, in order; other
       updates are refused while weights are fetched, prepared or staged. Each adapter has one
       change at a time.
    2. The version rises when a step is done that ran with the new weights, and never before.
    3. A failure leaves weights, version and waiting changes as they were; but the parts of an
       update are dropped when one of them fails, since they can't become complete.
    4. Each operation is answered once. Open operations are answered when the stage ends.

    Each method is an event and returns effects, in order.

    Attributes:
        version: Of the weights of the last step.
        fetching: The ticket whose tensors are being fetched.
        succession: The lane's record.
    """

    def __init__(self, limits: WeightLimits, *, logs: bool = False) -> None:
        """Begin.

        Args:
            limits: The most that an update may bring.
            logs: Whether there is a log of weights, which has what an earlier process prepared.
        """
        self._limits = limits
        self._logs = logs
        self.version = 0
        self._tickets = count(1)
        # By ticket: open operations and the ids of their answers.
        self._open: dict[int, tuple[Operation, str]] = {}
        self._effects: list[do.Effect] = []
        self.fetching: int | None = None
        # Parts that wait until no weights are fetched.
        self._turns: deque[_Turn] = deque()
        self._parts = WeightParts()
        self._prepared: _Prepared | None = None
        # An update that was dropped while it was still fetched.
        self._dropped = ""
        # Whether the decision about the prepared update is being read.
        self._reads_decision = False
        # The update, and its version, that FinishUpdate named last: in place or staged.
        self._decided: tuple[str, int] = "", 0
        # The ticket of a prepared update that is being staged.
        self._finishing: int | None = None
        self._staged: dict[str, _Staged] = {}
        # Adapters that are read, by ticket, and those in place.
        self._reading: dict[int, str] = {}
        self._adapters: frozenset[str] = frozenset()
        # Changes of memory, the first of which runs; whether batching is to release it.
        self._memory: deque[do.BeginRelease | do.ResumeTags] = deque()
        self._releasing = False
        self.succession = Succession()

    # --- state for others ---------------------------------------------------------------------

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The ids of open operations, oldest first."""
        return tuple(operation_id for _, operation_id in self._open.values())

    @property
    def prepared(self) -> str:
        """The name of the update that waits for `FinishUpdate`; "" if none does."""
        return self._prepared.update.prepare_as if self._prepared is not None else ""

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do; None while nothing waits."""
        deadlines = [turn.deadline_ns for turn in self._turns]
        if self._prepared is not None and not self._reads_decision:
            deadlines.append(self._prepared.deadline_ns)
        return min(deadlines, default=None)

    # --- events: operations, and the stage ----------------------------------------------------

    def begin(self, operation: Operation, operation_id: str, now_ns: int) -> list[do.Effect]:
        """Begin an operation, to be answered under this id."""
        ticket = next(self._tickets)
        self._open[ticket] = operation, operation_id
        try:
            self._begin(ticket, operation, now_ns)
        except WeightsError as error:
            self._answer(ticket, error)
        return self.tick(now_ns)

    def epoch_begun(self, version: int, now_ns: int) -> list[do.Effect]:
        """Take part. Batching has lost all earlier messages. `version`: of the weights in place."""
        self._effects.append(do.SendMemory())
        self._in_place(version)
        self._effects += [do.SendBatching(staged.message) for staged in self._staged.values()]
        return self.tick(now_ns)

    def step_done(
        self, plan: StepPlan, version: int, now_ns: int, pending: bool, refused: WeightsError | None
    ) -> list[do.Effect]:
        """Handle the end of a step.

        Args:
            plan: Its plan.
            version: Of its weights.
            now_ns: The time.
            pending: Whether memory waits to be released.
            refused: Why the plan's weights could not be put in place.
        """
        self._in_place(version)
        if refused is not None:
            self._not_in_place(refused)
        if WeightsPlan.find(plan.parts) is not None:
            # Batching assumed them in place already, and may have received an older state of the
            # memory since.
            self._effects.append(do.SendMemory())
        if (adapters := AdaptersPlan.find(plan.parts)) is not None:
            self._adapters_in_place(adapters.changes)
        if self._releasing and not pending:
            self._answer(self._memory[0].ticket)
        return self.tick(now_ns)

    def adapters_loaded(self, ids: Iterable[str]) -> None:
        """Note the adapters in place."""
        self._adapters = frozenset(ids)

    def weights_lost(self, error: WeightsError, now_ns: int) -> list[do.Effect]:
        """Handle a failed write that leaves no weights in place; a new epoch is to begin."""
        self._not_in_place(error)
        return self.tick(now_ns)

    def close(self) -> list[do.Effect]:
        """Answer all open operations, since the stage ends."""
        weights_error = WeightsError(
            "the executor stopped during the operation; it restarts with all its memory and "
            "the weights of model_path, as version 0; send them again",
            code="weights_interrupted",
        )
        adapter_error = AdapterError(
            "the executor stopped during the operation; list its adapters",
            code="adapter_interrupted",
        )
        self._turns.clear()
        self._memory.clear()
        self._prepared = None
        self._staged.clear()
        for ticket, (operation, _) in list(self._open.items()):
            of_adapter = isinstance(operation, AdapterOperation)
            self._answer(ticket, adapter_error if of_adapter else weights_error)
        return self._take_effects()

    def done(self, job: do.ChangeJob, result: do.Result, now_ns: int) -> list[do.Effect]:
        """Handle the end of a job. A failed one has changed nothing in place."""
        if job.ticket not in self._open:
            return []  # it was answered when the stage ended
        if isinstance(job, do.ResumeTags):
            self._effects.append(do.SendMemory())  # a part of a failed one may be there
        try:
            if isinstance(result, WeightsError):
                raise result
            self._continue(job, result, now_ns)
        except WeightsError as error:
            self._answer(job.ticket, error)
        return self.tick(now_ns)

    def restored(self, weights: WeightsInPlace) -> list[do.Effect]:
        """The lane's weights are in place."""
        self.version = weights.version
        self._decided = f"{weights.log}/{weights.digest}", weights.version
        fields = {"version": weights.version, "folder": weights.folder}
        origin = do.WeightsOrigin(weights.folder, weights.stamp)
        recorded = self.succession.put_in_place(weights.version, origin)
        return [do.Log("weights_restored", fields), recorded]

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
            case control.FinishUpdate():
                self._finish(ticket, operation)
            case control.JoinWeightsGroup():
                self._effects.append(do.Join(ticket, operation))
            case control.LeaveWeightsGroup(group):
                self._effects.append(do.Leave(group))
                self._answer(ticket)
            case control.TellWeightVersion():
                self._answer(ticket)
            case control.ChecksumWeights():
                if self._is_busy:
                    raise busy()
                self.fetching = ticket  # no update changes them meanwhile
                self._effects.append(do.Checksum(ticket))
            case control.ReleaseMemory(tags):
                self._change_memory(do.BeginRelease(ticket, tags))
            case control.ResumeMemory(tags):
                self._change_memory(do.ResumeTags(ticket, tags))
            case control.MoveExperts(owners):
                self._effects.append(do.MoveExperts(ticket, owners))
            case LoadAdapter() | UnloadAdapter():
                self._change_adapter(ticket, operation)

    def _begin_update(self, ticket: int, update: UpdateWeights, now_ns: int) -> None:
        if not update.part_of:
            if update.prepare_as and update.prepare_as == self.prepared:
                assert self._prepared is not None
                self._answer(ticket, logged=self._prepared.fetched.logged)  # the first was lost
                return
            if self._is_busy:
                self._skip(update)
                raise busy()
            self._fetch(ticket, update)
            return
        if isinstance(update.source, LocalWeights):
            raise WeightsError(
                "a state dict of this process can't be a part of an update, since it may "
                "change before the other parts come; pass all tensors at once"
            )
        self._turns.append(_Turn(ticket, update, _deadline_ns(update, now_ns)))

    def _fetch(self, ticket: int, update: UpdateWeights) -> None:
        self.fetching = ticket
        if isinstance(update.source, StagedWeights):
            # All parts are there, so those that need each other can be converted.
            tensors, origin, base = self._parts.take(update.source)
            self._effects.append(do.Combine(ticket, update, tensors, origin, base))
        else:
            self._effects.append(do.Fetch(ticket, update))

    def _change_adapter(self, ticket: int, operation: AdapterOperation) -> None:
        id = operation.adapter
        if id in self._reading.values() or id in self._staged:
            raise AdapterError(
                f"a change of the adapter {shown(id)} is in progress; wait for its end",
                code="adapter_busy",
            )
        if isinstance(operation, LoadAdapter):
            self._reading[ticket] = id
            self._effects.append(do.StageAdapter(ticket, operation))
        elif id in self._adapters:
            self._stage(id, _Staged(ticket, 0, AdapterReady(id, 0, operation.in_flight)))
        else:
            raise AdapterError(
                f"no adapter {shown(id)} is loaded",
                code="adapter_not_found",
                remedy="load it first",
            )

    def _continue(self, job: do.ChangeJob, result: do.Result, now_ns: int) -> None:
        match job, result:
            case (
                (
                    do.Fetch(ticket, update)
                    | do.Combine(ticket, update)
                    | do.ReadLogged(ticket, update)
                ),
                do.Fetched() as fetched,
            ):
                self._received(ticket, update, fetched)
            case do.Check(ticket, update, fetched), _ if update.part_of:
                self._keep_part(ticket, update, fetched)
            case do.Check(ticket, update, fetched), _:
                self._prepare(ticket, update, fetched, now_ns)
            case do.Stage(ticket, update, fetched), int(version):
                message = WeightsReady(version, update.in_flight)
                origin = fetched.origin if fetched.covers else None
                self._release(ticket)
                self._stage(_WEIGHTS, _Staged(ticket, version, message, origin))
            case do.StageAdapter(ticket, load), int(version):
                if load.only_check:
                    self._answer(ticket, version=version)
                else:
                    self._release(ticket)
                    ready = AdapterReady(load.adapter, version, load.in_flight)
                    self._stage(load.adapter, _Staged(ticket, version, ready))
            case do.Checksum(ticket), dict(checksums):
                self._answer(ticket, checksums=checksums)
            case do.BeginRelease(), True:
                self._releasing = True
                self._effects.append(do.SendMemory())
            case ((do.Join() | do.MoveExperts() | do.BeginRelease() | do.ResumeTags()), _):
                self._answer(job.ticket)
            case _:
                raise TypeError(f"{type(job).__name__} can't result in {type(result).__name__}")

    def _received(self, ticket: int, update: UpdateWeights, fetched: do.Fetched) -> None:
        if update.part_of and not fetched.converted:
            self._keep_part(ticket, update, fetched)
        elif update.part_of or update.prepare_as:
            self._effects.append(do.Check(ticket, update, fetched))
        else:
            self._begin_stage(ticket, update, fetched, update.version)

    def _keep_part(self, ticket: int, update: UpdateWeights, fetched: do.Fetched) -> None:
        self._parts.add(
            update.part_of,
            fetched.tensors,
            fetched.origin,
            self._limits,
            base=fetched.base,
            number=update.part,
        )
        self._answer(ticket)

    def _prepare(
        self, ticket: int, update: UpdateWeights, fetched: do.Fetched, now_ns: int
    ) -> None:
        self.succession.check(fetched.covers)
        if update.prepare_as == self._dropped:
            raise WeightsError("the update was cancelled; begin it anew", code="weights_incomplete")
        self._prepared = _Prepared(update, fetched, _deadline_ns(update, now_ns))
        self._answer(ticket, logged=fetched.logged)

    def _finish(self, ticket: int, finish: control.FinishUpdate) -> None:
        prepared = self._prepared
        if prepared is not None and self.prepared == finish.prepared:
            self._prepared = None
            if finish.version is None:
                self._answer(ticket)
                return
            self._finishing, self._decided = ticket, (finish.prepared, finish.version)
            self._begin_stage(ticket, prepared.update, prepared.fetched, finish.version)
        elif self._decided in (
            (finish.prepared, finish.version),
            (finish.logged, finish.version),
        ):
            if self._finishing is not None or _WEIGHTS in self._staged:
                raise busy()
            self._answer(ticket)  # they are in place
        elif finish.version is not None and finish.logged and self._logs:
            if self._is_busy:
                raise busy()
            self.fetching, self._decided = ticket, (finish.prepared, finish.version)
            source = StagedWeights(finish.prepared, 0)
            update = UpdateWeights(source, version=finish.version, partial=True)
            self._effects.append(do.ReadLogged(ticket, update, finish.logged))
        elif finish.version is None:
            fetching = self._open[self.fetching][0] if self.fetching is not None else None
            if isinstance(fetching, UpdateWeights) and fetching.prepare_as == finish.prepared:
                # Updates that were refused at once may be dropped meanwhile.
                self._dropped = finish.prepared
            self._answer(ticket)
        else:
            raise WeightsError(
                "the prepared weights are gone: the executor was restarted, or FinishUpdate "
                "came too late; send the weights again",
                code="weights_incomplete",
            )

    def decided(self, name: str, version: int | None, now_ns: int) -> list[do.Effect]:
        """Handle the decision about a prepared update, as the store has it.

        Args:
            name: The update's.
            version: The version that it becomes; 0 if it will not be in place; None if unknown.
            now_ns: The time.
        """
        self._reads_decision = False
        prepared = self._prepared
        if prepared is None or self.prepared != name:
            return []
        if version is None:
            self._prepared = prepared._replace(deadline_ns=now_ns + _ASK_AGAIN_NS)
        elif version:
            return self.begin(control.FinishUpdate(name, version), "", now_ns)
        else:
            self._drop_prepared()
        return self.tick(now_ns)

    @property
    def _is_busy(self) -> bool:
        holders = self.fetching, self._prepared, self._finishing, self._staged.get(_WEIGHTS)
        return any(holder is not None for holder in holders)

    def _drop_prepared(self) -> None:
        self._prepared = None
        fields = {"reason": "FinishUpdate did not come in time"}
        self._effects.append(do.Log("prepared_weights_dropped", fields, warning=True))

    def _begin_stage(
        self, ticket: int, update: UpdateWeights, fetched: do.Fetched, version: int | None
    ) -> None:
        self.succession.check(fetched.covers)
        if version is None and self.succession.behind:
            version = (
                self.succession.behind + 1
            )  # the lane used the numbers up to there for other weights
        self._effects.append(do.Stage(ticket, update, fetched, version))

    def _stage(self, key: str, staged: _Staged) -> None:
        self._staged[key] = staged
        self._effects.append(do.SendBatching(staged.message))

    def _in_place(self, version: int) -> None:
        """Weights of this version made a step, perhaps one of an earlier epoch."""
        self.version = max(self.version, version)
        staged = self._staged.get(_WEIGHTS)
        if staged is not None and version >= staged.version:
            del self._staged[_WEIGHTS]
            self._effects.append(do.Log("weights_in_place", {"version": version}))
            self._effects.append(self.succession.put_in_place(version, staged.origin))
            self._answer(staged.ticket)

    def _not_in_place(self, error: WeightsError) -> None:
        """Staged weights were dropped when their plan came."""
        if (staged := self._staged.pop(_WEIGHTS, None)) is not None:
            self._decided = "", 0
            self._answer(staged.ticket, error)

    def _adapters_in_place(self, adapters: Iterable[tuple[str, int]]) -> None:
        self._effects.append(do.PublishAdapters())
        for id, version in adapters:
            staged = self._staged.get(id)
            if staged is not None and staged.version == version:
                del self._staged[id]
                event = "adapter_in_place" if version else "adapter_unloaded"
                self._effects.append(do.Log(event, {"adapter": id, "version": version}))
                self._answer(staged.ticket, version=version)

    def _change_memory(self, change: do.BeginRelease | do.ResumeTags) -> None:
        self._memory.append(change)
        if len(self._memory) == 1:
            self._effects.append(change)

    def _skip(self, update: UpdateWeights) -> None:
        """Skip a group's broadcast that no executor receives."""
        if isinstance(update.source, GroupWeights):
            self._effects.append(do.SkipBroadcast(update.source.group))

    # --- order and end ------------------------------------------------------------------------

    def tick(self, now_ns: int) -> list[do.Effect]:
        """Handle turns and deadlines, at the end of every event."""
        while self._turns and self.fetching is None:
            turn = self._turns.popleft()
            left_s = max((turn.deadline_ns - now_ns) / _SECOND_NS, _LEAST_FETCH_S)
            try:
                self._fetch(turn.ticket, msgspec.structs.replace(turn.update, timeout_s=left_s))
            except WeightsError as error:
                self._answer(turn.ticket, error)
        for turn in [turn for turn in self._turns if turn.deadline_ns <= now_ns]:
            self._turns.remove(turn)
            self._skip(turn.update)
            self._answer(turn.ticket, busy())
        late = self._prepared is not None and self._prepared.deadline_ns <= now_ns
        if self._prepared is not None and late and not self._reads_decision:
            if self._prepared.update.decided:
                self._reads_decision = True
                self._effects.append(do.ReadDecision(self.prepared))
            else:
                self._drop_prepared()
        return self._take_effects()

    def _take_effects(self) -> list[do.Effect]:
        effects, self._effects = self._effects, []
        return effects

    def _answer(
        self,
        ticket: int,
        error: WeightsError | None = None,
        *,
        version: int = 0,
        checksums: dict[str, str] | None = None,
        logged: str = "",
    ) -> None:
        """End an operation and free its resources."""
        operation, operation_id = self._open.pop(ticket)
        is_part = isinstance(operation, UpdateWeights) and bool(operation.part_of)
        if error is not None and ticket == self.fetching:
            if is_part:
                self._parts.drop()  # they can't become complete
            if isinstance(operation, control.FinishUpdate):
                self._decided = "", 0
        self._release(ticket)
        newest = 0
        if not isinstance(operation, AdapterOperation):
            version, newest = self.version, self.succession.behind
        about = version, newest, error, checksums, logged
        self._effects.append(do.Answer(operation, operation_id, *about))

    def _release(self, ticket: int) -> None:
        """Free the resources of an operation, for the next ones."""
        self._reading.pop(ticket, None)
        if ticket == self.fetching:
            self.fetching = None
        if ticket == self._finishing:
            self._finishing = None
        if self._memory and ticket == self._memory[0].ticket:
            self._memory.popleft()
            self._releasing = False
            if self._memory:
                self._effects.append(self._memory[0])


def _deadline_ns(update: UpdateWeights, now_ns: int) -> int:
    return now_ns + int(update.timeout_s * _SECOND_NS)


# --- parts of an update -------------------------------------------------------------------------


class WeightParts:
    """The parts of one update: those of the last update's name.

    Attributes:
        update: The name; "" while there are none.
    """

    def __init__(self) -> None:
        self.update = ""
        self._numbers: set[int] = set()
        self._tensors: dict[str, NewWeight] = {}
        self._origin: do.WeightsOrigin | None = None
        self._base: int | None = None
        # An upper bound: a tensor that came again counts twice.
        self._num_bytes = 0

    def add(
        self,
        update: str,
        tensors: Mapping[str, NewWeight],
        origin: do.WeightsOrigin | None = None,
        limits: WeightLimits = UNLIMITED,
        *,
        base: int | None = None,
        number: int | None = None,
    ) -> None:
        """Keep a part. A tensor that comes again replaces the earlier one, and so does a part.

        Raises:
            WeightsError: All parts together exceed the limits; or a delta changes a tensor of
                another part, or begins with another version.
        """
        if update != self.update:
            self.drop()
            self.update = update
        if base is not None or self._base is not None:
            if base is not None and self._base not in (None, base):
                raise WeightsError(
                    f"a part is a delta of version {base}, and another one of {self._base}",
                    code="weights_base",
                    remedy="send all parts of one version",
                )
            if again := tensors.keys() & self._tensors.keys():
                raise WeightsError(
                    f"{shown(min(again))} is in two parts, of which one is a delta; send the "
                    "changes of a tensor in one part",
                    code="weights_delta",
                )
            self._base = base if base is not None else self._base
        self._numbers.add(len(self._numbers) if number is None else number)
        self._origin = origin if len(self._numbers) == 1 else None
        self._tensors.update(tensors)
        self._num_bytes += _held(tensors)
        if self._num_bytes > limits.num_bytes:
            self._num_bytes = _held(self._tensors)
        limits.check_tensors(len(self._tensors))
        limits.check_bytes(self._num_bytes)

    def take(
        self, staged: StagedWeights
    ) -> tuple[Mapping[str, NewWeight], do.WeightsOrigin | None, int | None]:
        """Return all tensors of an update, their origin if they share one, and the version of which
        some are a delta; keep nothing.

        Raises:
            WeightsError: Some parts are missing.
        """
        numbers = self._numbers if staged.update == self.update else set()
        found = self._tensors, self._origin, self._base
        self.drop()
        if not numbers or numbers != set(range(staged.parts)):
            raise WeightsError(
                f"{len(numbers)} of the update's {staged.parts} parts have come; send all of them "
                "again",
                code="weights_incomplete",
            )
        return found

    def drop(self) -> None:
        """Keep nothing."""
        self.update, self._numbers, self._tensors, self._origin = "", set(), {}, None
        self._num_bytes, self._base = 0, None


def _held(tensors: Mapping[str, NewWeight]) -> int:
    """The bytes that these tensors keep allocated, on all ranks together; several may be views of
    one storage."""
    shards = sum(each.nbytes for each in tensors.values() if isinstance(each, NewShard))
    storages = [each.untyped_storage() for each in tensors.values() if isinstance(each, Tensor)]
    return shards + sum({each.data_ptr(): each.nbytes() for each in storages}.values())
