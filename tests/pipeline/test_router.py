"""The router of several models, and clients of a deployment."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference import BusClient, Completion
from nano_inference.bus.public import CompletionChunk, GenerateRequest
from nano_inference.config import STAGES, BusConfig, BusError, FairnessConfig
from nano_inference.pipeline.router import Router
from nano_inference.telemetry import Metrics, instruments, names

from .builders import LONG, end_of, error_code, raises, until
from .deployments import eventually, model, own_prefix, put, routing, serving

# --- router ----------------------------------------------------------------------------------


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


async def test_each_request_is_answered_by_its_model(bus_config: BusConfig) -> None:
    """By id, alias and default; an unreadable request goes to the default model's admission."""
    specs = (model("a"), model("b", aliases=("bee",), default=True))
    async with serving(bus_config, *specs) as client:
        asked = ["a", "b", "bee", "", "c"]
        requests = [client.complete({**GREEDY, "model": name}) for name in asked]
        *answers, refused = await asyncio.gather(*requests)
        assert [each.model for each in answers] == ["a", "b", "b", "b"]
        assert {each.status for each in answers} == {"done"}
        assert error_code(refused) == "unknown_model"
        async with Redis.from_url(bus_config.url) as redis:
            entry_id = await redis.xadd(f"{bus_config.prefix}:requests", {"json": "{"})
        told = await end_of(client.follow("", entry_id.decode()))
        assert (error_code(told), told.entry_id) == ("malformed", entry_id.decode())


async def test_a_raw_client_names_the_model_beside_its_request(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        async with Redis.from_url(bus_config.url) as redis:
            fields = {"json": '{"prompt":"1","sampling":{"max_tokens":2}}', "model": "b"}
            entry_id = (await redis.xadd(f"{bus_config.prefix}:requests", fields)).decode()
        last = await end_of(client.follow(entry_id, entry_id))
        assert (last.status, last.model) == ("done", "b")


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


async def test_while_the_server_is_away_a_router_waits(
    bus_config: BusConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.pipeline.router._RETRY_S", 0.01)
    async with BusClient.connect(bus_config) as client:
        router = Router(client.bus)
        failures = iter([BusError("away"), BusError("away")])
        real, seen = router.route_once, asyncio.Event()

        async def route_once() -> None:
            if (failure := next(failures, None)) is not None:
                raise failure
            seen.set()
            await real()

        monkeypatch.setattr(router, "route_once", route_once)
        running = asyncio.create_task(router.run_forever())
        await seen.wait()
        await client.bus.aclose()
        await running, "it ends with its bus"


# --- cancel -----------------------------------------------------------------------------------


async def test_requests_of_any_model_are_cancelled(bus_config: BusConfig) -> None:
    """By its id alone, and by leaving its stream."""
    async with serving(bus_config, model("a"), model("b")) as client:
        async with aclosing(client.submit({**LONG, "model": "b", "request_id": "r"})) as outputs:
            assert isinstance(await anext(outputs), CompletionChunk)
            await client.cancel("r")
            last = await end_of(outputs)
        assert (last.status, last.model) == ("cancelled", "b")
        async with aclosing(client.submit({**LONG, "model": "b", "request_id": "s"})) as outputs:
            await anext(outputs)
        assert (await end_of(client.follow("s"))).status == "cancelled"


async def test_a_request_is_cancelled_before_anybody_has_moved_it(bus_config: BusConfig) -> None:
    """No router runs, so it waits at the entrance; and it is not let in when one comes."""
    async with BusClient.connect(bus_config) as client:
        await put(client, model("a"))
        entry_id = await client.publish({**GREEDY, "model": "a", "request_id": "r"})
        stays = await client.publish({**GREEDY, "model": "a"})
        await client.cancel("r", entry_id)
        told = await end_of(client.follow("r", entry_id))
        assert (told.status, error_code(told)) == ("cancelled", "cancelled")
        async with serving(bus_config, model("a")):
            assert (await end_of(client.follow(stays, stays))).status == "done"
        assert len([each async for each in client.follow("r", entry_id)]) == 1


async def test_cancelling_an_ended_request_changes_nothing(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        done = await client.complete({**GREEDY, "model": "a", "request_id": "r"})
        await client.cancel("r", done.entry_id)
        assert await end_of(client.follow("r", done.entry_id)) == done


# --- how it is --------------------------------------------------------------------------------


async def test_reports_cover_all_models(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:

        async def all_told() -> bool:
            told = {(each.model, each.stage) for each in await client.reports()}
            return told == {(name, stage) for name in "ab" for stage in STAGES}

        await eventually(all_told)
        assert set(await client.fairness()) == {"a:0", "b:0"}
        async with client.of_model("b") as of_b:
            assert {each.model for each in await of_b.reports()} == {"b"}
            assert set(await of_b.fairness()) == {"b:0"}


async def test_one_model_that_serves_is_enough(bus_config: BusConfig) -> None:
    async with routing(bus_config) as client:
        await put(client, model("a"), takes=False)
        await put(client, model("b"))
        assert await client.trouble() == (
            "model a: it is unloaded; "
            "model b: no stage is running; start a pipeline with `nano-inference up`"
        )

        async def no_trouble() -> bool:
            return not await client.trouble()

        async with serving(bus_config, model("b")), client.of_model("a") as of_a:
            await eventually(no_trouble)
            assert "no stage is running" in await of_a.trouble()


# --- operations on one model -------------------------------------------------------------------


async def test_operations_need_a_model_among_several(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        for attempt in (
            client.pause(),
            client.flush_cache(),
            client.weight_version(),
            client.update_fairness(FairnessConfig()),
            client.cancel_all(),
        ):
            with raises("model_required", "name one of them: a, b", kind=BusError):
                await attempt


async def test_a_model_is_paused_while_the_other_serves(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client, client.of_model("a") as of_a:
        await of_a.pause()
        waits = asyncio.create_task(client.complete({**GREEDY, "model": "a"}))
        for _ in range(3):
            assert (await client.complete({**GREEDY, "model": "b"})).status == "done"
        assert not waits.done()
        await of_a.resume()
        assert (await waits).model == "a"


async def test_scoring_uses_the_named_model(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        asked = [client.score([[0, 5]], [[6]], like=GenerateRequest(model=each)) for each in "ab"]
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
            found = await client.fairness()
            is_told = len(found) == 2 and found["aged:0"].aging_s == wanted
            return found if is_told else None

        before = await eventually(lambda: aging_of_all(8.0))
        async with client.of_model("aged") as of_aged:
            await of_aged.update_fairness(FairnessConfig(aging_s=16.0))
        after = await eventually(lambda: aging_of_all(16.0))
        assert after["plain:0"] == before["plain:0"] != before["aged:0"]
