"""The router of several models, and clients of a deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from nano_inference import BusClient, Completion, Gateway, Pipeline
from nano_inference.bus.public import CompletionChunk, GenerateRequest
from nano_inference.config import STAGES, BusConfig, BusError, FairnessConfig, load_config
from nano_inference.kserve import KServeClient, text_tensor
from nano_inference.telemetry import Metrics, instruments, names

from .builders import LONG, end_of, error_code, raises, until
from .deployments import eventually, lane_of, model, own_prefix, put, routing, serving

# --- router ----------------------------------------------------------------------------------


in_module_loop = pytest.mark.asyncio(loop_scope="module")
GREEDY = {"prompt": "98 + 25 =", "sampling": {"temperature": 0, "max_tokens": 4}}


class Counted(Metrics):
    """Recorded values, by instrument and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def record(self, instrument: Any, value: float, labels: Any = ()) -> None:
        key = (instrument.name, tuple(sorted(dict(labels).items())))
        self.counts[key] = self.counts.get(key, 0) + value


@pytest.fixture
def bus_config(redis_url: str) -> BusConfig:
    return own_prefix(redis_url)


@pytest.fixture(scope="module")
def shared_bus(redis_url: str) -> BusConfig:
    return own_prefix(redis_url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(shared_bus: BusConfig) -> AsyncIterator[BusClient]:
    """A client of a deployment whose models serve: `a`, and `b`, which is the default."""
    specs = (model("a"), model("b", aliases=("bee",), default=True))
    async with serving(shared_bus, *specs) as client:
        yield client


@in_module_loop
async def test_each_request_is_answered_by_its_model(
    both: BusClient, shared_bus: BusConfig
) -> None:
    """By id, alias and default; raw clients name it beside the request; an unreadable request goes
    to the default model's admission."""
    asked = ["a", "b", "bee", "", "c"]
    requests = [both.complete({**GREEDY, "model": name}) for name in asked]
    *answers, refused = await asyncio.gather(*requests)
    assert [each.model for each in answers] == ["a", "b", "b", "b"]
    assert {each.status for each in answers} == {"done"}
    assert error_code(refused) == "unknown_model"
    async with Redis.from_url(shared_bus.url) as redis:

        async def told(**fields: Any) -> Completion:
            entry_id = (await redis.xadd(f"{shared_bus.prefix}:requests", fields)).decode()
            end = await end_of(both.follow(entry_id, entry_id))
            assert end.entry_id == entry_id
            return end

        raw = await told(json='{"prompt":"1","sampling":{"max_tokens":2}}', model="a")
        assert (raw.status, raw.model) == ("done", "a")
        assert error_code(await told(json="{")) == "malformed"


async def test_an_unknown_model_gets_one_answer_in_both_streams(bus_config: BusConfig) -> None:
    counted = Counted()
    async with routing(bus_config, counted) as client:
        await put(client, model("chat"))
        await put(client, model("off"), takes=False)
        ended = await client.bus.results.tail()
        for name, code, words in (
            ("caht", "unknown_model", "did you mean 'chat'"),
            ("off", "model_not_loaded", "it is unloaded; load it, or choose another"),
        ):
            answer = await client.complete({**GREEDY, "model": name, "request_id": name})
            assert (error_code(answer), answer.status) == (code, "error")
            assert words in answer.error.message
            told = await anext(ended)
            assert (told.request_id, told.entry_id) == (name, answer.entry_id)
            labels = {names.STATUS: "error", names.ERROR_TYPE: code}
            key = (instruments.REQUESTS.name, tuple(sorted(labels.items())))
            assert counted.counts[key] == 1
        last = Completion(request_id="z", entry_id="9-9", status="done")
        await client.bus.results.deliver([("z", [last])])
        assert (await anext(ended)).request_id == "z", "no answer came twice"
        await ended.aclose()


async def test_requests_on_their_way_are_counted_by_model(bus_config: BusConfig) -> None:
    counted = Counted()
    async with routing(bus_config, counted) as client:
        await put(client, model("a", aliases=("x",)), model("b"))
        lanes = {name: client.of_model(name) for name in "ab"}
        for lane in lanes.values():
            await lane.bus.requests.pending()
        for name in ("a", "x", "b"):
            await client.publish({**GREEDY, "model": name})
        taken = {"a": 0, "b": 0}
        for name, number in (("a", 2), ("b", 1)):
            while taken[name] < number:
                taken[name] += len(await lanes[name].bus.requests.take(1))
            await lanes[name].aclose()
        for name, number in (("a", 2), ("b", 1)):
            key = (instruments.MODEL_ROUTES.name, ((names.REQUEST_MODEL, name),))
            await until(lambda key=key, number=number: counted.counts.get(key) == number)


async def test_a_model_that_has_come_is_found_at_once(bus_config: BusConfig) -> None:
    """Cached records may be old, except for an unknown name."""
    async with routing(bus_config) as client:
        await put(client, model("a"))
        refused = await client.complete({**GREEDY, "model": "b"})
        assert error_code(refused) == "unknown_model"
        await put(client, model("b"))
        lane = client.of_model("b")
        await lane.bus.requests.pending()
        entry_id = await client.publish({**GREEDY, "model": "b"})
        (entry,) = await lane.bus.requests.take()
        assert entry.entry_id == entry_id
        await lane.aclose()


async def test_a_request_that_can_not_come_in_its_order_is_refused(bus_config: BusConfig) -> None:
    async with routing(bus_config) as client:
        await put(client, model("a"))
        async with Redis.from_url(bus_config.url) as redis:
            stream = f"{{{bus_config.prefix}:requests}}:of:a"
            await redis.xadd(stream, {"json": "{}"}, id=f"{2**43}-0")
        refused = await client.complete({**GREEDY, "model": "a"})
        assert error_code(refused) == "not_routed"
        assert "send it again" in refused.error.message


async def test_a_gateway_routes_requests(bus_config: BusConfig) -> None:
    """If no other process does."""
    settings = load_config(env={}, overrides={"gateway.grpc_port": 0})
    async with (
        BusClient.connect(bus_config) as client,
        Pipeline(lane_of(bus_config, model("a"))),
    ):
        await put(client, model("a", default=True))
        async with (
            Gateway(client, settings) as gateway,
            KServeClient(f"127.0.0.1:{gateway.grpc_port}") as over_grpc,
        ):
            answer = await client.complete(GREEDY)
            again = await over_grpc.infer("a", [text_tensor("text_input", "98 + 25 =")])
    assert (answer.status, answer.model) == ("done", "a")
    assert again.model_name == "a"


# --- cancel -----------------------------------------------------------------------------------


@in_module_loop
async def test_requests_of_any_model_are_cancelled(both: BusClient) -> None:
    """By its id alone, and by leaving its stream."""
    async with aclosing(both.submit({**LONG, "model": "a", "request_id": "r"})) as outputs:
        assert isinstance(await anext(outputs), CompletionChunk)
        await both.cancel("r")
        last = await end_of(outputs)
    assert (last.status, last.model) == ("cancelled", "a")
    async with aclosing(both.submit({**LONG, "model": "b", "request_id": "s"})) as outputs:
        await anext(outputs)
    assert (await end_of(both.follow("s"))).status == "cancelled"


# --- how it is --------------------------------------------------------------------------------


@in_module_loop
async def test_reports_cover_all_models(both: BusClient) -> None:
    async def all_told() -> bool:
        told = {(each.model, each.stage) for each in await both.deployment.reports()}
        return told == {(name, stage) for name in "ab" for stage in STAGES}

    await eventually(all_told)
    assert set(await both.deployment.fairness()) == {"a:0", "b:0"}
    async with both.of_model("b") as of_b:
        assert {each.model for each in await of_b.deployment.reports()} == {"b"}
        assert set(await of_b.deployment.fairness()) == {"b:0"}


async def test_one_model_that_serves_is_enough(bus_config: BusConfig) -> None:
    async with routing(bus_config) as client:
        await put(client, model("a"), takes=False)
        await put(client, model("b"))
        assert await client.deployment.trouble() == (
            "model a: it is unloaded; "
            "model b: no stage is running; start a pipeline with `nano-inference up`"
        )

        async def no_trouble() -> bool:
            return not await client.deployment.trouble()

        async with serving(bus_config, model("b")), client.of_model("a") as of_a:
            await eventually(no_trouble)
            assert "no stage is running" in await of_a.deployment.trouble()


# --- operations on one model -------------------------------------------------------------------


@in_module_loop
async def test_operations_need_a_model_among_several(both: BusClient) -> None:
    for attempt in (
        both.pause(),
        both.flush_cache(),
        both.weight_version(),
        both.update_fairness(FairnessConfig()),
        both.cancel_all(),
    ):
        with raises("model_required", "name one of them: a, b", kind=BusError):
            await attempt


@in_module_loop
async def test_a_model_is_paused_while_the_other_serves(both: BusClient) -> None:
    async with both.of_model("a") as of_a:
        await of_a.pause()
        waits = asyncio.create_task(both.complete({**GREEDY, "model": "a"}))
        for _ in range(3):
            assert (await both.complete({**GREEDY, "model": "b"})).status == "done"
        assert not waits.done()
        await of_a.resume()
        assert (await waits).model == "a"


@in_module_loop
async def test_scoring_uses_the_named_model(both: BusClient) -> None:
    asked = [both.score([[0, 5]], [[6]], like=GenerateRequest(model=each)) for each in "ab"]
    (first,), (second,) = await asyncio.gather(*asked)
    assert first.logprobs == second.logprobs, "the same model twice"
    assert len(first.logprobs) == 1


# --- apart ------------------------------------------------------------------------------------


async def test_limits_of_a_model_are_its_own(bus_config: BusConfig) -> None:
    few = model("few", settings={"admission.max_samples": 1, "engine.max_model_len": 32})
    async with serving(bus_config, few, model("many")) as client:
        for change in ({"n": 2}, {"prompt_token_ids": [5] * 40, "prompt": None}):
            refused = await client.complete({**GREEDY, **change, "model": "few"})
            assert refused.status == "error"
            assert (await client.complete({**GREEDY, **change, "model": "many"})).status == "done"


async def test_a_full_queue_affects_its_model_alone(bus_config: BusConfig) -> None:
    full = model("full", settings={"admission.max_in_flight": 1, "admission.max_queued": 1})
    async with (
        serving(bus_config, full, model("free")) as client,
        client.of_model("full") as of_full,
    ):
        await of_full.pause()
        waiting = [
            asyncio.create_task(client.complete({**GREEDY, "model": "full"})) for _ in range(8)
        ]
        await until(lambda: sum(each.done() for each in waiting) >= 5)
        codes = {each.result().error.code for each in waiting if each.done()}  # type: ignore[union-attr]
        assert codes == {"overloaded"}
        for _ in range(3):
            assert (await client.complete({**GREEDY, "model": "free"})).status == "done"
        await of_full.resume()
        await asyncio.gather(*waiting)


async def test_fairness_of_a_model_is_its_own(bus_config: BusConfig) -> None:
    aged = model("aged", settings={"fairness.aging_s": 8.0})
    async with serving(bus_config, aged, model("plain")) as client:

        async def aging_of_all(wanted: float) -> dict[str, FairnessConfig] | None:
            found = await client.deployment.fairness()
            is_told = len(found) == 2 and found["aged:0"].aging_s == wanted
            return found if is_told else None

        before = await eventually(lambda: aging_of_all(8.0))
        async with client.of_model("aged") as of_aged:
            await of_aged.update_fairness(FairnessConfig(aging_s=16.0))
        after = await eventually(lambda: aging_of_all(16.0))
        assert after["plain:0"] == before["plain:0"] != before["aged:0"]
