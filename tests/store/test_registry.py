"""The models of a deployment on its bus: their records, and which of them takes requests."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from nano_inference.config import BusConfig, BusError, ConfigError, ModelConfig, RequestError
from nano_inference.store.registry import ModelRecord, find_model

from ..buses import STORES

BUSES = STORES

A = ModelConfig(id="a", path="/models/a", aliases=("first", "one"), adapters={"a-fr": "/fr"})
B = ModelConfig(id="b", path="/models/b", default=True)


async def test_model_records_are_read_until_their_removal(buses: Any) -> None:
    bus = buses.open()
    assert await bus.store.models.read() == {}
    loading = ModelRecord(spec=A, state="loading", since_ns=5)
    ready = ModelRecord(
        spec=A, state="ready", since_ns=9, load_ns=4, memory_bytes=100, takes_requests=True
    )
    failed = ModelRecord(spec=B, state="failed", reason="there is no folder")
    await bus.store.models.put(failed)
    await bus.store.models.put(loading)
    other = buses.another(bus)
    assert await other.store.models.read() == {"a": loading, "b": failed}
    await bus.store.models.put(ready)
    assert list((await other.store.models.read()).items()) == [("a", ready), ("b", failed)]
    await other.store.models.remove("b")
    await other.store.models.remove("never there")
    assert await bus.store.models.read() == {"a": ready}


async def test_a_record_of_another_version_hides_no_other(redis_buses: Any, foreign: Redis) -> None:
    bus = redis_buses.open()
    await bus.store.models.put(ModelRecord(spec=A))
    key = f"{{{redis_buses.prefix}:requests}}:models"
    await foreign.hset(key, "b", '{"spec": {"id": "b"}}')
    await foreign.hset(key, "c", "no JSON")
    assert list(await bus.store.models.read()) == ["a"]


async def test_in_memory_there_is_one_model(memory_bus: Any) -> None:
    assert memory_bus.model == ""
    with pytest.raises(BusError, match=r"Redis URL as bus\.url"):
        memory_bus.of_model("a")
    with pytest.raises(BusError, match=r"Redis URL as bus\.url"):
        await memory_bus.routing.unrouted()


# --- names ------------------------------------------------------------------------------------


def records_of(*specs: ModelConfig) -> list[ModelRecord]:
    return [ModelRecord(spec=spec) for spec in specs]


def test_an_adapter_that_was_loaded_meanwhile_names_its_model() -> None:
    records = [ModelRecord(spec=A), ModelRecord(spec=B, adapters=("late", "a-fr"))]
    assert find_model("late", records) is B
    assert find_model("a-fr", records) is A, "what the settings say comes first"


@pytest.mark.parametrize(
    ("name", "found"), [("a", A), ("first", A), ("one", A), ("a-fr", A), ("b", B), ("", B)]
)
def test_a_model_is_found_by_each_of_its_names(name: str, found: ModelConfig) -> None:
    assert find_model(name, records_of(A, B)) is found


def test_without_a_default_the_first_model_is_it() -> None:
    assert find_model("", records_of(A, ModelConfig(id="c", path="/c"))) is A


@pytest.mark.parametrize(
    ("name", "models", "words"),
    [
        ("firts", [A, B], "no model 'firts' here; did you mean 'first'"),
        ("x" * 500, [A, B], "known: a, first, one, a-fr, b"),
        ("", [], "no model '' here"),
    ],
)
def test_a_name_of_no_model_is_refused(name: str, models: list[ModelConfig], words: str) -> None:
    with pytest.raises(RequestError) as refused:
        find_model(name, records_of(*models))
    assert refused.value.code == "unknown_model"
    assert words in refused.value.message
    assert len(refused.value.message) < 400


@pytest.mark.parametrize("name", ["a b", "{a}", "a}", "x" * 129, "a\n"])
def test_a_bus_is_of_no_model_that_could_move_keys(name: str) -> None:
    with pytest.raises(ConfigError, match=r"bus\.model"):
        BusConfig(url="redis://h", model=name)
