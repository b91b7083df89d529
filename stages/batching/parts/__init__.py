"""The optional parts of batching: the list of all, and those that a core has.

A part is made if it is configured, or with the first message or request that concerns it. Until
then its module is not imported. CONTRIBUTING.md shows how one is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from typing import Any, NamedTuple

from ....bus.control import ReplicaCapacity
from ....bus.messages import AdmittedRequest, RequestInfo
from ....bus.sections import Sections, name_of
from ....bus.steps import NewSequence, StepSummary
from ....config import EngineConfig
from ..allocation import Allocation
from ..part import Core, Part
from ..plans import PlanDraft, SentPlan
from ..schedule import SchedulerOutput, StepLimit
from ..sequence import Sequence


def has(sections: Sections, name: str) -> bool:
    """Whether a section of this name is among these."""
    return any(name_of(section) == name for section in sections)


class Entry(NamedTuple):
    """A part that a core may have.

    Attributes:
        name: As in `Parts.find`.
        made_by: The class, or "module:class" under this folder.
        configured: Whether settings and executor have it from the start.
        wanted: Whether a request needs it.
        messages: Names of messages that need it.
    """

    name: str
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
    Entry("accounts", "accounts:Accounts", configured=lambda config, capacity: True),
    Entry(
        "pipelining",
        "pipelining:Pipelining",
        configured=lambda config, capacity: capacity.pipeline_stages > 1,
    ),
    Entry(
        "speculation",
        "speculation:Speculation",
        configured=lambda config, capacity: (
            config.speculation == "auto" and has(capacity.parts, "DraftCapacity")
        ),
    ),
    Entry("memory", "memory:MemoryRelease", messages=("MemoryState",)),
    Entry("weights", "weights:WeightChanges", messages=("WeightsReady",)),
    Entry(
        "adapters",
        "adapters:Adapters",
        configured=lambda config, capacity: has(capacity.parts, "AdapterCapacity"),
        wanted=lambda request: bool(request.info.adapter),
        messages=("AdapterReady",),
    ),
    Entry(
        "images",
        "images.part:Images",
        configured=lambda config, capacity: has(capacity.parts, "ImageCapacity"),
    ),
    Entry(
        "arrivals",
        "handover.arrivals:Arrivals",
        wanted=lambda request: has(request.parts, "HandoverRoute"),
        messages=("AnnounceSequence", "AnnounceBlocks", "Handover", "WithdrawSequences"),
    ),
    Entry(
        "departures",
        "handover.departures:Departures",
        wanted=lambda request: has(request.parts, "HandoverRoute"),
        messages=("ReleaseBlocks",),
    ),
    Entry("kv_events", "kv_events:KVEvents", configured=lambda config, _: config.kv_events),
    Entry(
        "tiers",
        "tiers.part:Tiers",
        configured=lambda config, capacity: has(capacity.parts, "TierCapacity"),
    ),
    Entry(
        "sessions",
        "sessions:Sessions",
        wanted=lambda request: has(request.parts, "SessionTurn"),
        messages=("ControlSession",),
    ),
)
"""All parts, in the order in which their hooks are called."""


class Parts:
    """The parts of a core. A hook of `Part` is here the tuple of methods that override it."""

    accept: tuple[Callable[[AdmittedRequest, int | None], bool], ...]
    admit: tuple[Callable[[Sequence, AdmittedRequest], None], ...]
    start: tuple[Callable[[Sequence, dict[str, Any]], None], ...]
    end: tuple[Callable[[Sequence], None], ...]
    leave: tuple[Callable[[Sequence], None], ...]
    ends_elsewhere: tuple[Callable[[str], bool], ...]
    requests: tuple[Callable[[], Iterable[RequestInfo]], ...]
    begin: tuple[Callable[[int], None], ...]
    choose: tuple[Callable[[int], tuple[Seq[Sequence], int]], ...]
    limit: tuple[Callable[[], StepLimit], ...]
    relieve: tuple[
        Callable[
            [SchedulerOutput, Seq[Sequence], Callable[[int], SchedulerOutput]],
            bool,
        ],
        ...,
    ]
    extend: tuple[Callable[[SchedulerOutput], SchedulerOutput], ...]
    rest: tuple[Callable[[int], NewSequence | None], ...]
    is_urgent: tuple[Callable[[], bool], ...]
    fit: tuple[Callable[[PlanDraft], None], ...]
    planned: tuple[Callable[[PlanDraft], None], ...]
    absorb: tuple[Callable[[SentPlan, StepSummary], Iterable[Sequence]], ...]
    lose: tuple[Callable[[], None], ...]
    reset: tuple[Callable[[], None], ...]
    restart: tuple[Callable[[ReplicaCapacity], None], ...]
    wake_at_ns: tuple[Callable[[], int | None], ...]
    num_spare_blocks: tuple[Callable[[], int], ...]
    allocations: tuple[Callable[[], Iterable[Allocation]], ...]
    numbers: tuple[Callable[[], Mapping[str, int]], ...]
    take_counts: tuple[Callable[[], Mapping[str, Mapping[str, float]]], ...]

    def __init__(self, core: Core, config: EngineConfig, entries: Seq[Entry]) -> None:
        self._core, self._config, self._entries = core, config, entries
        self._made: dict[str, Part] = {}
        self._set_hooks()

    def make_configured(self, capacity: ReplicaCapacity) -> None:
        """Make the parts that settings and executor have, as before any other call."""
        self._capacity = capacity
        entries = self._entries
        self._make([each for each in entries if each.configured(self._config, capacity)])

    def make_for(self, request: AdmittedRequest) -> None:
        """Make the parts that a request needs."""
        self._make([entry for entry in self._entries if entry.wanted(request)])

    def find(self, name: str) -> Part | None:
        """Return a part; None if it has not been made."""
        return self._made.get(name)

    def receivers(self, message: object) -> list[Part]:
        """Return the parts that handle a message, after making those that it needs."""
        name = type(message).__name__
        self._make([entry for entry in self._entries if name in entry.messages])
        return [part for part in self._made.values() if isinstance(message, part.handles)]

    def _make(self, entries: Iterable[Entry]) -> None:
        new = [entry for entry in entries if entry.name not in self._made]
        for entry in new:
            self._made[entry.name] = entry.load()(self._core, self._config, self._capacity)
        if new:
            order = [entry.name for entry in self._entries]
            self._made = dict(sorted(self._made.items(), key=lambda made: order.index(made[0])))
            self._set_hooks()

    def _set_hooks(self) -> None:
        for hook in type(self).__annotations__:
            own = [
                getattr(part, hook)
                for part in self._made.values()
                if getattr(type(part), hook) is not getattr(Part, hook)
            ]
            setattr(self, hook, tuple(own))
