"""Weight updates and releases of memory, in any order of events."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from nano_inference.bus import control
from nano_inference.bus.control import FinishUpdate, ReleaseMemory, ResumeMemory, UpdateWeights
from nano_inference.bus.weights import FolderWeights, GroupWeights, LocalWeights, StagedWeights
from nano_inference.config import WeightsError
from nano_inference.stages.executor.changes.core import WeightParts
from nano_inference.stages.executor.changes.effects import (
    Answer,
    Fetch,
    SkipBroadcast,
    WeightsOrigin,
)
from nano_inference.stages.executor.runner import memory as memory_module
from nano_inference.stages.executor.runner.weights.transports.background import (
    Background,
    stay_single,
)

from ..refusals import refused
from ..threads import several_threads
from .world import World, place, values_at

SECONDS = 10.0
"""The time limit of an update."""

INDEX = st.integers(0, 1 << 16)
IN_FLIGHT = st.sampled_from(["keep", "retract", "abort"])
UPDATES = st.sampled_from(["u", "u", "u", "v"])
PREPARED = st.sampled_from(["p", "p", "p", "q"])
TAGS = st.sampled_from([("weights",), ("kv_cache",), ("weights", "kv_cache")])


def at(names: str, **changed: Any) -> UpdateWeights:
    """An update of these parameters, whose version is chosen when it is fetched."""
    return UpdateWeights(FolderWeights(names), **{"partial": True, "timeout_s": SECONDS, **changed})


def in_parts(update: str, names: list[str], missing: int) -> list[Any]:
    parts: list[Any] = [at(each, part_of=update) for each in names]
    return [*parts, UpdateWeights(StagedWeights(update, len(names) + missing), partial=True)]


def together(name: str, names: str, version: int | None) -> list[Any]:
    return [at(names, prepare_as=name), FinishUpdate(name, version)]


SCRIPTS = st.one_of(
    st.builds(at, st.just("ab"), partial=st.booleans(), version=st.none() | st.integers(0, 9)).map(
        lambda update: [update]
    ),
    st.builds(at, st.sampled_from("ab"), partial=st.integers(0, 4).map(bool)).map(
        lambda update: [update]
    ),
    st.builds(
        in_parts,
        UPDATES,
        st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3),
        st.sampled_from([0, 0, -1, 1]),
    ),
    st.builds(together, PREPARED, st.sampled_from(["a", "ab"]), st.none() | st.integers(1, 30)),
    st.builds(lambda tags: [ReleaseMemory(tags), ResumeMemory(tags)], TAGS),
    st.builds(lambda tags: [ReleaseMemory(tags), at("ab"), ResumeMemory(tags), at("ab")], TAGS),
    st.sampled_from(
        [
            control.TellWeightVersion(),
            control.LeaveWeightsGroup("g"),
            control.JoinWeightsGroup("g", "127.0.0.1:1", 1, 2, "gloo", 1.0),
            UpdateWeights(FolderWeights("")),
            UpdateWeights(LocalWeights("k"), part_of="u"),
            FinishUpdate("p"),
            ReleaseMemory(("gpu",)),
        ]
    ).map(lambda operation: [operation]),
)
"""Sequences of operations."""

MOVES = ["ask", "job", "job", "told", "told", "message", "plan", "step", "result"] * 2 + ["epoch"]
SEED = st.integers(0, 1 << 32)
NUMBER = st.integers(1, 40)
"""Seeds of random moves: hypothesis itself tends to repeat the same moves."""


def move(world: World, kind: str, chance: Random, failing: float) -> None:
    """Make one possible event happen, if any."""
    if kind == "job" and world.jobs:
        world.run_job(chance.randrange(len(world.jobs)), fails=chance.random() < failing)
    elif kind == "told" and world.results:
        world.report_job(chance.randrange(len(world.results)))
    elif kind == "message" and world.messages:
        world.deliver()
    elif kind == "plan":
        world.launch()
    elif kind == "step" and world.launched:
        world.execute()
    elif kind == "result" and world.executed:
        world.report_step()
    elif kind == "epoch":
        world.begin_epoch()
    world.check()


@pytest.fixture(autouse=True)
def no_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return no freed memory to the system: it is too little."""
    monkeypatch.setattr(memory_module, "trim", lambda device: None)


class Interleaved(RuleBasedStateMachine):
    """One executor with many operations at once, while jobs, plans and messages end in any order,
    stages fail and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.scripts: list[list[Any]] = []
        self.number = 0

    @rule(script=SCRIPTS)
    def somebody_comes(self, script: list[Any]) -> None:
        self.scripts.append(list(script))

    @rule(seed=SEED, number=NUMBER)
    def go_on(self, seed: int, number: int) -> None:
        chance = Random(seed)
        for _ in range(number):
            kind = chance.choice(MOVES)
            if kind == "ask":
                self.ask(chance)
            move(self.world, kind, chance, failing=0.1)

    def ask(self, chance: Random) -> None:
        if not self.scripts:
            return
        script = chance.choice(self.scripts)
        operation = script.pop(0)
        source = getattr(operation, "source", None)
        if isinstance(source, FolderWeights) and source.path:
            operation = msgspec.structs.replace(operation, source=self.place(source.path))
        self.world.ask(operation)
        self.scripts = [script for script in self.scripts if script]

    @rule()
    def rest(self) -> None:
        self.world.rest()
        self.world.check()

    @rule(seconds=st.sampled_from([0.0, 1.0, SECONDS / 2, SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.world.check()

    @rule(executor=st.integers(0, 3).map(lambda chance: chance == 0), data=st.data())
    def lose_a_stage(self, executor: bool, data: st.DataObject) -> None:
        world = self.world
        if data.draw(st.booleans(), "admission anew"):
            world.leader += "+"
        if executor:
            world.restorable = data.draw(st.booleans(), "folders are as they were")
            self.restart()
        else:
            world.begin_epoch()
        world.check()

    def restart(self) -> None:
        world, record = self.world, self.world.record
        world.restart()
        if record is None or record.leader != world.leader:
            assert (world.core.version, world.core.succession.behind) == (0, 0)
        elif world.restorable and record.folder:
            assert (world.core.version, world.core.succession.behind) == (record.version, 0)
            assert world.model.values() == values_at(record.folder)
        else:
            assert (world.core.version, world.core.succession.behind) == (0, record.version)

    def teardown(self) -> None:
        """No operation waits for ever, and no leftover blocks the next one."""
        world = self.world
        while self.scripts:
            self.ask(Random(0))
            world.rest()
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


class Together(RuleBasedStateMachine):
    """Two executors with the same updates, which the sender puts in place or drops in both, as
    `update_weights_together` does."""

    def __init__(self) -> None:
        super().__init__()
        self.worlds = World(), World()
        # In flight to each executor: an operation and its update.
        self.inboxes: tuple[list[tuple[str, Any]], ...] = [], []
        # The ids of their answers.
        self.asked: dict[tuple[str, type], list[str]] = {}
        self.number = 0
        self.open: list[str] = []
        self.versions: dict[str, int | None] = {}

    @rule(names=st.sampled_from(["a", "b", "ab"]), in_flight=IN_FLIGHT)
    def update(self, names: str, in_flight: Any) -> None:
        self.number += 1
        name = str(self.number)
        self.open.append(name)
        source = place(self.number, names)
        self.tell(name, UpdateWeights(source, in_flight, partial=True, prepare_as=name))

    @precondition(lambda self: self.open)
    @rule(index=INDEX)
    def conclude(self, index: int) -> None:
        """After all answers: have the update put in place, or dropped."""
        name = self.open[index % len(self.open)]
        answers = self.answers(name, UpdateWeights)
        if len(answers) == 2:
            newest = 1 + max(max(answer.version, answer.newest_version) for answer in answers)
            self.finish(name, None if any(answer.error for answer in answers) else newest)

    @precondition(lambda self: self.open)
    @rule(index=INDEX)
    def give_up(self, index: int) -> None:
        """Stop the sender."""
        self.finish(self.open[index % len(self.open)], None)

    @precondition(lambda self: any(self.inboxes))
    @rule(which=st.integers(0, 1))
    def receive(self, which: int) -> None:
        if self.inboxes[which]:
            name, operation = self.inboxes[which].pop(0)
            answered_as = self.worlds[which].ask(operation)
            self.asked.setdefault((name, type(operation)), ["", ""])[which] = answered_as

    @rule(which=st.integers(0, 1), seed=SEED, number=NUMBER)
    def go_on(self, which: int, seed: int, number: int) -> None:
        world, chance = self.worlds[which], Random(seed)
        for _ in range(number):
            # A checked update fails only if the executor is lost.
            fetches = any(isinstance(job, Fetch) for job in world.jobs)
            move(world, chance.choice(MOVES), chance, failing=0.1 if fetches else 0.0)

    @rule(which=st.integers(0, 1))
    def rest(self, which: int) -> None:
        self.worlds[which].rest()

    @rule(which=st.integers(0, 1))
    def fail_elsewhere(self, which: int) -> None:
        self.worlds[which].begin_epoch()

    def teardown(self) -> None:
        """All have changed, or none has, and in the same order."""
        for name in list(self.open):
            self.give_up(self.open.index(name))
        for which, world in enumerate(self.worlds):
            while self.inboxes[which]:
                self.receive(which)
            world.rest()
            assert not world.core.prepared, "dropped updates block nothing"
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
        """The answers so far."""
        asked = self.asked.get((name, kind), ["", ""])
        answers = (world.answers.get(each) for world, each in zip(self.worlds, asked, strict=True))
        return [answer for answer in answers if answer is not None]


@pytest.mark.soak
@pytest.mark.parametrize("machine", [Interleaved, Together])
def test_any_interleaving(machine: type[RuleBasedStateMachine], soak: bool) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300 if soak else 25,
            stateful_step_count=50,
            deadline=None,
            phases=[Phase.generate],
            derandomize=True,
        ),
    )


# --- single cases -------------------------------------------------------------------------------


def test_a_part_that_waited_has_only_the_rest_of_its_time() -> None:
    world = World()
    world.ask(UpdateWeights(place(1, "ab"), timeout_s=3600.0))
    world.ask(UpdateWeights(place(2, "a"), timeout_s=SECONDS, part_of="u"))
    world.wait(SECONDS - 1)
    assert len(world.core._turns) == 1
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
def test_broadcasts_of_refused_updates_are_skipped(
    before: UpdateWeights,
) -> None:
    world = World()
    world.ask(before)
    effects = world.core.begin(UpdateWeights(GroupWeights("g", ())), "", world.now_ns)
    assert effects[0] == SkipBroadcast("g")


def error_code(world: World, name: str) -> str:
    error = world.answers[name].error
    return error.code if error is not None else ""


def test_dropped_updates_stay_dropped() -> None:
    """Two senders whose updates meet, each refused by one executor, drop both."""
    world = World()
    first = world.ask(UpdateWeights(place(1, "ab"), prepare_as="p"))
    second = world.ask(UpdateWeights(place(2, "ab"), prepare_as="q"))
    assert error_code(world, second) == "weights_busy"
    world.ask(FinishUpdate("p"))
    world.ask(FinishUpdate("q"))
    world.rest()
    assert error_code(world, first) == "weights_incomplete"
    assert not world.core.prepared


def parts(**names: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in names.items()}


def test_all_parts_are_taken_together_once() -> None:
    kept = WeightParts()
    kept.add("u", parts(a=1, b=2))
    kept.add("u", parts(b=3, c=4))
    found, origin, _ = kept.take(StagedWeights("u", 2))
    assert origin is None
    assert {name: tensor.item() for name, tensor in found.items()} == {"a": 1, "b": 3, "c": 4}
    with pytest.raises(WeightsError, match="0 of the update's 2"):
        kept.take(StagedWeights("u", 2))


@pytest.mark.parametrize("name", ["new", "old"])
def test_another_update_begins_anew_and_so_does_a_dropped_one(name: str) -> None:
    kept = WeightParts()
    kept.add("old", parts(a=1))
    if name == "old":
        kept.drop()
    kept.add(name, parts(b=2))
    assert set(kept.take(StagedWeights(name, 1))[0]) == {"b"}


def test_only_a_single_part_has_an_origin() -> None:
    kept, folder = WeightParts(), WeightsOrigin("/weights", "stamp")
    kept.add("u", parts(a=1), folder)
    assert kept.take(StagedWeights("u", 1))[1] == folder
    kept.add("v", parts(a=1), folder)
    kept.add("v", parts(b=1), folder)
    assert kept.take(StagedWeights("v", 2))[1] is None


@pytest.mark.parametrize(
    "wanted", [StagedWeights("u", 2), StagedWeights("v", 1), StagedWeights("v", 0)]
)
def test_incomplete_parts_are_dropped(wanted: StagedWeights) -> None:
    kept = WeightParts()
    kept.add("u", parts(a=1))
    with refused("weights_incomplete"):
        kept.take(wanted)
    with pytest.raises(WeightsError, match="0 of"):
        kept.take(StagedWeights("u", 1))


def test_it_alone_has_no_parallel_regions() -> None:
    with several_threads(2), ThreadPoolExecutor(1) as steps:
        assert steps.submit(torch.get_num_threads).result() == 2
        fetching = Background("weights-test", stay_single)
        assert fetching.submit(torch.get_num_threads).result(60) == 1
        fetching.close()
        assert steps.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 2
