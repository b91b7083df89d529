"""Models that are loaded and unloaded while others serve; each lane a pipeline in this process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from nano_inference import BusClient, Completion, Config, Pipeline
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import BusConfig, BusError, ModelConfig, ModelError, load_config
from nano_inference.pipeline import managed_model, model_manager
from nano_inference.pipeline.model_manager import ModelManager
from nano_inference.pipeline.models import ModelStatus
from nano_inference.pipeline.supervisor import StageFailed
from nano_inference.store.board import StageBoard, StageReport
from nano_inference.store.loaded_adapter import LoadedAdapter
from nano_inference.store.records import MemoryRecords
from nano_inference.store.redis.keys import Keys
from nano_inference.store.registry import ModelRecord

from ..soaking import in_soak
from . import builders, short_model
from .builders import error_code, raises
from .deployments import LIMIT_S, eventually, model, own_prefix, routing

KV_BYTES = 1 << 24
LONG = 100


class Lane:
    """A model's lane, in this process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopping = asyncio.Event()
        self.stopped = asyncio.Event()

    @property
    def pids(self) -> Sequence[int]:
        return [os.getpid()]

    async def run(self) -> None:
        try:
            async with Pipeline(self.config):
                stopping = asyncio.create_task(self.stopping.wait())
                await asyncio.wait([stopping, self.failure], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if self.failure.done():
                    self.failure.result()
        finally:
            self.stopped.set()

    async def stop(self, *, drain: bool = False) -> None:
        self.stopping.set()
        await self.stopped.wait()


class Deployment:
    """A manager at work. `loads` counts the lanes that were begun, by model."""

    def __init__(self, bus: BusConfig, models: Sequence[ModelConfig], **settings: Any) -> None:
        self.bus = bus
        self.loads: Counter[str] = Counter()
        self.lanes: dict[str, Lane] = {}
        self.client: BusClient
        shared = load_config(
            env={},
            overrides={
                "bus.url": bus.url,
                "bus.prefix": bus.prefix,
                "engine.dtype": "float32",
                "engine.kv_cache_bytes": KV_BYTES,
                **{f"deployment.{name}": value for name, value in settings.items()},
            },
        )
        self.config = Config(
            engine=shared.engine, bus=shared.bus, deployment=shared.deployment, models=tuple(models)
        )

    def begin(self, spec: ModelConfig, config: Config) -> Lane:
        self.loads[spec.id] += 1
        self.lanes[spec.id] = Lane(config)
        return self.lanes[spec.id]

    async def state(self, name: str) -> ModelStatus:
        return {each.id: each for each in await self.client.models()}[name]

    async def until(self, name: str, state: str) -> ModelStatus:
        async def there() -> ModelStatus | None:
            status = await self.state(name)
            return status if status.state == state else None

        found: ModelStatus = await eventually(there)
        return found

    async def until_taken(self, name: str, number: int) -> None:
        """Until a model's lane has taken so many requests, and no other waits."""

        async def taken() -> bool:
            status = await self.state(name)
            return (status.waiting, status.in_flight) == (0, number)

        await eventually(taken)

    async def ask(self, name: str, **more: Any) -> Completion:
        async with asyncio.timeout(LIMIT_S):
            return await self.client.complete(asking(name, **more))


def asking(name: str, tokens: int = 3) -> dict[str, Any]:
    return builders.asking(tokens=tokens, model=name)


@asynccontextmanager
async def managing(
    bus: BusConfig, *models: ModelConfig, ready: bool = True, **settings: Any
) -> AsyncIterator[Deployment]:
    """A deployment; with `ready`, whose models have been loaded that are to be from the start."""
    deployment = Deployment(bus, models, **settings)
    async with routing(bus) as client, BusClient.connect(bus) as own:
        deployment.client = client
        manager = ModelManager(deployment.config, own.bus, deployment.begin)
        task = asyncio.create_task(manager.run_forever())
        try:

            async def settled() -> bool:
                found = {each.id: each.state for each in await client.models()}
                wanted = [each.id for each in models if each.preload]
                done = all(found.get(each) in ("ready", "failed") for each in wanted)
                reports = await client.bus.store.board.read()
                return done and set(found) == {each.id for each in models} and bool(reports)

            if ready:
                await eventually(settled)
            yield deployment
        finally:
            await manager.stop()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_an_unload_loses_no_request(redis_url: str) -> None:
    async with managing(own_prefix(redis_url), model("a"), model("b")) as deployment:
        client, of_a = deployment.client, deployment.client.of_model("a")
        await of_a.pause()
        asked = [asyncio.create_task(deployment.ask("a", tokens=LONG)) for _ in range(6)]

        await deployment.until_taken("a", 6)
        unloading = asyncio.create_task(client.unload_model("a"))
        await deployment.until("a", "draining")
        await of_a.resume()
        refused = await deployment.ask("a")
        assert error_code(refused) == "model_not_loaded"
        assert (await deployment.ask("b")).status == "done"
        answers = await asyncio.gather(*asked)
        assert [(each.status, len(each.samples[0].token_ids)) for each in answers] == [
            ("done", LONG)
        ] * 6
        assert (await unloading).state == "unloaded"
        assert deployment.lanes["a"].stopped.is_set()
        # By any of its names, and once more as it was.
        assert (await client.load_model("a")).ready_lanes == ("0",)
        assert (await deployment.ask("a")).status == "done"
        assert deployment.loads == {"a": 2, "b": 1}


async def test_concurrent_loads_of_a_model_are_one(redis_url: str) -> None:
    """Requests for it wait meanwhile."""
    async with managing(own_prefix(redis_url), model("a", preload=False), model("b")) as deployment:
        loads = [asyncio.create_task(deployment.client.load_model("a")) for _ in range(4)]
        await deployment.until("a", "loading")
        answer = asyncio.create_task(deployment.ask("a"))
        unload = asyncio.create_task(deployment.client.unload_model("a"))
        assert {each.id for each in await asyncio.gather(*loads)} == {"a"}
        assert deployment.loads["a"] == 1
        assert (await answer).status == "done"
        # One that came during the load comes after it, and so does a load during an unload.
        assert (await unload).state == "unloaded"
        status = await deployment.client.load_model("a")
        assert (status.state, status.is_moe, status.parameters > 0) == ("ready", False, True)
        assert "generate" in status.capabilities
        assert deployment.loads["a"] == 2
        assert (await deployment.client.load_model("a")).since_ns == status.since_ns


async def test_a_failed_load_changes_nothing(redis_url: str) -> None:
    broken = ModelConfig(id="broken", path="/nowhere/at-all", preload=False)
    async with managing(own_prefix(redis_url), model("a", aliases=("x",)), broken) as deployment:
        client = deployment.client

        async def code(wish: str | ModelConfig) -> str:
            with pytest.raises(ModelError) as refused:
                await client.load_model(wish)
            return refused.value.code

        assert await code("broken") == "model_load_failed"
        status = await deployment.state("broken")
        assert status.state == "failed"
        assert "/nowhere/at-all" in status.reason
        assert await code("never-heard-of") == "unknown_model"
        assert await code(ModelConfig(id="new", path="/nowhere/either")) == "model_load_failed"
        assert await code(model("x")) == "model_exists"
        assert await code(model("a", revision="1", replicas=2)) == "model_exists"
        assert [each.id for each in await client.models()] == ["a", "broken"]
        # One that can be is there from then on, until it is removed.
        assert (await client.load_model(model("new", aliases=("y",)))).state == "ready"
        assert (await deployment.ask("y")).model == "new"
        assert (await client.unload_model("new", remove=True)).state == "unloaded"
        assert [each.id for each in await client.models()] == ["a", "broken"]
        gone = await deployment.ask("new")
        assert gone.error is not None
        # What the router has read of the models counts for a second.
        assert gone.error.code in ("unknown_model", "model_not_loaded")
        assert (await deployment.ask("a")).status == "done"


async def test_an_unreadable_path_ends_no_other_model(redis_url: str) -> None:
    async with managing(own_prefix(redis_url), model("a")) as deployment:
        with raises("model_load_failed", kind=ModelError):
            await deployment.client.load_model(ModelConfig(id="odd", path="~nobody-at-all/model"))
        assert (await deployment.ask("a")).status == "done"


async def test_a_load_that_breaks_ends_no_other_model(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(config: Config) -> int:
        raise RuntimeError("nobody has thought of this")

    models = (model("a"), model("b", preload=False))
    async with managing(own_prefix(redis_url), *models, max_memory_bytes=1 << 40) as deployment:
        monkeypatch.setattr(model_manager, "expected_memory", breaks)
        with pytest.raises(ModelError, match="nobody has thought of this"):
            await deployment.client.load_model("b")
        assert (await deployment.ask("a")).status == "done"
        assert (await deployment.state("b")).state == "failed"


async def test_a_delayed_record_overwrites_no_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    away = asyncio.Event()

    class Registry:
        refuses = False

        async def put(self, record: ModelRecord) -> None:
            if self.refuses:
                self.refuses = False
                away.set()
                raise BusError("it is away", code="unreachable")
            written.append(record.state)

    registry = Registry()
    bus: Any = SimpleNamespace(store=SimpleNamespace(models=registry), of_model=lambda name: None)
    monkeypatch.setattr(managed_model, "_RETRY_S", 0.01)
    monkeypatch.setattr(managed_model, "memory_of", lambda pids: 7)
    spec = model("a")
    managed = managed_model.ManagedModel(Config(), spec, bus, lambda: Lane(Config()), print)
    await managed.put("ready", takes_requests=True)
    registry.refuses = True
    measuring = asyncio.create_task(managed.measure())
    await away.wait()
    await managed.put("draining", takes_requests=False)
    await measuring
    assert written[-1] == "draining"


async def test_a_record_keeps_adapters_while_admission_is_started_anew() -> None:
    """Its successor knows none at first, and the router refuses names that no record has."""

    async def put(record: ModelRecord) -> None:
        pass

    async def adapters_with(*reports: StageReport) -> tuple[str, ...]:
        bus.store.board = StageBoard(Keys("n"), MemoryRecords())
        await bus.store.board.report(reports)
        await managed.update_adapters()
        return managed.record.adapters

    bus: Any = SimpleNamespace(store=SimpleNamespace(models=SimpleNamespace(put=put)))
    bus.of_model = lambda name: bus
    managed = managed_model.ManagedModel(Config(), model("a"), bus, lambda: Lane(Config()), print)
    await managed.put("ready", takes_requests=True)
    of: Any = {"lane": "0", "stage": "admission", "host": "here", "pid": 1, "epoch": 1}
    knows = StageReport(**of, incarnation="1", state="ready", adapters=(LoadedAdapter("lora", 1),))
    assert await adapters_with(knows) == ("lora",)
    assert await adapters_with(StageReport(**of, incarnation="2", state="waiting")) == ("lora",)
    assert await adapters_with() == ("lora",)
    assert await adapters_with(StageReport(**of, incarnation="2", state="ready")) == ()


async def test_a_lane_that_can_not_go_on_ends_its_requests(redis_url: str) -> None:
    """With the reason, and no other model's."""
    async with managing(own_prefix(redis_url), model("a"), model("b")) as deployment:
        async with BusClient.connect(deployment.bus) as connected:
            of_a = connected.of_model("a")
            await of_a.pause()
            asked = [asyncio.create_task(deployment.ask("a")) for _ in range(3)]

            await deployment.until_taken("a", 3)
            deployment.lanes["a"].failure.set_exception(StageFailed("it failed too often"))
            for answer in await asyncio.gather(*asked):
                assert error_code(answer) == "model_failed"
                assert "it failed too often" in answer.error.message
            status = await deployment.until("a", "failed")
            assert status.reason == "it failed too often"

            await deployment.until_taken("a", 0)
            with raises("model_not_loaded", kind=BusError):
                await of_a.publish(asking("a"))
            await of_a.aclose()
        assert (await deployment.ask("b")).status == "done"
        assert (await deployment.client.load_model("a")).state == "ready"
        assert (await deployment.ask("a")).status == "done"


@pytest.mark.parametrize("on_demand", [False, in_soak(True)])
async def test_an_unload_can_have_a_time_limit(redis_url: str, on_demand: bool) -> None:
    """Requests in flight end with an error then. A later call may set a shorter limit."""
    async with managing(own_prefix(redis_url), model("a"), load_on_demand=on_demand) as deployment:
        of_a = deployment.client.of_model("a")
        await of_a.pause()
        asked = [asyncio.create_task(deployment.ask("a")) for _ in range(2)]

        await deployment.until_taken("a", 2)
        endless = asyncio.create_task(deployment.client.unload_model("a"))
        await deployment.until("a", "draining")
        assert (await deployment.client.unload_model("a", timeout_s=0)).state == "unloaded"
        assert (await endless).state == "unloaded"
        for answer in await asyncio.gather(*asked):
            assert error_code(answer) == "shutting_down"
        await of_a.aclose()
        assert deployment.loads == {"a": 1}
        answer = await deployment.ask("a")
        assert (answer.status, deployment.loads["a"]) == (
            ("done", 2) if on_demand else ("error", 1)
        )


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> int:
    """Processes take nothing here, so that a model takes what weights and KV do; the budget has
    room for two of them and no third."""
    monkeypatch.setattr(managed_model, "PROCESSES_BYTES", 0)
    monkeypatch.setattr(managed_model, "memory_of", lambda pids: 0)
    return int(2.5 * KV_BYTES)


async def test_the_least_recently_used_go_first(redis_url: str, small_machine: int) -> None:
    models = (model("a"), model("b"), model("c", preload=False))
    async with managing(
        own_prefix(redis_url), *models, max_memory_bytes=small_machine
    ) as deployment:
        client = deployment.client
        assert (await deployment.ask("b")).status == "done"
        assert (await deployment.ask("a")).status == "done"
        assert (await client.load_model("c")).state == "ready"
        assert (await deployment.state("b")).state == "unloaded"
        # A failed load evicts no model for good.
        with pytest.raises(ModelError):
            await client.load_model(ModelConfig(id="broken", path="/nowhere/at-all"))
        await deployment.until("a", "ready")
        await deployment.until("c", "ready")
        # It is too large even alone, so no model is evicted.
        huge = model("huge", settings={"engine.kv_cache_bytes": 4 * KV_BYTES})
        loads = deployment.loads.copy()
        with raises("out_of_memory_budget", kind=ModelError):
            await client.load_model(huge)
        assert deployment.loads == loads
        assert [each.id for each in await client.models() if each.state == "ready"] == ["a", "c"]


async def test_pinned_models_are_not_evicted(redis_url: str, small_machine: int) -> None:
    models = (model("a", pinned=True), model("b", pinned=True), model("c", preload=False))
    async with managing(
        own_prefix(redis_url), *models, max_memory_bytes=small_machine
    ) as deployment:
        with raises("out_of_memory_budget", kind=ModelError):
            await deployment.client.load_model("c")
        assert (await deployment.state("c")).state == "unloaded"
        assert deployment.loads == {"a": 1, "b": 1}


async def test_models_are_loaded_on_demand(redis_url: str, small_machine: int) -> None:
    """Three take turns where there is room for two, and no request is refused or lost."""
    models = [model(name, preload=False) for name in "abc"]
    async with managing(
        own_prefix(redis_url), *models, max_memory_bytes=small_machine, load_on_demand=True
    ) as deployment:
        for names in ("a", "ab", "abc", "cab"):
            answers = await asyncio.gather(*(deployment.ask(name, tokens=20) for name in names))
            assert [each.status for each in answers] == ["done"] * len(names)
            assert [each.model for each in answers] == list(names)
        ready = [each.id for each in await deployment.client.models() if each.state == "ready"]
        assert len(ready) <= 2


async def test_an_idle_model_is_unloaded_until_a_request_comes(redis_url: str) -> None:
    models = (model("a"), model("pinned", pinned=True), model("updated"))
    async with managing(
        own_prefix(redis_url), *models, load_on_demand=True, idle_unload_s=1.5
    ) as deployment:
        updated = deployment.client.of_model("updated")
        await updated.update_weights(FolderWeights(str(short_model.folder())))
        await updated.aclose()
        await deployment.until("a", "unloaded")
        assert (await deployment.ask("a")).status == "done"
        assert deployment.loads["a"] == 2
        await deployment.until("a", "unloaded")
        # Loading it would bring back older weights.
        assert (await deployment.state("updated")).state == "ready"
        assert deployment.loads == {"a": 2, "pinned": 1, "updated": 1}


async def test_records_of_a_former_manager_are_replaced(redis_url: str) -> None:
    bus = own_prefix(redis_url)
    async with BusClient.connect(bus) as client:
        for spec in (model("a"), model("gone"), model("b", preload=False)):
            record = ModelRecord(spec=spec, state="ready", takes_requests=True, memory_bytes=7)
            await client.bus.store.models.put(record)
        published = {}
        for name in ("a", "gone", "b"):
            of_model = client.of_model(name)
            published[name] = await of_model.publish(asking(name))
            await of_model.aclose()

        async def answer(name: str) -> Completion:
            async for output in client.follow(published[name], published[name]):
                if isinstance(output, Completion):
                    return output
            raise AssertionError

        async with managing(bus, model("a"), model("b", preload=False)) as deployment:

            async def is_right() -> bool:
                # For a moment "a" is ready as it was in that life.
                states = {
                    each.id: (each.state, each.memory_bytes > 7)
                    for each in await deployment.client.models()
                }
                return states == {"a": ("ready", True), "b": ("unloaded", False)}

            await eventually(is_right)
            assert (await answer("a")).status == "done"
            for name, code in (("gone", "unknown_model"), ("b", "model_not_loaded")):
                error = (await answer(name)).error
                assert error is not None
                assert error.code == code
        # And who comes later finds that nothing runs.
        assert {each.state for each in await client.models()} == {"unloaded"}
        with raises("no_model_manager", kind=BusError):
            await client.load_model("a")


def test_a_models_memory_is_estimated_from_its_folder(tmp_path: Path) -> None:
    folder = short_model.folder()
    in_float32 = managed_model.weight_bytes(folder, "float32")
    parameters = sum(each.numel() for each in load_file(folder / "model.safetensors").values())
    assert in_float32 == 4 * parameters == 2 * managed_model.weight_bytes(folder, "bfloat16")
    stored = (folder / "model.safetensors").stat().st_size
    assert managed_model.weight_bytes(folder, "auto") == stored
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 99)
    assert managed_model.weight_bytes(tmp_path, "float32") == 99
    assert managed_model.weight_bytes(tmp_path / "none", "float32") == 0
    config = load_config(
        env={}, overrides={"engine.model_path": str(folder), "pipeline.replicas": 2}
    )
    replica = stored + config.engine.kv_cache_bytes
    assert managed_model.expected_memory(config) == managed_model.PROCESSES_BYTES + 2 * replica
    drafted = load_config(
        env={},
        overrides={
            "engine.model_path": str(folder),
            "engine.draft_model_path": str(folder),
            "engine.speculation": "auto",
        },
    )
    wanted = managed_model.PROCESSES_BYTES + replica + stored
    assert managed_model.expected_memory(drafted) == wanted
    assert managed_model.memory_of([os.getpid()]) > 1 << 20 or sys.platform != "linux"
    assert managed_model.memory_of([]) == 0


async def test_a_single_model_is_listed() -> None:
    async with Pipeline(load_config(env={}, overrides={"engine.model_aliases": ["x"]})) as lane:
        await lane.bus.store.board.report(lane.stages())
        (status,) = await lane.client.models()
        assert (status.id, status.aliases, status.state) == ("tiny", ("x",), "ready")
        assert (status.ready_lanes, status.replicas, status.default) == (("0",), 1, True)
        assert status.max_model_len > 0 < status.vocab_size
        with raises("no_model_manager", kind=BusError):
            await lane.client.load_model("tiny")
