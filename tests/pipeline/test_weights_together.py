"""Several executors have the same weights: an update reaches all of them, or changes none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from nano_inference import BusClient, Pipeline, WeightDelta, WeightsError
from nano_inference.bus import weights as handoff
from nano_inference.bus.control import FinishUpdate
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import BusError
from nano_inference.pipeline import client_weights, stage_control
from nano_inference.stages.executor.changes.shell import StagedChanges
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.stage import ExecutorStage
from nano_inference.telemetry import now_ns

from .. import oracle
from ..soaking import in_soak
from .builders import (
    DTYPE,
    State,
    break_once,
    check_stamps,
    greedy,
    raises,
    stage_of,
    until,
    versions_of,
)
from .conftest import LIMIT_S, MakeConfig, config_maker
from .test_replicas import parts

SHORT_MODEL = True


class Several:
    """Two executors, in two replicas of a pipeline or in two lanes of one stream."""

    def __init__(self, client: BusClient, stages: list[Callable[[], Any]]) -> None:
        self.client = client
        self._stages = stages

    @property
    def executors(self) -> list[ExecutorStage]:
        found = [stage() for stage in self._stages]
        assert all(isinstance(stage, ExecutorStage) for stage in found)
        return found

    @property
    def updates(self) -> list[StagedChanges]:
        return [stage._changes for stage in self.executors]

    @property
    def versions(self) -> list[int]:
        return [stage._core.part(WeightChanges).manager.version for stage in self.executors]

    async def until_both_work(self) -> None:
        await until(lambda: all(stage.condition()[0] == "ready" for stage in self.executors))

    @asynccontextmanager
    async def under_load(self) -> AsyncIterator[Callable[[], int]]:
        """Clients send one request after the other, none of which is lost, and whose tokens are
        those of the weights that they are stamped with. Gives how many requests are done."""
        done, finished = asyncio.Event(), 0

        async def ask(number: int) -> None:
            nonlocal finished
            while not done.is_set():
                completion = await self.client.complete(greedy(number, 1 + number % 37, 2))
                check_stamps(completion)
                finished += 1
                number += 6

        async with asyncio.TaskGroup() as clients:
            for number in range(6):
                clients.create_task(ask(number))
            yield lambda: finished
            done.set()


# Two pipelines that know of each other by Redis alone differ most from two replicas in one. Where
# links are on Redis too nothing is decided otherwise: that each message survives them is shown by
# tests/bus/, and an update under load below.
KINDS = [in_soak("replicas"), "lanes"]


@pytest.fixture(params=KINDS)
async def several(request: pytest.FixtureRequest) -> AsyncIterator[Several]:
    kind = request.param
    request.param = {"replicas": "memory", "lanes": "redis"}.get(kind, "redis-links")
    make_config: MakeConfig = config_maker(request)
    settings: dict[str, Any] = {
        "pipeline__restart_backoff_s": 0.01,
        "engine__max_batch_size": 4,
        "engine__dtype": DTYPE,
    }
    async with AsyncExitStack() as stack:
        if kind == "lanes":
            pipelines = [
                await stack.enter_async_context(
                    Pipeline(make_config(bus__lane=lane, admission__max_in_flight=4, **settings))
                )
                for lane in "ab"
            ]
            stages = [lambda p=p: p._actors["executor"] for p in pipelines]
        else:
            config = make_config(pipeline__replicas=2, **settings)
            pipeline = await stack.enter_async_context(Pipeline(config))
            pipelines = [pipeline]
            stages = [lambda r=r: pipeline._actors[r] for r in ("executor", "executor.1")]
        found = Several(pipelines[0].client, stages)
        await found.until_both_work()
        yield found


def fails(update: StagedChanges, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next fetch, and only that one."""
    original = update._weights.fetch

    def fetch(*args: Any) -> Any:
        monkeypatch.setattr(update._weights, "fetch", original)
        raise WeightsError("the disk is on fire")

    monkeypatch.setattr(update._weights, "fetch", fetch)


@pytest.mark.parametrize(
    ("several", "which"), [("replicas", 0), in_soak("lanes", 1)], indirect=["several"]
)
async def test_a_failed_fetch_changes_no_executor(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    client = several.client
    await client.update_weights(oracle.announcing(loaded, 1), in_flight="retract")
    async with several.under_load():
        fails(several.updates[which], monkeypatch)
        with raises("weights_refused", kind=WeightsError) as refused:
            await client.update_weights(oracle.announcing(loaded, 2))
        assert "the disk is on fire" in refused.value.message
        assert "no executor has changed" in refused.value.message
        assert refused.value.message.count("has version 1") == 2
        assert several.versions == [1, 1]
        # Nothing is left of it that would be in the way of the next one.
        assert await client.update_weights(oracle.announcing(loaded, 2)) == 2
        assert several.versions == [2, 2]


@pytest.mark.parametrize("several", ["replicas", in_soak("lanes")], indirect=True)
async def test_a_delta_of_other_weights_at_one_executor_changes_none(
    several: Several, loaded: State
) -> None:
    """Also where their version is the same."""
    client, bits = several.client, {name: each.bfloat16() for name, each in loaded.items()}
    first, second = (oracle.announcing(bits, version) for version in (1, 2))
    await client.update_weights(first)
    delta = WeightDelta.between(first, second, base_version=1)
    other = several.executors[1]._core.model.module.model.embed_tokens.weight.data
    other[3, 5] += 1
    with raises("weights_base", "checksum.*no executor has changed", kind=WeightsError):
        await client.update_weights(delta)
    assert several.versions == [1, 1]
    other[3, 5] -= 1
    async with several.under_load() as finished:
        assert await client.update_weights(delta) == 2
        await until(lambda: finished() > 6)
    assert several.versions == [2, 2]


async def test_an_executor_lost_before_the_change_is_named(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = several.updates
    original = second.obey

    async def obey(operation: Any, operation_id: str) -> None:
        if isinstance(operation, FinishUpdate):
            second.core.begin(FinishUpdate(operation.prepared), "", now_ns())
        await original(operation, operation_id)

    monkeypatch.setattr(second, "obey", obey)
    with raises("weights_differ", kind=WeightsError) as differ:
        await several.client.update_weights(oracle.announcing(loaded, 1))
    assert several.versions == [1, 0]
    assert "has version 1" in differ.value.message
    assert "has version 0" in differ.value.message
    monkeypatch.setattr(second, "obey", original)
    # The same number never means two things.
    assert await several.client.update_weights(oracle.announcing(loaded, 2)) == 2
    assert several.versions == [2, 2]
    async with several.under_load() as finished:
        await until(lambda: finished() > 6)
    assert first.core.prepared == second.core.prepared == ""


async def test_a_caller_that_leaves_gives_the_update_up(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = several.updates
    may_go_on = threading.Event()
    original = second._weights.fetch

    def fetch(*args: Any) -> Any:
        assert may_go_on.wait(LIMIT_S)
        return original(*args)

    monkeypatch.setattr(second._weights, "fetch", fetch)
    update = asyncio.create_task(
        several.client.update_weights(oracle.announcing(loaded, 1), timeout_s=LIMIT_S)
    )
    try:
        await until(lambda: first.core.prepared != "")
        update.cancel()
        await asyncio.wait([update])
        assert update.cancelled()
        assert not first.core.prepared
    finally:
        may_go_on.set()
    await until(lambda: not second.core.fetching)
    assert await several.client.update_weights(oracle.announcing(loaded, 2)) == 1
    assert several.versions == [1, 1]


async def test_a_silent_executor_is_named(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_weights, "ANSWER_S", 0.2)
    monkeypatch.setattr(stage_control, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(several.updates[1], "obey", lambda *args: asyncio.sleep(0))
    with raises("no_answer", kind=BusError) as silent:
        await several.client.update_weights(oracle.announcing(loaded, 1), timeout_s=1)
    assert silent.value.message.count("did not answer") == 1
    assert "has version 0" in silent.value.message
    assert several.versions == [0, 0]
    assert not several.updates[0].core.prepared


async def test_an_update_waits_for_an_executor_that_is_loading(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It receives no messages yet; after a while the update fails and nothing has changed."""
    client, may_load = several.client, asyncio.Event()
    original = ExecutorStage.open

    async def open_late(self: ExecutorStage) -> None:
        await may_load.wait()
        await original(self)

    async def until_known() -> None:
        while "starting" not in {each.state for each in await client.deployment.reports()}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    monkeypatch.setattr(ExecutorStage, "open", open_late)
    break_once(monkeypatch, ExecutorCore, "execute", after=1)
    request = asyncio.create_task(client.complete(greedy(0, 3)))
    await until_known()
    with monkeypatch.context() as short:
        short.setattr(client_weights, "ANSWER_S", 0.1)
        with raises("no_answer", "loading", kind=BusError):
            await client.update_weights(oracle.announcing(loaded, 1))
    update = asyncio.create_task(client.update_weights(oracle.announcing(loaded, 1)))
    asking = asyncio.create_task(client.deployment.trouble())
    await asking
    assert not update.done()
    may_load.set()
    assert await update == 1
    assert several.versions == [1, 1]
    assert (await request).status == "done"


async def test_a_restarted_replica_reports_the_weights_it_serves(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that were in memory are gone: it has those of model_path, and says so."""
    await several.client.update_weights(loaded, version=5)
    await lose_an_executor(several, monkeypatch)
    assert sorted(several.versions) == [0, 5]
    behind = several.versions.index(0)
    load = several.executors[behind].load()
    assert (load["weight_version"], load["behind_version"]) == (0, 5)
    assert "behind_version" not in several.executors[1 - behind].load()
    assert await several.client.weight_version() == 0
    seen = set()
    completions = await asyncio.gather(
        *(several.client.complete(greedy(number, 9, 4)) for number in range(12))
    )
    for completion in completions:
        assert completion.status == "done"
        for index in range(len(completion.samples)):
            seen |= set(versions_of(completion, index))
    assert seen == {0, 5}
    part = {"model.norm.weight": loaded["model.norm.weight"]}
    with raises("weights_behind", kind=WeightsError):
        await several.client.update_weights(part, partial=True)
    assert sorted(several.versions) == [0, 5]
    assert await several.client.update_weights(oracle.announcing(loaded, 6)) == 6
    assert several.versions == [6, 6]
    assert not any("behind_version" in stage.load() for stage in several.executors)
    assert await several.client.update_weights(part, partial=True) == 7


@pytest.mark.parametrize(
    ("several", "staged"), [("replicas", True), in_soak("lanes", False)], indirect=["several"]
)
async def test_a_restarted_replica_reads_the_folder_again(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, staged: bool
) -> None:
    """Whichever it is, and whether it was told at once or in parts, as the gateway does."""
    client = several.client
    save_file(oracle.announcing(loaded, 3), tmp_path / "model.safetensors")
    source: Any = FolderWeights(str(tmp_path))
    if staged:
        await client.stage_weights("u", source)
        source = handoff.StagedWeights("u", 1)
    assert await client.update_weights(source, version=3, partial=staged) == 3
    async with several.under_load() as finished:
        await lose_an_executor(several, monkeypatch)
        before = finished()
        await until(lambda: finished() > before + 6)
    assert several.versions == [3, 3]
    assert await client.weight_version() == 3
    assert not any("behind_version" in stage.load() for stage in several.executors)
    # What the folder has now is not what the others have.
    save_file(oracle.announcing(loaded, 4), tmp_path / "model.safetensors")
    await lose_an_executor(several, monkeypatch, loads=oracle.announcing(loaded, 0))
    assert sorted(several.versions) == [0, 3]
    assert [stage.load().get("behind_version") for stage in several.executors].count(3) == 1
    async with several.under_load() as finished:
        await until(lambda: finished() > 6)


async def test_weights_belong_to_the_lane_that_lives(
    request: pytest.FixtureRequest, loaded: State, tmp_path: Path
) -> None:
    """Its parts may be started anew one after the other; all of them together begin from 0."""
    request.param = "redis-links"
    front, first, second = parts(config_maker(request))
    save_file(oracle.announcing(loaded, 7), tmp_path / "model.safetensors")
    folder = FolderWeights(str(tmp_path))
    async with BusClient.connect(front.bus) as client:
        async with Pipeline(first):
            async with Pipeline(front):
                await check_version(client, 0)
                assert await client.update_weights(folder, version=7) == 7
            async with Pipeline(front):  # an admission of which the memory is not
                await check_version(client, 7)
                async with Pipeline(second) as newcomer:
                    await newcomer.ready()
                    assert (
                        stage_of(newcomer, ExecutorStage, 1)
                        ._core.part(WeightChanges)
                        .manager.version
                        == 7
                    )
                    check_stamps(await client.complete(greedy(0, 5, 16)))
        async with Pipeline(first), Pipeline(front):
            await check_version(client, 0)
            assert await client.update_weights(folder) == 1


async def test_lanes_that_have_lost_their_weights_do_not_count_from_one(
    several: Several, loaded: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    await several.client.update_weights(loaded, version=5)
    for behind in (1, 2):
        while sum("behind_version" in each.load() for each in several.executors) < behind:
            await lose_an_executor(several, monkeypatch)
    assert several.versions == [0, 0]
    assert await several.client.update_weights(oracle.announcing(loaded, 6)) == 6


async def check_version(client: BusClient, version: int) -> None:
    completion = await client.complete(greedy(0, 5))
    assert set(versions_of(completion)) == {version}


async def lose_an_executor(
    several: Several, monkeypatch: pytest.MonkeyPatch, loads: State | None = None
) -> None:
    """One of them fails at its next step, and is started again. `loads`: other weights then."""
    before = [stage.incarnation for stage in several.executors]
    if loads is not None:
        original = ExecutorStage.open

        async def open_other(self: ExecutorStage) -> None:
            await original(self)
            self._core.part(WeightChanges).manager._write(loads)

        monkeypatch.setattr(ExecutorStage, "open", open_other)
    break_once(monkeypatch, ExecutorCore, "execute", after=1)
    completion = await several.client.complete(greedy(0, 3))
    assert completion.status == "done"
    await until(lambda: before != [stage.incarnation for stage in several.executors])
    await several.until_both_work()
