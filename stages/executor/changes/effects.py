"""Effects, which `ChangesCore` returns for its shell to execute.

A job takes time. It carries the ticket of an operation, and its result returns to the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from torch import Tensor

from ....bus.control import JoinWeightsGroup, LoadAdapter, UpdateWeights
from ....bus.messages import Message
from ....config import WeightsError
from ....store.in_place import WeightsInPlace
from .arguments import Operation


class WeightsOrigin(NamedTuple):
    """A folder from which tensors can be read again, while its files match the stamp."""

    folder: str
    stamp: str


class Fetched(NamedTuple):
    """New weights in this process.

    Attributes:
        tensors: By the model's names and in its dtypes if `converted`; else by a checkpoint's
            names, until the other parts are there to convert them.
        origin: Where the tensors can be read again.
        covers: Whether they replace every parameter.
        converted: True, but for a part of an update.
    """

    tensors: Mapping[str, Tensor]
    origin: WeightsOrigin | None
    covers: bool
    converted: bool = True


# --- jobs -------------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True):
    """Read the tensors of a source into this process; results in `Fetched`."""

    ticket: int
    update: UpdateWeights


class Combine(msgspec.Struct, frozen=True):
    """Convert the tensors of all parts of an update together; results in `Fetched`."""

    ticket: int
    update: UpdateWeights
    tensors: Mapping[str, Tensor]
    origin: WeightsOrigin | None


class Check(msgspec.Struct, frozen=True):
    """Compare new weights with the model."""

    ticket: int
    update: UpdateWeights
    fetched: Fetched


class Stage(msgspec.Struct, frozen=True):
    """Stage new weights for a plan; results in their version.

    Attributes:
        version: Their version; None for the next.
    """

    ticket: int
    update: UpdateWeights
    fetched: Fetched
    version: int | None


class StageAdapter(msgspec.Struct, frozen=True):
    """Read an adapter, and stage it unless it is only checked; results in its version."""

    ticket: int
    load: LoadAdapter


class Join(msgspec.Struct, frozen=True):
    """Join a group."""

    ticket: int
    wish: JoinWeightsGroup


class BeginRelease(msgspec.Struct, frozen=True):
    """Mark memory for the plan that releases it; results in whether there is any."""

    ticket: int
    tags: tuple[str, ...]


class ResumeTags(msgspec.Struct, frozen=True):
    """Allocate released memory again."""

    ticket: int
    tags: tuple[str, ...]


Job = Fetch | Combine | Check | Stage | StageAdapter | Join | BeginRelease | ResumeTags
Result = Fetched | int | bool | WeightsError | None
"""The result of a job. A `WeightsError`: the job failed and changed nothing in place."""


# --- immediate effects ------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True):
    """Answer an operation, once.

    Attributes:
        operation: The operation.
        operation_id: The id of the answer.
        version: Of the weights in place, or of the adapter.
        newest_version: The lane's largest version so far, if larger.
        error: Why the operation was refused or failed.
    """

    operation: Operation
    operation_id: str
    version: int
    newest_version: int = 0
    error: WeightsError | None = None


class SendBatching(NamedTuple):
    """Send batching a staged change, which its next plan puts in place."""

    message: Message


class SendMemory(msgspec.Struct, frozen=True):
    """Send batching the state of the memory."""


class PublishAdapters(msgspec.Struct, frozen=True):
    """Record the adapters in place, and announce them to admission."""


class SkipBroadcast(msgspec.Struct, frozen=True):
    """Skip a broadcast of a group, which must not be taken for a later one."""

    group: str


class Leave(msgspec.Struct, frozen=True):
    """Leave a group, if this executor is a member."""

    group: str


class Log(msgspec.Struct, frozen=True):
    """Write a line to the log."""

    event: str
    fields: dict[str, object] = {}
    warning: bool = False


class Remember(msgspec.Struct, frozen=True):
    """Record the weights in place, for a successor of this executor."""

    weights: WeightsInPlace


class ReadRecord(msgspec.Struct, frozen=True):
    """Read the lane's record: `ChangesCore.record_read`."""


class Restore(msgspec.Struct, frozen=True):
    """Read the lane's weights and put them in place: `restored`, or `not_restored`."""

    weights: WeightsInPlace


Effect = (
    Job
    | Answer
    | SendBatching
    | SendMemory
    | PublishAdapters
    | SkipBroadcast
    | Leave
    | Log
    | Remember
    | ReadRecord
    | Restore
)
