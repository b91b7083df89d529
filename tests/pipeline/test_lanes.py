"""Several pipelines on one requests stream: they share it, and take over from one another."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from nano_inference import BusClient, Config, Pipeline
from nano_inference.bus.weights import FolderWeights
from nano_inference.config import STAGES, BusError, LaneReplaced
from nano_inference.stages.fairness.parts.exchange import LEAD_INTERVALS, Exchange
from nano_inference.stages.fairness.stage import FairnessStage

from ..soaking import in_soak
from .builders import GOOD, LONG, Streams, begin, end_of, raises, stage_of, until
from .conftest import LIMIT_S, MakeConfig, config_maker

SHORT_MODEL = True
LEASE_S = 0.5


@pytest.fixture(params=["redis-links"])
def make_config(request: pytest.FixtureRequest) -> MakeConfig:
    """In memory there is one lane only. With links in memory nothing of this is different."""
    return config_maker(request)


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
