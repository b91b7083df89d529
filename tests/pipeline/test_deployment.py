"""A client of several models: what it does to all of them, and what to one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from nano_inference import BusClient, Completion
from nano_inference.bus.public import CompletionChunk, GenerateRequest
from nano_inference.config import STAGES, BusConfig, BusError, FairnessConfig

from .deployments import eventually, model, own_prefix, put, routing, serving
from .test_life import until

GREEDY = {"prompt": "98 + 25 =", "sampling": {"temperature": 0, "max_tokens": 4}}
LONG = {"prompt": "1", "sampling": {"max_tokens": 1900, "ignore_eos": True}}


@pytest.fixture
def bus_config(redis_url: str) -> BusConfig:
    return own_prefix(redis_url)


# --- cancel -----------------------------------------------------------------------------------


async def test_a_request_is_cancelled_whatever_its_model(bus_config: BusConfig) -> None:
    """By its id alone, and by leaving its stream."""
    async with serving(bus_config, model("a"), model("b")) as client:
        async with aclosing(client.submit({**LONG, "model": "b", "request_id": "r"})) as outputs:
            assert isinstance(await anext(outputs), CompletionChunk)
            await client.cancel("r")
            *_, last = [each async for each in outputs]
        assert isinstance(last, Completion)
        assert (last.status, last.model) == ("cancelled", "b")
        async with aclosing(client.submit({**LONG, "model": "b", "request_id": "s"})) as outputs:
            await anext(outputs)
        async with aclosing(client.follow("s")) as outputs:
            *_, last = [each async for each in outputs]
        assert last.status == "cancelled"  # type: ignore[union-attr]


async def test_a_request_is_cancelled_before_anybody_has_moved_it(bus_config: BusConfig) -> None:
    """No router runs, so it waits at the entrance; and it is not let in when one comes."""
    async with BusClient.connect(bus_config) as client:
        await put(client, model("a"))
        entry_id = await client.publish({**GREEDY, "model": "a", "request_id": "r"})
        stays = await client.publish({**GREEDY, "model": "a"})
        await client.cancel("r", entry_id)
        (told,) = [each async for each in client.follow("r", entry_id)]
        assert isinstance(told, Completion)
        assert told.error is not None
        assert (told.status, told.error.code) == ("cancelled", "cancelled")
        async with serving(bus_config, model("a")):
            *_, other = [each async for each in client.follow(stays, stays)]
            assert other.status == "done"  # type: ignore[union-attr]
        assert len([each async for each in client.follow("r", entry_id)]) == 1


async def test_who_cancels_what_has_ended_changes_nothing(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        done = await client.complete({**GREEDY, "model": "a", "request_id": "r"})
        await client.cancel("r", done.entry_id)
        *_, again = [each async for each in client.follow("r", done.entry_id)]
        assert again == done


# --- how it is --------------------------------------------------------------------------------


async def test_reports_tell_of_all_models(bus_config: BusConfig) -> None:
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


# --- what is done to one ------------------------------------------------------------------------


async def test_who_operates_says_on_which_model(bus_config: BusConfig) -> None:
    async with serving(bus_config, model("a"), model("b")) as client:
        for attempt in (
            client.pause(),
            client.flush_cache(),
            client.weight_version(),
            client.update_fairness(FairnessConfig()),
            client.cancel_all(),
        ):
            with pytest.raises(BusError, match="name one of them: a, b") as refused:
                await attempt
            assert refused.value.code == "model_required"


async def test_a_model_is_paused_while_the_other_serves(bus_config: BusConfig) -> None:
    async with (
        serving(bus_config, model("a"), model("b")) as client,
        client.of_model("a") as of_a,
    ):
        await of_a.pause()
        waits = asyncio.create_task(client.complete({**GREEDY, "model": "a"}))
        for _ in range(3):
            assert (await client.complete({**GREEDY, "model": "b"})).status == "done"
        assert not waits.done()
        await of_a.resume()
        assert (await waits).model == "a"


async def test_requests_are_scored_by_the_model_that_they_name(bus_config: BusConfig) -> None:
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


async def test_a_full_queue_of_one_model_is_nobody_elses(bus_config: BusConfig) -> None:
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
