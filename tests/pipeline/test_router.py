"""The router: requests go to their models by `model`, and those that have none get one answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference import BusClient, Completion
from nano_inference.config import BusConfig, BusError
from nano_inference.pipeline.router import Router
from nano_inference.telemetry import Metrics, instruments, names

from .deployments import LIMIT_S, model, own_prefix, put, routing, serving
from .test_life import until

GREEDY = {"prompt": "98 + 25 =", "sampling": {"temperature": 0, "max_tokens": 4}}


class Counted(Metrics):
    """What was counted, by instrument and labels."""

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
    """By id, alias and none; also one that nobody can read, by the default's admission."""
    specs = (model("a"), model("b", aliases=("bee",), default=True))
    async with serving(bus_config, *specs) as client:
        asked = ["a", "b", "bee", "", "c"]
        requests = [client.complete({**GREEDY, "model": name}) for name in asked]
        *answers, refused = await asyncio.gather(*requests)
        assert [each.model for each in answers] == ["a", "b", "b", "b"]
        assert {each.status for each in answers} == {"done"}
        assert refused.error is not None
        assert refused.error.code == "unknown_model"
        async with Redis.from_url(bus_config.url) as redis:
            entry_id = await redis.xadd(f"{bus_config.prefix}:requests", {"json": "{"})
        (told,) = [each async for each in client.follow("", entry_id.decode())]
        assert isinstance(told, Completion)
        assert told.error is not None
        assert (told.error.code, told.entry_id) == ("malformed", entry_id.decode())


async def test_a_raw_client_names_the_model_beside_its_request(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        async with Redis.from_url(bus_config.url) as redis:
            fields = {"json": '{"prompt":"1","sampling":{"max_tokens":2}}', "model": "b"}
            entry_id = (await redis.xadd(f"{bus_config.prefix}:requests", fields)).decode()
        *_, last = [each async for each in client.follow(entry_id, entry_id)]
        assert isinstance(last, Completion)
        assert (last.status, last.model) == ("done", "b")


async def test_who_asks_for_no_model_here_gets_one_answer_in_both_streams(
    bus_config: BusConfig,
) -> None:
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
            assert answer.error is not None
            assert (answer.error.code, answer.status) == (code, "error")
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
    """What was read of the models may be old, but not for a name that is not among them."""
    async with routing(bus_config) as client:
        await put(client, model("a"))
        refused = await client.complete({**GREEDY, "model": "b"})
        assert refused.error is not None
        await put(client, model("b"))
        lane = client.of_model("b")
        await lane.bus.requests.pending()
        entry_id = await client.publish({**GREEDY, "model": "b"})
        (entry,) = await lane.bus.requests.take()
        assert entry.entry_id == entry_id
        await lane.aclose()


async def test_a_model_that_is_closed_meanwhile_is_refused(bus_config: BusConfig) -> None:
    """The router has read that it is there; the bus looks in the same step in which it moves."""
    async with routing(bus_config) as client:
        await put(client, model("a"))
        lane = client.of_model("a")
        await lane.bus.requests.pending()
        await client.publish({**GREEDY, "model": "a"})
        await lane.bus.requests.take()
        await put(client, model("a"), takes=False)
        refused = await client.complete({**GREEDY, "model": "a"})
        assert refused.error is not None
        assert refused.error.code == "model_not_loaded"
        await lane.aclose()


async def test_a_request_that_can_not_come_in_its_order_is_refused(bus_config: BusConfig) -> None:
    async with routing(bus_config) as client:
        await put(client, model("a"))
        async with Redis.from_url(bus_config.url) as redis:
            stream = f"{{{bus_config.prefix}:requests}}:of:a"
            await redis.xadd(stream, {"json": "{}"}, id=f"{2**43}-0")
        refused = await client.complete({**GREEDY, "model": "a"})
        assert refused.error is not None
        assert refused.error.code == "not_routed"
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
        async with asyncio.timeout(LIMIT_S):
            await seen.wait()
        await client.bus.aclose()
        async with asyncio.timeout(LIMIT_S):
            await running, "it ends with its bus"


@pytest.mark.parametrize("place", ["answered", "moved"])
async def test_a_router_that_is_killed_in_mid_way_is_followed_by_another(
    bus_config: BusConfig, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with BusClient.connect(bus_config) as client, BusClient.connect(bus_config) as other:
        await put(client, model("a"))
        lane = client.of_model("a")
        await lane.bus.requests.pending()
        wanted = "b" if place == "answered" else "a"
        entry_id = await client.publish({**GREEDY, "model": wanted})
        target: Any = client.bus.results if place == "answered" else client.bus.routing
        name = "answer" if place == "answered" else "move"
        real = getattr(target, name)

        async def dies(*arguments: Any) -> Any:
            await real(*arguments)
            raise asyncio.CancelledError

        monkeypatch.setattr(target, name, dies)
        with pytest.raises(asyncio.CancelledError):
            await Router(client.bus).route_once()
        async with routing(bus_config):
            if place == "answered":
                (told,) = [each async for each in other.follow(entry_id, entry_id)]
                assert isinstance(told, Completion)
                while (await other.bus.requests.backlog()).waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert len([each async for each in other.follow(entry_id, entry_id)]) == 1
            else:
                entries = await lane.bus.requests.take()
                assert [each.entry_id for each in entries] == [entry_id]
                assert (await other.bus.requests.backlog()).waiting == 0
        await lane.aclose()
