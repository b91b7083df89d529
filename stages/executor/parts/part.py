"""The base of the executor's parts, and the state that they share with the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ....bus.control import ReplicaCapacity
from ....bus.sections import Section
from ....config import EngineConfig
from ..driver.constraints import Constraints
from ..driver.sampled import Sampled, TokenFeed
from ..driver.sequences import SequenceTable
from ..driver.step import LaunchedStep, StepRunner
from ..runner.interface import KVCache, LoadedModel, ModelRunner

if TYPE_CHECKING:
    from ..runner.ranks.processes import Ranks

AnyPart = TypeVar("AnyPart", bound="Part")


@dataclass(eq=False)
class ExecutorState:
    """The state that the core and its parts share.

    Attributes:
        config: The settings; `max_batch_size` is that of this device.
        model, runner, ranks: The model, its runner, and the other ranks; None if there are none.
        table, constraints, feed: The sequences, their grammars, and their last tokens on the
            device.
        steps: Runs steps.
        runs_ahead: Whether steps may be launched before earlier ones are finished.
        now_ns: The clock.
        off: Why a feature is off, by name. Features in use are missing.
        caches: The KV caches of the model and of a draft model.
        parts: By class, in order.
        blocked: Why no plan can run until a reset; None if plans run.
    """

    config: EngineConfig
    model: LoadedModel
    runner: ModelRunner
    ranks: Ranks | None
    table: SequenceTable
    constraints: Constraints
    feed: TokenFeed
    steps: StepRunner
    runs_ahead: bool
    now_ns: Callable[[], int]
    off: dict[str, str]
    caches: list[KVCache]
    parts: dict[type[Part], Part] = field(default_factory=dict)
    blocked: Exception | None = None

    def part(self, kind: type[AnyPart]) -> AnyPart:
        """Return a part that is in use. Raises KeyError if it is not."""
        found = self.parts[kind]
        assert isinstance(found, kind)
        return found


class Part:
    """The base of parts. Each hook does nothing here; the core calls those that are overridden.

    Attributes:
        plans: The class of its section in StepPlan; None if it has none.
        changes: Whether applying the section is a change that the times of a step report.
    """

    plans: ClassVar[type[Section] | None] = None
    changes: ClassVar[bool] = False

    def __init__(self, state: ExecutorState) -> None:
        self.state = state

    def apply(self, section: Section, step: LaunchedStep) -> None:
        """Apply the part's section of a plan, after `finished` and before `new`."""

    def before(self, step: LaunchedStep) -> None:
        """Handle a step whose plan is applied, before its rows are computed."""

    def launched(self, step: LaunchedStep) -> None:
        """Handle a step whose rows are launched."""

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        """Handle a step whose tokens have been read; add sections of its result to `step.parts`."""

    def forget(self, seq_id: int) -> None:
        """A sequence is about to leave the table. Unknown ids are ignored."""

    def enlarged(self) -> None:
        """The token feed was allocated anew, with more rows."""

    def replaced(self) -> None:
        """New weights are in place, for a plan."""

    def released(self) -> None:
        """Memory was released."""

    def resumed(self) -> None:
        """All memory is allocated again. Raises WeightsError if the part lacks memory."""

    def reset(self) -> None:
        """All sequences leave the table."""

    def close(self) -> None:
        """Free everything; the part is unusable then."""

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        """Return the replica's capacity with what the part adds to it."""
        return found
