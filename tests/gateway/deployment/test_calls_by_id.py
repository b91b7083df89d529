"""Calls about durable calls are dispatched to the model of those, at any gateway."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import msgspec
import pytest

from nano_inference.config import load_config

from .deployed import SETTINGS, Deployment, Front

KEY = {"Idempotency-Key": "k"}


def body(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hi", "max_tokens": 2} | more


def stream_id(text: str) -> str:
    """Of the first chunk."""
    return text.partition('"id":"')[2].partition('"')[0]


async def test_a_stream_is_resumed_at_another_gateway(
    http: httpx.AsyncClient, deployment: Deployment
) -> None:
    engines = dict(deployment.engines)
    begun = await http.post("/v1/completions", json=body("gpt-4o", stream=True))
    assert "by org/large" in begun.text
    call_id = stream_id(begun.text)
    other = Front(deployment)
    await other.seen()
    # The call's own model has its outputs.
    deployment.engines["org/large"].requests = engines["org/large"].requests
    async with other.client() as client:
        again = await client.get(f"/v1/streams/{call_id}")
        assert again.text == begun.text
        own = await client.get(f"/models/gpt-4o/v1/streams/{call_id}")
        assert own.text == begun.text
        foreign = await client.get(f"/models/small/v1/streams/{call_id}")
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "stream_not_found")
        ended = await client.delete(f"/v1/streams/{call_id}")
        assert ended.json()["cancelled"]
    assert deployment.engines["org/large"].names == ["cancel"]
    assert deployment.engines["small"].names == []


async def test_a_call_whose_model_is_gone(
    http: httpx.AsyncClient, deployment: Deployment, front: Front
) -> None:
    begun = await http.post("/v1/completions", json=body("gpt-4o", stream=True))
    await deployment.bus.store.models.remove("org/large")
    await front.seen()
    again = await http.get(f"/v1/streams/{stream_id(begun.text)}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "stream_not_found")
    assert (await http.get("/v1/streams/cmpl-nobody")).status_code == 404


async def test_a_key_is_for_one_model(http: httpx.AsyncClient) -> None:
    first = await http.post("/models/small/v1/completions", json=body(""), headers=KEY)
    again = await http.post("/models/small/v1/completions", json=body(""), headers=KEY)
    assert first.json() == again.json()
    other = await http.post("/models/gpt-4o/v1/completions", json=body(""), headers=KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


async def test_responses_are_found_continued_and_deleted(
    http: httpx.AsyncClient, deployment: Deployment, front: Front
) -> None:
    made = (await http.post("/v1/responses", json={"model": "gpt-4o", "input": "hi"})).json()
    assert made["model"] == "org/large"
    known = (await http.get(f"/v1/responses/{made['id']}")).json()
    assert known["output"] == made["output"]
    following = {"input": "more", "previous_response_id": made["id"]}
    same = (await http.post("/v1/responses", json=following)).json()
    assert same["model"] == "org/large"
    other = await http.post("/v1/responses", json=following | {"model": "small"})
    assert other.json()["model"] == "small"
    items = (await http.get(f"/v1/responses/{other.json()['id']}/input_items")).json()["data"]
    assert "by org/large" in str(items)
    await deployment.bus.store.models.remove("org/large")
    await front.seen()
    gone = await http.post("/v1/responses", json=following | {"model": "small"})
    assert gone.json()["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize("model", ["small", "gpt-4o"])
async def test_an_abort_finds_the_model_that_has_the_request(
    http: httpx.AsyncClient, deployment: Deployment, model: str
) -> None:
    for engine in deployment.engines.values():
        engine.outputs = lambda request: []
    asked = {"text": "hi", "rid": "r", "model": model, "sampling_params": {"max_new_tokens": 2}}
    of = "org/large" if model == "gpt-4o" else model
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: http.post("/generate", json=asked))
            await deployment.engines[of].until(lambda: bool(deployment.engines[of].requests))
            assert (await http.post("/abort_request", json={"rid": "r"})).status_code == 200
            group.cancel_scope.cancel()
    assert [name for name, engine in deployment.engines.items() if "cancel" in engine.names] == [of]


async def test_an_abort_of_another_gateway_s_request_reaches_all_loaded_models(
    http: httpx.AsyncClient, deployment: Deployment
) -> None:
    assert (await http.post("/abort_request", json={"rid": "r"})).status_code == 200
    called = {name: engine.names for name, engine in deployment.engines.items()}
    assert called == {"small": ["cancel"], "org/large": ["cancel"], "cold": []}


async def test_orphaned_calls_are_ended_at_their_model(deployment: Deployment) -> None:
    settings = SETTINGS | {"gateway.resume_grace_s": 0.1}
    front = Front(deployment, load_config(env={}, overrides=settings))
    await front.seen()
    calls = deployment.bus.store.calls
    for name, model in {"a": "nobody", "b": "org/large", "c": "small"}.items():
        record = msgspec.json.encode({"tenant": "t", "call": {"id": name, "model": model}})
        await calls.keep(name, record, 0.001)
        await calls.note(name, name, "1-0")
    large, small = deployment.engines["org/large"], deployment.engines["small"]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(front.app.background["durable calls"])
            await large.until(lambda: bool(large.names))
            await small.until(lambda: bool(small.names))
            group.cancel_scope.cancel()
    assert [given["request_id"] for _, given in large.calls] == ["b"]
    assert [given["request_id"] for _, given in small.calls] == ["c"]
