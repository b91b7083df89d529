"""Effects, which `ChangesCore` returns for its shell to execute."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ....bus.control import JoinWeightsGroup, LoadAdapter, UpdateWeights
from ....bus.envelope import Message
from ....config import WeightsError
from ....store.in_place import WeightsInPlace
from ..parts.weights import Fetched as Fetched
from ..parts.weights import WeightsOrigin as WeightsOrigin
from ..runner.shards import NewWeight
from .arguments import Operation


class Effect(msgspec.Struct, frozen=True):
    """An effect, immediate unless it is a `ChangeJob`."""


# --- jobs -------------------------------------------------------------------------------------


class ChangeJob(Effect, frozen=True):
    """An effect that takes time, for an operation; its result returns to the core."""

    ticket: int


class Fetch(ChangeJob, frozen=True):
    """Read the tensors of a source into this process; results in `Fetched`."""

    update: UpdateWeights


class Combine(ChangeJob, frozen=True):
    """Convert the tensors of all parts of an update together; results in `Fetched`."""

    update: UpdateWeights
    tensors: Mapping[str, NewWeight]
    origin: WeightsOrigin | None
    base: int | None = None


class Check(ChangeJob, frozen=True):
    """Compare new weights with the model."""

    update: UpdateWeights
    fetched: Fetched


class Stage(ChangeJob, frozen=True):
    """Stage new weights for a plan; results in their version.

    Attributes:
        version: Their version; None for the next.
    """

    update: UpdateWeights
    fetched: Fetched
    version: int | None


class ReadLogged(ChangeJob, frozen=True):
    """Read the weights of a decided update from the log; results in `Fetched`.

    Attributes:
        update: It has the version.
        logged: As in `FinishUpdate`.
    """

    update: UpdateWeights
    logged: str = ""


class StageAdapter(ChangeJob, frozen=True):
    """Read an adapter, and stage it unless it is only checked; results in its version."""

    load: LoadAdapter


class Join(ChangeJob, frozen=True):
    """Join a group."""

    wish: JoinWeightsGroup


class MoveExperts(ChangeJob, frozen=True):
    """Give experts other owners: the rank of each."""

    owners: tuple[int, ...]


class Checksum(ChangeJob, frozen=True):
    """Compute the checksum of each parameter in place; results in them, by name."""


class BeginRelease(ChangeJob, frozen=True):
    """Mark memory for the plan that releases it; results in whether there is any."""

    tags: tuple[str, ...]


class ResumeTags(ChangeJob, frozen=True):
    """Allocate released memory again."""

    tags: tuple[str, ...]


Result = Fetched | dict[str, str] | int | bool | WeightsError | None
"""The result of a job. A `WeightsError`: the job failed and changed nothing in place."""


# --- immediate effects ------------------------------------------------------------------------


class ReadDecision(Effect, frozen=True):
    """Read what was decided about a prepared update: `ChangesCore.decided`."""

    update: str


class Answer(Effect, frozen=True):
    """Answer an operation, once.

    Attributes:
        operation: The operation.
        operation_id: The id of the answer.
        version: Of the weights in place, or of the adapter.
        newest_version: The lane's largest version so far, if larger.
        error: Why the operation was refused or failed.
        checksums: Of the weights, if the operation asks for them.
        logged: As in `Outcome`.
    """

    operation: Operation
    operation_id: str
    version: int
    newest_version: int = 0
    error: WeightsError | None = None
    checksums: dict[str, str] | None = None
    logged: str = ""


class SendBatching(Effect, frozen=True):
    """Send batching a staged change, which its next plan puts in place."""

    message: Message


class SendMemory(Effect, frozen=True):
    """Send batching the state of the memory."""


class PublishAdapters(Effect, frozen=True):
    """Record the adapters in place, and announce them to admission."""


class SkipBroadcast(Effect, frozen=True):
    """Skip a broadcast of a group, which must not be taken for a later one."""

    group: str


class Leave(Effect, frozen=True):
    """Leave a group, if this executor is a member."""

    group: str


class Log(Effect, frozen=True):
    """Write a line to the log."""

    event: str
    fields: Mapping[str, object] = {}
    warning: bool = False


class Remember(Effect, frozen=True):
    """Record the weights in place, for a successor of this executor."""

    weights: WeightsInPlace


class ReadRecord(Effect, frozen=True):
    """Read the lane's record: `Succession.read`."""


class Restore(Effect, frozen=True):
    """Read the lane's weights and put them in place: `restored`, or `Succession.fall_behind`."""

    weights: WeightsInPlace
