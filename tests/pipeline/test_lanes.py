"""Several pipelines on one requests stream: they share it, and take over from one another."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import msgspec
import pytest
from redis.asyncio import Redis

from nano_inference import BusClient, Config, Pipeline
from nano_inference.bus.control import Pause, Resume
from nano_inference.bus.links import CONTROL
from nano_inference.bus.redis import leases
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import STAGES, BusError, LaneReplaced
from nano_inference.stages.fairness.parts.exchange import LEAD_INTERVALS, Exchange
from nano_inference.stages.fairness.stage import FairnessStage

from .. import kit
from ..commands import Command
from ..rig import load
from ..soaking import in_soak
from .builders import GOOD, LONG, Streams, begin, end_of, kill, raises, stage_of, until
from .conftest import LIMIT_S, MakeConfig, config_maker

SHORT_MODEL = True
LEASE_S = 0.5


@pytest.fixture(params=["redis-links"])
def make_config(request: pytest.FixtureRequest) -> MakeConfig:
    """In memory there is one lane only. With links in memory nothing of this is different."""
    return config_maker(request)


# For what rests on several keys, which a cluster keeps apart. That each operation of a bus does
# there what it does on one server is shown by tests/bus/.
in_cluster = pytest.mark.parametrize("make_config", ["cluster"], indirect=True)


@pytest.fixture
def redis_config(request: pytest.FixtureRequest, redis_url: str) -> MakeConfig:
    request.param = "redis"
    return config_maker(request)


def lane_config(make_config: MakeConfig, lane: str, **settings: object) -> Config:
    return make_config(**{"bus__lane": lane, "admission__lease_s": LEASE_S, **settings})


def side_by_side(make_config: MakeConfig, **settings: object) -> list[Config]:
    """Two lanes, neither of which takes over from the other while a test lasts."""
    settings["admission__lease_s"] = 10.0 * LIMIT_S
    return [lane_config(make_config, lane, **settings) for lane in "ab"]


def in_flight(pipeline: Pipeline) -> int:
    return int(pipeline._actors["admission"].load()["in_flight"])


def is_ready(pipeline: Pipeline) -> bool:
    """Whether its admission lets requests in."""
    return pipeline._actors["admission"].condition()[0] == "ready"


# --- side by side -----------------------------------------------------------------------------


@pytest.mark.parametrize("make_config", ["redis-links", in_soak("cluster")], indirect=True)
async def test_control_messages_reach_every_lane(make_config: MakeConfig) -> None:
    configs = side_by_side(make_config, admission__max_in_flight=1)
    async with (
        Pipeline(configs[0]) as first,
        Pipeline(configs[1]) as second,
        BusClient.connect(configs[0].bus) as client,
    ):
        streams = [client.submit({**LONG, "request_id": f"r{i}"}) for i in range(2)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        assert (in_flight(first), in_flight(second)) == (1, 1)
        for i in range(2):
            await client.cancel(f"r{i}")
        for stream in streams:
            last = await end_of(stream)
            assert last.status == "cancelled"
        await client.pause()
        waiting = [asyncio.create_task(client.complete(GOOD)) for _ in range(2)]
        done, _ = await asyncio.wait(waiting, timeout=0.3)
        assert not done
        await client.flush_cache()
        await client.resume()
        assert [(await task).status for task in waiting] == ["done"] * 2


async def test_an_operation_applies_to_one_lane(redis_config: MakeConfig) -> None:
    configs = side_by_side(redis_config, admission__max_in_flight=1)
    weights = FolderWeights(str(configs[0].engine.model_folder))
    async with (
        Pipeline(configs[0]),
        Pipeline(configs[1]) as second,
        BusClient.connect(configs[0].bus) as client,
    ):
        assert await client.update_weights(weights, lane="a") == 1
        versions = [await client.weight_version(lane=lane) for lane in ("a", "b", None)]
        assert versions == [1, 0, 0]
        await client.pause(lane="b")
        answers = [asyncio.create_task(client.complete(GOOD)) for _ in range(4)]
        # The other lane answers all but the one that this lane has taken.
        await until(lambda: sum(each.done() for each in answers) == 3 and in_flight(second) == 1)
        await client.flush_cache(lane="a")
        await client.resume(lane="b")
        made_by = [each.samples[0].weight_version for each in await asyncio.gather(*answers)]
        assert sorted(made_by) == [0, 1, 1, 1]
        operations = (client.pause, client.resume, client.flush_cache, client.cancel_all)
        for operation in (*operations, client.weight_version, client.release_memory):
            with raises("unknown_lane", "no lane 'c' lives here", kind=BusError):
                await operation(lane="c")


async def has_settled(client: BusClient) -> bool:
    return not (await client.shards()).moving


async def test_shards_change_under_load(redis_config: MakeConfig, redis_url: str) -> None:
    """Two lanes serve `BusClient` and a plain program; nothing is lost, doubled or reordered."""
    configs = side_by_side(redis_config)
    names = [f"t{i}" for i in range(6)]
    async with (
        Redis.from_url(redis_url, decode_responses=True) as plain,
        Pipeline(configs[0]),
        Pipeline(configs[1]),
        BusClient.connect(configs[0].bus) as client,
    ):
        prefix, ends, counts = configs[0].bus.prefix, False, dict.fromkeys(names, 0)
        results = await client.bus.results.tail()

        async def publish(tenant: str) -> None:
            while not ends or counts[tenant] % 2:
                request = {**GOOD, "tenant": tenant, "request_id": f"{tenant}-{counts[tenant]}"}
                await client.publish(request)
                request["request_id"] += "-plain"
                await plain.xadd(f"{prefix}:requests", {"json": json.dumps(request)})
                counts[tenant] += 1
                await anyio.sleep(0.02)

        publishing = [asyncio.create_task(publish(name)) for name in names]
        for shards in (4, 2):
            await client.set_shards(shards)
            await until(lambda: min(counts.values()) > 0)
            await kit.eventually(lambda: has_settled(client), "the change ends")
        ends = True
        await asyncio.gather(*publishing)
        ended = [await anext(results) for _ in range(2 * sum(counts.values()))]
        assert {each.status for each in ended} == {"done"}
        ids = [each.request_id for each in ended]
        wanted = {f"{name}-{i}" for name in names for i in range(counts[name])}
        assert sorted(ids) == sorted([*wanted, *(f"{each}-plain" for each in wanted)])
        assert {each.entry_id.count("-") for each in ended} == {1, 2}, "of shards, too"
        backlog = await client.backlog()
        assert (backlog.waiting, backlog.dead) == (0, 0)


@pytest.mark.soak
async def test_shares_hold_over_all_lanes(redis_config: MakeConfig, soak: bool) -> None:
    """One tenant waits in one lane, the other in both; the bound is that of docs/fairness.md."""
    few, length, prompt, most = 2, 12, 10, 80 if soak else 24
    configs = side_by_side(
        redis_config,
        engine__max_batch_size=few,
        admission__max_in_flight=most,
        fairness__exchange_interval_s=0.05,
        fairness__tenant_timeslice_tokens=0,
    )
    tokens: Counter[str] = Counter()
    sampling = {"max_tokens": length, "ignore_eos": True, "temperature": 0}
    async with AsyncExitStack() as stack, BusClient.connect(configs[0].bus) as client:
        first = await stack.enter_async_context(Pipeline(configs[0]))
        await client.pause()  # until all are in the first lane's queue
        waiting: set[asyncio.Task[None]] = set()

        async def ask(tenant: str) -> None:
            answer = await client.complete({**GOOD, "tenant": tenant, "sampling": sampling})
            assert answer.status == "done"
            tokens[tenant] += 2 * length + prompt

        def begin_all(tenant: str, number: int) -> None:
            waiting.update(asyncio.create_task(ask(tenant)) for _ in range(number))

        begin_all("one", most // 2)
        begin_all("both", most // 2)
        await until(lambda: in_flight(first) == most)
        second = await stack.enter_async_context(Pipeline(configs[1]))
        await client.pause(lane="b")
        begin_all("both", 2 * most)
        await until(lambda: in_flight(second) == most)
        await client.resume()
        cores = [stage_of(each, FairnessStage)._core for each in (first, second)]
        await until(lambda: tokens["one"] >= most // 3 * (2 * length + prompt))
        unit = prompt + 2 * 2 * few * length
        own = [core.part(Exchange) for core in cores]
        lead = max(each.lead for each in own)
        ahead = tokens["both"] - tokens["one"]
        assert abs(ahead) <= 2 * unit + lead * (1 + 2 / LEAD_INTERVALS)
        await until(lambda: all(each.elsewhere > 0 for each in own))
        shown = await client.tenant_service()
        assert [table.lane for table in shown] == ["a", "b"]
        assert {name for _, name, _ in shown[1].served} == {"both"}
        await client.cancel_all()
        await asyncio.wait(waiting)


# --- taking over ------------------------------------------------------------------------------


@pytest.mark.soak
@in_cluster
async def test_the_requests_of_dead_lanes_go_on_in_other_lanes(
    make_config: MakeConfig, soak: bool
) -> None:
    """A lane dies while it has the requests; in `make soak` each of three in turn."""
    running = await begin(Pipeline(lane_config(make_config, "a")))
    async with BusClient.connect(running.config.bus) as client:
        streams = Streams(client)
        await streams.begin()
        for lane in "bca" if soak else "b":
            successor = await begin(Pipeline(lane_config(make_config, lane)))
            await kill(running)
            running = successor
            await until(lambda pipeline=running: in_flight(pipeline))  # type: ignore[misc]
        await streams.finish()
        assert (await client.complete(GOOD)).status == "done"
        await until(lambda: not in_flight(running))
        assert not await client.bus.requests.dead_letters()
        await kill(running)


class LaneProcess:
    """A pipeline as a process of its own, the first of two lanes."""

    def __init__(self, configs: Sequence[Config], log: Path) -> None:
        self.configs = configs
        self.log = log
        log.touch()  # it may be read before the process has written to it
        config = configs[0]
        command = ["run", "--bus", config.bus.url]
        settings = {
            "bus.prefix": config.bus.prefix,
            "bus.lane": config.bus.lane,
            "bus.links": config.bus.links,
            "admission.lease_s": config.admission.lease_s,
            "engine.dtype": config.engine.dtype,
            "engine.model_path": config.engine.model_path,
            # So that eight streams last a while.
            "engine.max_batch_size": 2,
        }
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        self.process = Command(*command, log=log)

    def times_told(self, event: str) -> int:
        """How often its log has this."""
        return self.log.read_text().count(event)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.go_on()
        self.process.kill()


@pytest.fixture(scope="module")
def lane_process(
    request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LaneProcess]:
    """One for all tests, each of which leaves it as it was."""
    request.param = "redis"
    make_config = config_maker(request)
    configs = [lane_config(make_config, lane) for lane in "ab"]
    running = LaneProcess(configs, tmp_path_factory.mktemp("lane") / "log")
    yield running
    running.kill()


@pytest.mark.soak(only=True)
async def test_a_lane_cut_off_in_one_direction_damages_no_stream(redis_config: MakeConfig) -> None:
    """Its writes reach Redis and it hears of nothing, or it hears and its writes come much later.
    Meanwhile another lane takes over, and the one that was cut off returns."""
    configs = [lane_config(redis_config, lane) for lane in "ab"]
    proxy = load("chaos_rig").Proxy(urlsplit(configs[0].bus.url).port)
    await proxy.start()
    behind = msgspec.structs.replace(configs[0].bus, url=proxy.url)
    lanes = AsyncExitStack()
    async with asyncio.timeout(LIMIT_S), BusClient.connect(configs[1].bus) as client, lanes:
        lanes.push_async_callback(proxy.aclose)
        cut_off = await begin(Pipeline(msgspec.structs.replace(configs[0], bus=behind)))
        lanes.push_async_callback(kill, cut_off)
        for direction, flow in proxy.flows.items():
            await until(lambda: is_ready(cut_off))
            streams = Streams(client)
            await streams.begin(1)
            held = in_flight(cut_off)
            flow.clear()
            async with Pipeline(configs[1]):
                await streams.finish()
                flow.set()
                while await client.bus.lanes() != ["a", "b"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert not await client.bus.requests.dead_letters()
            assert held, f"nothing was in flight when {direction} stopped"
            assert (await client.complete(GOOD)).status == "done", "by the lane that is back"


@asynccontextmanager
async def raw(config: Config) -> AsyncIterator[Redis]:
    async with Redis.from_url(config.bus.url, protocol=2, decode_responses=True) as client:
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", ["while it runs", in_soak("when it is done")])
async def test_a_lane_that_was_stopped_writes_nothing_later(
    lane_process: LaneProcess, comes_back: str
) -> None:
    configs = lane_process.configs
    prefix = configs[0].bus.prefix
    results, gone = f"{prefix}:results", "requests_gone_to_another_lane"
    async with (
        asyncio.timeout(LIMIT_S),
        raw(configs[0]) as redis,
        BusClient.connect(configs[0].bus) as client,
    ):
        begun = await redis.xlen(results)
        told = lane_process.times_told(gone)
        streams = Streams(client)
        await streams.begin(1)
        lane_process.pause()
        held = (await redis.xpending(f"{prefix}:requests", "admission"))["pending"]
        assert held, "it was paused while it had something to do"
        async with Pipeline(configs[1]) as other:
            control = other.bus.sender(CONTROL["batching"], "client-1")
            await control.send(Pause())
            await until(lambda: in_flight(other) and is_ready(other))
            if comes_back == "while it runs":
                lane_process.go_on()
                await until(lambda: lane_process.times_told(gone) > told)
            await control.send(Resume())
            await streams.finish()
            before = await written(redis, prefix)
            lane_process.go_on()
            while await client.bus.lanes() != ["a", "b"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # The lane serves again.
        assert (await client.complete(GOOD)).status == "done"
        after = await written(redis, prefix)
        assert {key: after[key] for key in before} == before
        # Terminal messages reach this stream right after their own.
        while await redis.xlen(results) < begun + 9:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        entries = await redis.xrange(results)
        ended = [json.loads(fields["json"])["entry_id"] for _, fields in entries]
        assert len(ended) == len(set(ended)) == begun + 9


async def written(redis: Redis, prefix: str) -> dict[str, object]:
    """Every output stream, whole."""
    keys = sorted([key async for key in redis.scan_iter(f"{prefix}:out:*")])
    return {key: await redis.xrange(key) for key in keys}


# --- the same lane twice ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "stages",
    [STAGES, in_soak(STAGES[:1]), ("executor",)],
    ids=["pipeline", "admission", "executor"],
)
async def test_a_second_of_the_same_lane_replaces_the_first(
    redis_config: MakeConfig, stages: tuple[str, ...]
) -> None:
    config = lane_config(redis_config, "a", pipeline__stages=list(stages))
    rest = [stage for stage in STAGES if stage not in stages]
    async with BusClient.connect(config.bus) as client, AsyncExitStack() as others:
        if rest:
            back = lane_config(redis_config, "a", pipeline__stages=rest)
            await others.enter_async_context(Pipeline(back))
        older = await begin(Pipeline(config))
        streams = Streams(client)
        await streams.begin()
        async with Pipeline(config):
            with pytest.raises(LaneReplaced, match=r"bus\.lane"):
                await older.failed()
            with pytest.raises(LaneReplaced):
                await older.__aexit__(None, None, None)
            await streams.finish()
            assert (await client.complete(GOOD)).status == "done"


# --- how many wait --------------------------------------------------------------------------------


async def test_queue_length_includes_a_dead_lane_s_requests(
    redis_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits unread on the stream: a lane takes far more than it can run."""
    monkeypatch.setattr(leases, "REPORT_LIFETIME_MS", 2000)
    few = {"engine__max_batch_size": 2, "admission__lease_s": 1000.0}
    configs = [redis_config(bus__lane=lane, **few) for lane in "ab"]

    async def holds(waiting: int) -> None:
        while (await client.bus.requests.backlog()).queue_length != waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async with BusClient.connect(configs[0].bus) as client:
        first = await begin(Pipeline(configs[0]))
        for _ in range(6):
            await client.publish({**LONG, "stream": False})
        await until(lambda: in_flight(first) == 6 and first._actors["streaming"].begun() == 2)
        await client.pause()  # or some might end
        await holds(4)
        async with Pipeline(configs[1]):
            await holds(4)
            await kill(first)
            await holds(6)
