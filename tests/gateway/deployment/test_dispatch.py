"""Which model answers a call, in every interface."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from nano_inference.gateway.deployment.dispatch import Names, names_of, split

from .deployed import Deployment, Front

NAMED = [
    ("small", "small"),
    ("gpt-4o-mini", "small"),
    ("org/large", "org/large"),
    ("gpt-4o", "org/large"),
    ("", "small"),
]
"""Names, and which model has them."""


def completions(model: str) -> dict[str, Any]:
    return {"prompt": "hi", "max_tokens": 2} | ({"model": model} if model else {})


def chat(model: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "max_tokens": 2} | ({"model": model} if model else {})


def responses(model: str) -> dict[str, Any]:
    return {"input": "hi", "max_output_tokens": 2} | ({"model": model} if model else {})


def sglang(model: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": 2}
    return {"text": "hi", "sampling_params": sampling} | ({"model": model} if model else {})


CALLS = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/v1/messages": chat,
    "/generate": sglang,
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(("name", "model"), NAMED)
async def test_the_body_names_the_model(
    http: httpx.AsyncClient, deployment: Deployment, path: str, name: str, model: str
) -> None:
    answer = await http.post(path, json=CALLS[path](name))
    assert (answer.status_code, f"by {model}" in answer.text) == (200, True), answer.text
    assert [each for each, engine in deployment.engines.items() if engine.requests] == [model]


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize(("name", "model"), NAMED[:-1])
async def test_a_model_has_an_address_of_its_own(
    http: httpx.AsyncClient, path: str, name: str, model: str
) -> None:
    answer = await http.post(f"/models/{name}{path}", json=CALLS[path](""))
    assert (answer.status_code, f"by {model}" in answer.text) == (200, True), answer.text


async def test_at_its_address_a_model_answers_for_no_other(http: httpx.AsyncClient) -> None:
    answer = await http.post("/models/small/v1/completions", json=completions("gpt-4o"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


ERRORS = {
    "/v1/completions": ("error", "code"),
    "/v1/chat/completions": ("error", "code"),
    "/v1/responses": ("error", "code"),
    "/generate": ("error", "code"),
}


@pytest.mark.parametrize("address", ["", "/models/nobody"])
@pytest.mark.parametrize("path", CALLS)
async def test_an_unknown_model_is_refused(
    http: httpx.AsyncClient, deployment: Deployment, path: str, address: str
) -> None:
    answer = await http.post(f"{address}{path}", json=CALLS[path]("" if address else "nobody"))
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'nobody'" in error["message"]
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "not_found_error")
    assert not any(engine.requests for engine in deployment.engines.values())


@pytest.mark.parametrize("address", ["", "/models/cold"])
@pytest.mark.parametrize("path", CALLS)
async def test_an_unloaded_model_is_refused(
    http: httpx.AsyncClient, deployment: Deployment, path: str, address: str
) -> None:
    answer = await http.post(f"{address}{path}", json=CALLS[path]("" if address else "cold"))
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "model_not_loaded"
    assert "the model 'cold' is unloaded" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "overloaded_error"
    assert not deployment.engines["cold"].requests


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_was_unloaded_a_moment_ago(
    http: httpx.AsyncClient, front: Front, deployment: Deployment, path: str, stream: bool
) -> None:
    (app,) = (app for app in front.models.apps if app.id == "small")
    await deployment.put("small", "unloaded", default=True, aliases=("gpt-4o-mini",))
    assert app.record.takes_requests, "the gateway does not know it yet"
    answer = await http.post(path, json=CALLS[path]("small") | {"stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")


async def test_added_and_removed_models_are_noticed(
    http: httpx.AsyncClient, front: Front, deployment: Deployment
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
    http: httpx.AsyncClient, deployment: Deployment
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
    ],
)
async def test_a_trainer_pauses_one_model(
    http: httpx.AsyncClient, deployment: Deployment, call: Any
) -> None:
    assert (await call(http)).status_code == 200
    assert deployment.engines["org/large"].names == ["pause", "cancel_all"] or deployment.engines[
        "org/large"
    ].names == ["pause"]
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
    http: httpx.AsyncClient, deployment: Deployment, body: bytes
) -> None:
    answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not any(engine.requests for engine in deployment.engines.values())


async def test_too_large_a_body_is_not_searched_for_a_model(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=completions("small") | {"prompt": "a" * 5000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_of_names_alike_the_last_counts(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "hi", "model": "small", "max_tokens": 2, "model": "gpt-4o"}'
    assert "by org/large" in (await http.post("/v1/completions", content=body)).text


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_a_method_that_there_is_not(http: httpx.AsyncClient, method: str) -> None:
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
