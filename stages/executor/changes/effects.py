"""What `UpdatesCore` has its shell do.

Jobs take their time. They carry the ticket of an operation, and their result goes back to the core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ....bus.control import JoinWeightsGroup, UpdateWeights
from ....bus.weights import InFlight
from ....config import WeightsError
from ....store.in_place import WeightsInPlace
from .arguments import Operation
from .parts import Origin


class Fetched(NamedTuple):
    """New weights in this process.

    Attributes:
        tensors: By the model's names and in its dtypes, if they are `converted`; else by those of a
            checkpoint, and other parts are needed to convert them.
        origin: Where they can be had again.
        covers: Whether they replace every parameter.
        converted: Always, but for a part of an update.
    """

    tensors: Mapping[str, Tensor]
    origin: Origin | None
    covers: bool
    converted: bool = True


# --- jobs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the tensors of a source into this process; results in `Fetched`."""

    ticket: int
    update: UpdateWeights


@dataclass(frozen=True, slots=True)
class Combine:
    """Convert the tensors of all parts of an update together; results in `Fetched`."""

    ticket: int
    update: UpdateWeights
    tensors: Mapping[str, Tensor]
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class Check:
    """Hold them against the model."""

    ticket: int
    update: UpdateWeights
    fetched: Fetched


@dataclass(frozen=True, slots=True)
class MakeReady:
    """Have them wait for the plan that puts them in place; results in their version.

    Attributes:
        version: What they are to be counted as; None for the next.
    """

    ticket: int
    update: UpdateWeights
    fetched: Fetched
    version: int | None


@dataclass(frozen=True, slots=True)
class Join:
    """Join a group."""

    ticket: int
    wish: JoinWeightsGroup


@dataclass(frozen=True, slots=True)
class BeginRelease:
    """Have memory wait for the plan that releases it; results in whether there is any."""

    ticket: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resume:
    """Take memory again."""

    ticket: int
    tags: tuple[str, ...]


Job = Fetch | Combine | Check | MakeReady | Join | BeginRelease | Resume
Result = Fetched | int | bool | WeightsError | None
"""Of a job. `WeightsError`: it failed, and has changed nothing that is in place."""


# --- what is done at once ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """Tell whoever asked that it is done, or why not: once for each operation.

    Attributes:
        operation: What was asked for.
        operation_id: Under which the answer is awaited.
        version: Of the weights in place.
        newest_version: That the lane has had, where it is a larger one.
        error: Why it was refused, or failed.
    """

    operation: Operation
    operation_id: str
    version: int
    newest_version: int
    error: WeightsError | None = None


@dataclass(frozen=True, slots=True)
class SendReady:
    """Tell batching of weights that wait for its next plan."""

    version: int
    in_flight: InFlight


@dataclass(frozen=True, slots=True)
class SendMemory:
    """Tell batching what memory there is, and what waits to be released."""


@dataclass(frozen=True, slots=True)
class SkipBroadcast:
    """Nobody receives what a group broadcasts: it must not be taken for what comes later."""

    group: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave a group, if this executor is in it."""

    group: str


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the log; a warning if something is not as it should be."""

    event: str
    fields: dict[str, object] = field(default_factory=dict)
    warning: bool = False


# --- about what the lane remembers ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remember:
    """Write down what is in place, for whoever comes after this executor."""

    weights: WeightsInPlace


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Look up what the lane has: `UpdatesCore.record_read`."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Read these and put them in place: `UpdatesCore.restored`, or `not_restored`."""

    weights: WeightsInPlace


Effect = (
    Job
    | Answer
    | SendReady
    | SendMemory
    | SkipBroadcast
    | Leave
    | Log
    | Remember
    | ReadRecord
    | Restore
)
