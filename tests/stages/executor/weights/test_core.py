"""Weight updates and releases of memory, in whatever order things happen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nano_inference.bus.control import (
    FinishUpdate,
    JoinWeightsGroup,
    LeaveWeightsGroup,
    ReleaseMemory,
    ResumeMemory,
    TellWeightVersion,
    UpdateWeights,
)
from nano_inference.bus.weights import FolderWeights, GroupWeights, LocalWeights, StagedWeights
from nano_inference.stages.executor import memory as memory_module
from nano_inference.stages.executor.weights.effects import Answer, Fetch, MakeReady, SkipBroadcast

from .world import World, place, values_at

SECONDS = 10.0
"""That an update may take."""

NAMES = st.sampled_from(["a", "b", "ab"])
SOME_TAGS = st.sampled_from([("weights",), ("kv_cache",), ("weights", "kv_cache")])
IN_FLIGHT = st.sampled_from(["keep", "retract", "abort"])
INDEX = st.integers(0, 1 << 16)


@pytest.fixture(autouse=True)
def no_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of so little need not go back to the system each time."""
    monkeypatch.setattr(memory_module, "_trim", lambda device: None)


class Interleaved(RuleBasedStateMachine):
    """One executor that is asked for everything at once, while jobs, plans and messages come to
    their end in any order, stages fail and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.number = 0
        self.parts = 0

    # --- what somebody asks for ---------------------------------------------------------------

    @rule(names=NAMES, partial=st.booleans(), version=st.none() | st.integers(0, 9))
    def update(self, names: str, partial: bool, version: int | None) -> None:
        update = UpdateWeights(self.place(names), version=version, partial=partial)
        self.world.ask(update)

    @rule(names=NAMES, name=st.sampled_from(["u", "v"]), in_flight=IN_FLIGHT)
    def part(self, names: str, name: str, in_flight: Any) -> None:
        self.parts += 1
        update = UpdateWeights(self.place(names), in_flight, partial=True, part_of=name)
        self.world.ask(self.timed(update))

    @rule(name=st.sampled_from(["u", "v"]), number=st.integers(1, 3))
    def staged(self, name: str, number: int) -> None:
        self.world.ask(UpdateWeights(StagedWeights(name, number), partial=True))

    @rule(names=NAMES, name=st.sampled_from(["p", "q"]))
    def prepare(self, names: str, name: str) -> None:
        update = UpdateWeights(self.place(names), partial=True, prepare_as=name)
        self.world.ask(self.timed(update))

    @rule(name=st.sampled_from(["p", "q"]), version=st.none() | st.integers(1, 9))
    def finish(self, name: str, version: int | None) -> None:
        self.world.ask(FinishUpdate(name, version))

    @rule(tags=SOME_TAGS)
    def release(self, tags: tuple[str, ...]) -> None:
        self.world.ask(ReleaseMemory(tags))

    @rule(tags=SOME_TAGS)
    def resume(self, tags: tuple[str, ...]) -> None:
        self.world.ask(ResumeMemory(tags))

    @rule(
        operation=st.sampled_from(
            [
                TellWeightVersion(),
                LeaveWeightsGroup("g"),
                JoinWeightsGroup("g", "127.0.0.1:1", 1, 2, "gloo", 1.0),
                UpdateWeights(FolderWeights("")),
                UpdateWeights(LocalWeights("k"), part_of="u"),
                ReleaseMemory(("gpu",)),
            ]
        )
    )
    def something_else(self, operation: Any) -> None:
        self.world.ask(operation)

    # --- what happens -------------------------------------------------------------------------

    @precondition(lambda self: self.world.jobs)
    @rule(index=INDEX, fails=st.integers(0, 4).map(lambda chance: chance == 0))
    def run_job(self, index: int, fails: bool) -> None:
        self.world.run_job(index % len(self.world.jobs), fails=fails)

    @precondition(lambda self: self.world.results)
    @rule(index=INDEX)
    def report_job(self, index: int) -> None:
        self.world.report_job(index % len(self.world.results))

    @precondition(lambda self: self.world.messages)
    @rule()
    def deliver(self) -> None:
        self.world.deliver()

    @rule()
    def launch(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.launched)
    @rule()
    def execute(self) -> None:
        self.world.execute()

    @precondition(lambda self: self.world.executed)
    @rule()
    def report_step(self) -> None:
        self.world.report_step()

    @rule(seconds=st.sampled_from([0.0, 1.0, SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(anew=st.booleans())
    def fail_elsewhere(self, anew: bool) -> None:
        if anew:
            self.world.leader += "+"
        self.world.begin_epoch()

    @rule(anew=st.booleans(), restorable=st.booleans())
    def restart(self, anew: bool, restorable: bool) -> None:
        if anew:
            self.world.leader += "+"
        self.world.restorable = restorable
        record = self.world.record
        self.world.restart()
        world = self.world
        if record is None or record.leader != world.leader:
            assert (world.core.version, world.core.behind) == (0, 0)
        elif restorable and record.folder:
            assert (world.core.version, world.core.behind) == (record.version, 0)
            assert world.model.values() == values_at(record.folder)
        else:
            assert (world.core.version, world.core.behind) == (0, record.version)

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def nothing_is_mixed_up(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Nobody waits for ever, and nothing is left that is in the way of what comes next."""
        world = self.world
        world.settle()
        world.check()
        assert not world.core.unanswered
        assert not world.core.fetching
        assert not world.core.prepared
        resumed = world.ask(ResumeMemory())
        world.settle()
        whole = world.ask(UpdateWeights(self.place("ab")))
        world.settle()
        assert world.answers[resumed].error is world.answers[whole].error is None
        assert world.model.values() == {"a": self.number, "b": self.number}
        assert world.core.version == world.manager.version == world.answers[whole].version
        assert world.launch(), "steps go on"
        world.execute()

    def place(self, names: str) -> FolderWeights:
        self.number += 1
        return place(self.number, names)

    def timed(self, update: UpdateWeights) -> UpdateWeights:
        return UpdateWeights(
            update.source,
            update.in_flight,
            update.version,
            update.partial,
            SECONDS,
            part_of=update.part_of,
            prepare_as=update.prepare_as,
        )


class Together(RuleBasedStateMachine):
    """Two executors that are told of the same updates, and know nothing of each other: whoever
    asks has them put in place or dropped, as `update_together` does."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds = World(), World()
        # On its way to each executor: an operation, and the update that it belongs to.
        self.inboxes: tuple[list[tuple[str, Any]], ...] = [], []
        # Under which ids they are answered.
        self.asked: dict[tuple[str, type], list[str]] = {}
        self.number = 0
        self.open: list[str] = []
        self.versions: dict[str, int | None] = {}

    @rule(names=NAMES, in_flight=IN_FLIGHT)
    def update(self, names: str, in_flight: Any) -> None:
        self.number += 1
        name = str(self.number)
        self.open.append(name)
        source = place(self.number, names)
        self.tell(name, UpdateWeights(source, in_flight, partial=True, prepare_as=name))

    @precondition(lambda self: self.open)
    @rule(index=INDEX)
    def conclude(self, index: int) -> None:
        """All have answered: they are to put it in place, or to drop it."""
        name = self.open[index % len(self.open)]
        answers = self.answers(name, UpdateWeights)
        if len(answers) == 2:
            newest = 1 + max(max(answer.version, answer.newest_version) for answer in answers)
            self.finish(name, None if any(answer.error for answer in answers) else newest)

    @precondition(lambda self: self.open)
    @rule(index=INDEX)
    def give_up(self, index: int) -> None:
        """Whoever asked leaves."""
        self.finish(self.open[index % len(self.open)], None)

    @precondition(lambda self: any(self.inboxes))
    @rule(which=st.integers(0, 1))
    def receive(self, which: int) -> None:
        if self.inboxes[which]:
            name, operation = self.inboxes[which].pop(0)
            answered_as = self.worlds[which].ask(operation)
            self.asked.setdefault((name, type(operation)), ["", ""])[which] = answered_as

    @rule(which=st.integers(0, 1), index=INDEX, fails=st.booleans())
    def run_job(self, which: int, index: int, fails: bool) -> None:
        world = self.worlds[which]
        if world.jobs:
            index %= len(world.jobs)
            # What was checked does not fail any more, unless the executor is lost.
            world.run_job(index, fails=fails and not isinstance(world.jobs[index], MakeReady))

    @rule(which=st.integers(0, 1), index=INDEX)
    def report_job(self, which: int, index: int) -> None:
        world = self.worlds[which]
        if world.results:
            world.report_job(index % len(world.results))

    @rule(which=st.integers(0, 1))
    def step(self, which: int) -> None:
        world = self.worlds[which]
        if world.executed:
            world.report_step()
        elif world.launched:
            world.execute()
        elif world.messages:
            world.deliver()
        else:
            world.launch()

    @rule(which=st.integers(0, 1))
    def fail_elsewhere(self, which: int) -> None:
        self.worlds[which].begin_epoch()

    @invariant()
    def nothing_is_mixed_up(self) -> None:
        for world in self.worlds:
            world.check()

    def teardown(self) -> None:
        """All have changed, or none has; and in the same order."""
        for name in list(self.open):
            self.give_up(self.open.index(name))
        for which, world in enumerate(self.worlds):
            while self.inboxes[which]:
                self.receive(which)
            world.settle()
            assert not world.core.unanswered
        first, second = self.worlds
        assert first.model.values() == second.model.values()
        assert first.core.version == second.core.version
        assert first.contents == second.contents
        for name, version in self.versions.items():
            if version is not None:
                for answer in self.answers(name, FinishUpdate):
                    assert answer.error is None
                    assert answer.version >= version
            held = {value for values in first.contents.values() for value in values.values()}
            assert version is not None or float(name) not in held

    def tell(self, name: str, operation: Any) -> None:
        for inbox in self.inboxes:
            inbox.append((name, operation))

    def finish(self, name: str, version: int | None) -> None:
        self.open.remove(name)
        self.versions[name] = version
        self.tell(name, FinishUpdate(name, version))

    def answers(self, name: str, kind: type) -> list[Answer]:
        """Those that have come."""
        asked = self.asked.get((name, kind), ["", ""])
        answers = (world.answers.get(each) for world, each in zip(self.worlds, asked, strict=True))
        return [answer for answer in answers if answer is not None]


@pytest.mark.parametrize("machine", [Interleaved, Together])
def test_any_interleaving(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )


# --- one by one ---------------------------------------------------------------------------------


def test_a_part_that_waited_has_only_the_rest_of_its_time() -> None:
    world = World()
    world.ask(UpdateWeights(place(1, "ab"), timeout_s=3600.0))
    world.ask(UpdateWeights(place(2, "a"), timeout_s=SECONDS, part_of="u"))
    world.wait(SECONDS - 1)
    assert world.core.waiting_parts == 1
    world.run_job(fails=True)
    world.report_job()
    (job,) = world.jobs
    assert isinstance(job, Fetch)
    assert job.update.timeout_s == pytest.approx(1.0)


def test_a_part_that_waits_too_long_is_refused_and_parts_behind_it_are_not() -> None:
    world = World()
    world.ask(UpdateWeights(place(1, "ab"), timeout_s=3600.0))
    short = world.ask(UpdateWeights(place(2, "a"), timeout_s=1.0, part_of="u"))
    long = world.ask(UpdateWeights(place(3, "b"), timeout_s=SECONDS, part_of="u"))
    world.wait(1.0)
    assert error_code(world, short) == "weights_busy"
    world.settle()
    assert world.answers[long].error is None


@pytest.mark.parametrize(
    "before",
    [
        UpdateWeights(place(1, "ab")),
        UpdateWeights(place(1, "ab"), prepare_as="p"),
        UpdateWeights(place(1, "ab"), part_of="u"),
    ],
)
def test_what_a_group_broadcasts_for_an_update_that_is_refused_is_skipped(
    before: UpdateWeights,
) -> None:
    world = World()
    world.ask(before)
    effects = world.core.begin(UpdateWeights(GroupWeights("g", ())), world.now_ns)
    assert effects[0] == SkipBroadcast("g")


def error_code(world: World, name: str) -> str:
    error = world.answers[name].error
    return error.code if error is not None else ""
