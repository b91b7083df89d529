"""The choice of the model that answers a call, in every interface."""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
import pytest
from websockets.asyncio.client import connect

from nano_inference.gateway.deployment.dispatch import Names, names_of, split

from ..errors import code_of, error_of
from ..fake import Client
from ..interfaces import STREAMED
from ..served import listening
from .deployed import Deployment, Front, opened

NAMED = {
    "small": "small",
    "gpt-4o-mini": "small",
    "org/large": "org/large",
    "gpt-4o": "org/large",
    "": "small",
}
"""The model of each name."""

# One interface has no text that names its model.
CALLS = {path: body for path, body in STREAMED.items() if path != "/inference/v1/generate"}


def call(path: str, model: str = "") -> dict[str, Any]:
    """A call's body; without a model for ""."""
    return CALLS[path] | ({"model": model} if model else {})


def completions(model: str) -> dict[str, Any]:
    return call("/v1/completions", model)


@pytest.mark.parametrize("path", CALLS)
async def test_the_body_or_the_address_names_the_model(
    http: Client, deployment: Deployment, path: str
) -> None:
    for name, model in NAMED.items():
        asked = [(path, name)] + [(f"/models/{name}{path}", "")] * bool(name)
        for address, named in asked:
            answer = await http.post(address, json=call(path, named))
            assert (answer.status_code, f"by {model}" in answer.text) == (200, True), answer.text
        numbers = {each: len(engine.requests) for each, engine in deployment.engines.items()}
        assert {each: number for each, number in numbers.items() if number} == {model: len(asked)}
        deployment.engines[model].requests.clear()


async def test_each_message_of_a_websocket_names_its_model(
    front: Front, deployment: Deployment
) -> None:
    async with listening(front.server) as port:
        for prefix, names in (("", ("gpt-4o", "small")), ("/models/org/large", ("gpt-4o", ""))):
            where = f"ws://localhost:{port}{prefix}/v1/responses"
            async with connect(where, proxy=None) as socket:
                for name in names:
                    body = {"type": "response.create", "input": "a"}
                    await socket.send(json.dumps(body | ({"model": name} if name else {})))
                    while (event := json.loads(await socket.recv()))[
                        "type"
                    ] != "response.incomplete":
                        assert event["type"] != "error", event
                    model = "org/large" if prefix else NAMED[name]
                    assert event["response"]["model"] == model
                    assert deployment.engines[model].requests.pop()


async def test_at_its_address_a_model_answers_for_no_other(http: Client) -> None:
    answer = await http.post("/models/small/v1/completions", json=completions("gpt-4o"))
    assert error_of(answer, 404) == "model_not_found"


async def test_an_alias_of_the_gateway_names_a_model(deployment: Deployment) -> None:
    aliases = {"gateway.model_aliases": {"gpt-*": "org/large", "o*": "small"}}
    front = await opened(deployment, aliases)
    names = {"gpt-5": "org/large", "gpt-4o-mini": "small", "o3": "small", "org/large": "org/large"}
    async with front.client() as http:
        for name, model in names.items():
            for path in CALLS:
                answer = await http.post(path, json=call(path, name))
                assert (answer.status_code, f"by {model}" in answer.text) == (200, True), path


REFUSALS = {
    "nobody": (404, "model_not_found", "'nobody'", "not_found_error"),
    "cold": (503, "model_not_loaded", "the model 'cold' is unloaded", "overloaded_error"),
}
"""By model: the status, the code, a part of the message, and Anthropic's type of the error."""


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("model", REFUSALS)
async def test_a_model_that_is_not_served_is_refused(
    http: Client, deployment: Deployment, path: str, model: str
) -> None:
    status, code, words, anthropic = REFUSALS[model]
    for address, named in (("", model), (f"/models/{model}", "")):
        answer = await http.post(f"{address}{path}", json=call(path, named))
        assert code_of(answer, status) == code
        if path.startswith("/api/"):
            assert words in answer.json()["error"]
            continue
        error = answer.json()["error"]
        assert words in error["message"]
        if code == "model_not_found":
            assert error["param"] == "model"
        if path == "/v1/messages":
            assert (answer.json()["type"], error["type"]) == ("error", anthropic)
    assert not any(engine.requests for engine in deployment.engines.values())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_was_unloaded_a_moment_ago(
    http: Client, front: Front, deployment: Deployment, path: str, stream: bool
) -> None:
    (app,) = (app for app in front.models.apps if app.id == "small")
    await deployment.put("small", "unloaded", default=True, aliases=("gpt-4o-mini",))
    assert app.record.takes_requests, "the gateway does not know it yet"
    answer = await http.post(path, json=call(path, "small") | {"stream": stream})
    assert error_of(answer, 503) == "model_not_loaded"


async def test_added_and_removed_models_are_noticed(
    http: Client, front: Front, deployment: Deployment
) -> None:
    await deployment.put("new")
    answer = await http.post("/v1/completions", json=completions("new"))
    assert "by new" in answer.text
    await deployment.bus.store.models.remove("new")
    await front.seen()
    assert not deployment.engines["new"].closed
    await front.models._close_idle()
    assert deployment.engines["new"].closed
    assert (await http.post("/v1/completions", json=completions("new"))).status_code == 404


async def test_the_query_names_the_model_of_calls_without_a_body(
    http: Client, deployment: Deployment
) -> None:
    deployment.engines["org/large"].version = 7
    for path in ("/get_weight_version", "/model_info"):
        answer = await http.get(path, params={"model": "gpt-4o"})
        assert answer.json()["weight_version"] == "7"
        assert (await http.get(path)).json()["weight_version"] == "0"
        assert (await http.get(f"/models/gpt-4o{path}")).json()["weight_version"] == "7"


@pytest.mark.parametrize(
    "call",
    [
        lambda http: http.post("/pause_generation", json={"model": "gpt-4o"}),
        lambda http: http.post("/pause_generation", params={"model": "gpt-4o"}),
        lambda http: http.post("/models/org/large/pause_generation", json={}),
        lambda http: http.post("/models/org%2Flarge/pause_generation"),
        lambda http: http.post("/pause", json={"model": "gpt-4o"}),
        lambda http: http.post("/pause?mode=keep", params={"model": "gpt-4o"}),
    ],
)
async def test_a_trainer_pauses_one_model(http: Client, deployment: Deployment, call: Any) -> None:
    assert (await call(http)).status_code == 200
    assert deployment.engines["org/large"].names in (["pause"], ["pause", "cancel_all"])
    assert deployment.engines["small"].names == []


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"nonsense",
        b'{"prompt": "hi", "model": 5}',
        b'{"prompt": "hi", "model": ["org/large"]}',
        b'{"prompt": "hi", "model": "org/lar',
        b'{"prompt": "hi", "model": "\\ud800"}',
        b'{"model": "org/large", "x": ' + b"[" * 1800 + b"]" * 1800 + b"}",
    ],
)
async def test_a_body_that_says_nothing_of_use_is_refused(
    http: Client, deployment: Deployment, body: bytes
) -> None:
    answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not any(engine.requests for engine in deployment.engines.values())


async def test_too_large_a_body_is_not_searched_for_a_model(http: Client) -> None:
    answer = await http.post("/v1/completions", json=completions("small") | {"prompt": "a" * 5000})
    assert error_of(answer, 413) == "request_too_large"


async def test_of_names_alike_the_last_counts(http: Client) -> None:
    body = b'{"prompt": "hi", "model": "small", "max_tokens": 2, "model": "gpt-4o"}'
    assert "by org/large" in (await http.post("/v1/completions", content=body)).text


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_a_method_that_there_is_not(http: Client, method: str) -> None:
    answer = await http.request(method, "/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = await http.request(method, "/models/small/v1/completions")
    assert answer.status_code == 405
    assert (await http.request(method, "/v1/nothing")).status_code == 404


def test_names_that_a_body_has() -> None:
    assert names_of(b'{"model": "m", "previous_response_id": "r"}') == Names("m", "r")
    assert names_of(b'{"model": null}') == Names()
    assert names_of(b"") == Names()


@pytest.mark.parametrize(
    ("path", "name", "behind"),
    [
        ("/models/a/v1/x", "a", "/v1/x"),
        ("/models/a/b/v1/x", "a/b", "/v1/x"),
        ("/models/a/c/v1/x", "a", "/c/v1/x"),
        ("/models/unknown/v1/x", "unknown", "/v1/x"),
        ("/models/load", "load", ""),
        ("/models/a", "a", ""),
        ("/models/", "", ""),
        ("/models//x", "", "/x"),
    ],
)
def test_addresses_of_models(path: str, name: str, behind: str) -> None:
    assert split(path, {"a", "a/b"}) == (name, behind)


# --- calls about other calls ----------------------------------------------------------------------

KEY = {"Idempotency-Key": "k"}


def stream_id(text: str) -> str:
    """The id in the first chunk."""
    return text.partition('"id":"')[2].partition('"')[0]


async def test_a_stream_is_resumed_at_another_gateway(http: Client, deployment: Deployment) -> None:
    engines = dict(deployment.engines)
    begun = await http.post("/v1/completions", json=completions("gpt-4o") | {"stream": True})
    assert "by org/large" in begun.text
    call_id = stream_id(begun.text)
    other = await opened(deployment)
    # The call's own model has its outputs.
    deployment.engines["org/large"].requests = engines["org/large"].requests
    async with other.client() as client:
        again = await client.get(f"/v1/streams/{call_id}")
        assert again.text == begun.text
        own = await client.get(f"/models/gpt-4o/v1/streams/{call_id}")
        assert own.text == begun.text
        foreign = await client.get(f"/models/small/v1/streams/{call_id}")
        assert error_of(foreign, 404) == "stream_not_found"
        ended = await client.delete(f"/v1/streams/{call_id}")
        assert ended.json()["cancelled"]
    assert deployment.engines["org/large"].names == ["cancel"]
    assert deployment.engines["small"].names == []


async def test_a_call_whose_model_is_gone(
    http: Client, deployment: Deployment, front: Front
) -> None:
    begun = await http.post("/v1/completions", json=completions("gpt-4o") | {"stream": True})
    await deployment.bus.store.models.remove("org/large")
    await front.seen()
    again = await http.get(f"/v1/streams/{stream_id(begun.text)}")
    assert error_of(again, 404) == "stream_not_found"
    assert (await http.get("/v1/streams/cmpl-nobody")).status_code == 404


async def test_a_key_is_for_one_model(http: Client) -> None:
    first = await http.post("/models/small/v1/completions", json=completions(""), headers=KEY)
    again = await http.post("/models/small/v1/completions", json=completions(""), headers=KEY)
    assert first.json() == again.json()
    other = await http.post("/models/gpt-4o/v1/completions", json=completions(""), headers=KEY)
    assert error_of(other, 422) == "idempotency_key_reused"


async def test_responses_are_found_continued_and_deleted(
    http: Client, deployment: Deployment, front: Front
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
    http: Client, deployment: Deployment, model: str
) -> None:
    for engine in deployment.engines.values():
        engine.outputs = lambda request: []
    asked = {"text": "hi", "rid": "r", "model": model, "sampling_params": {"max_new_tokens": 2}}
    of = "org/large" if model == "gpt-4o" else model
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: http.post("/generate", json=asked))
        await deployment.engines[of].until(lambda: bool(deployment.engines[of].requests))
        assert (await http.post("/abort_request", json={"rid": "r"})).status_code == 200
        group.cancel_scope.cancel()
    assert [name for name, engine in deployment.engines.items() if "cancel" in engine.names] == [of]


async def test_an_abort_of_another_gateway_s_request_reaches_all_loaded_models(
    http: Client, deployment: Deployment
) -> None:
    assert (await http.post("/abort_request", json={"rid": "r"})).status_code == 200
    called = {name: engine.names for name, engine in deployment.engines.items()}
    assert called == {"small": ["cancel"], "org/large": ["cancel"], "cold": []}


async def test_orphaned_calls_are_ended_at_their_model(deployment: Deployment) -> None:
    front = await opened(deployment, {"gateway.resume_grace_s": 0.1})
    calls = deployment.bus.store.calls
    for name, model in {"a": "nobody", "b": "org/large", "c": "small"}.items():
        record = msgspec.json.encode({"tenant": "t", "call": {"id": name, "model": model}})
        await calls.keep(name, record, 0.001)
        await calls.note(name, name, "1-0")
    large, small = deployment.engines["org/large"], deployment.engines["small"]
    async with anyio.create_task_group() as group:
        group.start_soon(front.app.background["durable calls"])
        await large.until(lambda: bool(large.names))
        await small.until(lambda: bool(small.names))
        group.cancel_scope.cancel()
    assert [given["request_id"] for _, given in large.calls] == ["b"]
    assert [given["request_id"] for _, given in small.calls] == ["c"]
