"""Endpoints about all models: lists, health, loading and unloading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nano_inference.config import BusError, ModelConfig, ModelError, load_config

from ..errors import error_of
from ..fake import Client
from .deployed import SETTINGS, Deployment, Front, opened


async def test_all_models_are_listed_loaded_or_not(
    http: Client, deployment: Deployment, front: Front
) -> None:
    await deployment.put("bad", "failed")
    await front.seen()
    for path in ("/v1/models", "/models"):
        cards = (await http.get(path)).json()["data"]
        assert {each["id"]: (each["state"], each["status"]) for each in cards} == {
            "bad": ("failed", {"value": "unloaded", "failed": True}),
            "cold": ("unloaded", {"value": "unloaded"}),
            "org/large": ("ready", {"value": "loaded"}),
            "small": ("ready", {"value": "loaded"}),
        }
    card = (await http.get("/v1/models/gpt-4o")).json()
    assert (card["id"], card["aliases"], card["object"]) == ("org/large", ["gpt-4o"], "model")
    assert (await http.get("/v1/models/org/large")).json() == card
    unknown = await http.get("/v1/models/nobody")
    assert error_of(unknown, 404) == "model_not_found"
    own = (await http.get("/models/gpt-4o/v1/models")).json()["data"]
    assert [each["id"] for each in own] == ["org/large"]


async def test_the_gateway_is_ready_while_one_model_is(
    http: Client, deployment: Deployment
) -> None:
    deployment.engines["small"].why_not = "no lane is alive"
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
    assert (await http.get("/models/small/readyz")).status_code == 503
    assert (await http.get("/models/org/large/health")).status_code == 200
    cold = await http.get("/models/cold/readyz")
    assert (cold.status_code, cold.json()["reason"]) == (503, "the model 'cold' is unloaded")
    assert (await http.get("/models/cold/livez")).status_code == 200


async def test_the_gateway_is_not_ready_when_all_wanted_models_fail() -> None:
    deployment = Deployment()
    await deployment.put("a", "failed")
    await deployment.put("b", "loading")
    await deployment.put("c", "unloaded")
    front = await opened(deployment)
    async with front.client() as http:
        health = await http.get("/health")
        assert health.status_code == 503
        assert "the model 'a' is failed; the model 'b' is loading" in health.text
    idle = Deployment()
    await idle.put("c", "unloaded")
    front = await opened(idle)
    async with front.client() as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/readyz")).json()["status"] == "ready"


async def test_anthropic_clients_list_all_models(http: Client) -> None:
    version = {"anthropic-version": "2023-06-01"}
    listed = (await http.get("/v1/models", headers=version)).json()
    cards = (await http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed["data"]] == [each["id"] for each in cards]
    assert {each["type"] for each in listed["data"]} == {"model"}
    one = (await http.get("/v1/models/gpt-4o", headers=version)).json()
    assert (one["type"], one["id"]) == ("model", "org/large")
    missing = await http.get("/v1/models/none", headers=version)
    assert (missing.status_code, missing.json()["type"]) == (404, "error")


@pytest.mark.parametrize("prefix", ["", "/models/small"])
async def test_a_body_without_an_endpoint_is_not_read(http: Client, prefix: str) -> None:
    form = {"content": b"a=b", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}
    for path, status in (("audio", 404), ("models", 405), ("completions", 415)):
        answer = await http.post(f"{prefix}/v1/{path}", **form)  # type: ignore[arg-type]
        assert answer.status_code == status


async def test_configured_models_are_listed_before_they_run() -> None:
    models = '[{"id": "a", "path": "tiny"}, {"id": "b", "path": "tiny"}]'
    env = {"NANO_INFERENCE_MODELS": models}
    front = Front(Deployment(), load_config(env=env, overrides=SETTINGS))
    async with front.client() as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert {each["id"]: each["state"] for each in cards} == {"a": "unloaded", "b": "unloaded"}
        answer = await http.post("/v1/completions", json={"model": "b", "prompt": "hi"})
        assert error_of(answer, 503) == "model_not_loaded"


async def test_a_model_with_invalid_settings_affects_no_other(
    http: Client, deployment: Deployment, front: Front
) -> None:
    await deployment.put("odd", settings={"engine.nonsense": 1})
    await front.seen()
    answer = await http.post("/v1/completions", json={"model": "odd", "prompt": "hi"})
    assert error_of(answer, 503) == "model_not_loaded"
    assert "engine.nonsense" in answer.json()["error"]["message"]
    answer = await http.post("/v1/completions", json={"model": "small", "prompt": "hi"})
    assert answer.status_code == 200


LOADS: dict[str, dict[str, Any] | None] = {
    "/admin/models/cold/load": None,
    "/models/load": {"model": "cold"},
    "/v2/repository/models/cold/load": {},
}
UNLOADS: dict[str, dict[str, Any]] = {
    "/admin/models/org/large/unload": {"timeout_s": 3},
    "/models/unload": {"model": "gpt-4o"},
    "/v2/repository/models/gpt-4o/unload": {"parameters": {"unload_dependents": False}},
}


@pytest.mark.parametrize("path", LOADS)
async def test_a_model_is_loaded(http: Client, deployment: Deployment, path: str) -> None:
    answer = await http.post(path, json=LOADS[path])
    assert answer.status_code == 200, answer.text
    assert deployment.asked == [("load", "cold")]
    answer = await http.post("/v1/completions", json={"model": "cold", "prompt": "hi"})
    assert "by cold" in answer.text


@pytest.mark.parametrize("path", UNLOADS)
async def test_a_model_is_unloaded(http: Client, deployment: Deployment, path: str) -> None:
    assert (await http.post(path, json=UNLOADS[path])).status_code == 200
    assert [what for what, _ in deployment.asked] == ["unload"]
    answer = await http.post("/v1/completions", json={"model": "org/large", "prompt": "hi"})
    assert error_of(answer, 503) == "model_not_loaded"


async def test_a_model_is_added_and_removed(http: Client, deployment: Deployment) -> None:
    body = {"id": "new", "path": "tiny", "aliases": ["newest"]}
    added = await http.post("/admin/models", json=body)
    assert (added.status_code, added.json()["state"]) == (201, "ready")
    assert deployment.asked == [("load", ModelConfig(id="new", path="tiny", aliases=("newest",)))]
    assert (await http.get("/admin/models/newest")).json()["id"] == "new"
    listed = (await http.get("/admin/models")).json()["data"]
    assert "new" in [each["id"] for each in listed]
    removed = await http.delete("/admin/models/new")
    assert removed.json() == {"id": "new", "object": "model", "deleted": True}


@pytest.mark.parametrize(
    "body",
    [{}, {"id": "x"}, {"id": "a b", "path": "tiny"}, {"id": "x", "path": "tiny", "what": 1}, []],
)
async def test_an_invalid_model_is_not_added(
    http: Client, deployment: Deployment, body: Any
) -> None:
    assert (await http.post("/admin/models", json=body)).status_code == 400
    assert deployment.asked == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelError("no", code="unknown_model"), 404),
        (ModelError("no", code="model_exists"), 409),
        (ModelError("no", code="model_load_failed"), 500),
        (ModelError("no", code="out_of_memory_budget"), 503),
        (BusError("no", code="no_model_manager"), 503),
    ],
)
async def test_failures_of_loading_are_answered(
    http: Client, deployment: Deployment, error: Any, status: int
) -> None:
    deployment.failure = error
    for path, body in LOADS.items():
        answer = await http.post(path, json=body)
        assert answer.status_code == status
        code = answer.headers.get("x-error-code") or answer.json()["error"]["code"]
        assert code == error.code


async def test_triton_s_model_overrides_are_refused(http: Client, deployment: Deployment) -> None:
    for name in ("config", "file:1/model.onnx"):
        answer = await http.post(
            "/v2/repository/models/cold/load", json={"parameters": {name: "{}"}}
        )
        assert (answer.status_code, answer.headers["x-error-code"]) == (400, "unsupported")
    assert deployment.asked == []


async def test_kserve_serves_the_models_of_every_model(
    http: Client, deployment: Deployment, front: Front
) -> None:
    index = (await http.post("/v2/repository/index", json={})).json()
    offered = {each["name"]: (each["state"], each["reason"]) for each in index}
    assert offered["small"] == offered["org/large.tokens"] == ("READY", "")
    assert offered["cold.best_of"][0] == "UNAVAILABLE"
    assert "the model 'cold' is unloaded" in offered["cold.best_of"][1]
    assert len(offered) == 15
    ready = (await http.post("/v2/repository/index", json={"ready": True})).json()
    assert len(ready) == 10
    assert (await http.get("/v2/models/gpt-4o.tokens")).json()["name"] == "org/large.tokens"
    for path in ("/v2/models/gpt-4o/generate", "/models/gpt-4o/v2/models/org/large/generate"):
        answer = await http.post(path, json={"text_input": "hi"})
        assert (answer.json()["model_name"], answer.json()["text_output"]) == (
            "org/large",
            "hiby org/large",
        )
    answer = await http.post("/v2/models/cold/generate", json={"text_input": "hi"})
    assert (answer.status_code, answer.headers["x-error-code"]) == (503, "model_not_loaded")
    answer = await http.post("/v2/models/nobody/generate", json={"text_input": "hi"})
    assert (answer.status_code, answer.headers["x-error-code"]) == (404, "model_not_found")
    answer = await http.post("/models/small/v2/models/org/large/generate", json={"text_input": "x"})
    assert answer.status_code == 404
    assert (await http.get("/v2/models/small/ready")).status_code == 200
    assert (await http.get("/v2/models/cold/ready")).status_code == 400
    await deployment.bus.store.models.remove("small")
    await front.seen()
    assert (await http.get("/v2/models/small/ready")).status_code == 400


async def test_the_audit_log_records_loading_and_the_model_of_a_call(
    deployment: Deployment, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    settings = {"policy.audit_file": str(path), "policy.audit_key": "k" * 32}
    front = await opened(deployment, settings)
    policy = front.app.policy
    await policy.open()
    async with front.client() as http:
        await http.post("/admin/models/cold/load")
        await http.post("/v1/completions", json={"model": "gpt-4o", "prompt": "hi"})
        await http.post("/v1/completions", json={"model": "nobody", "prompt": "hi"})
        await http.post("/models/cold/v1/completions", json={"prompt": "hi"})
    await policy.aclose()
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    (loaded,) = [line for line in lines if line["event"] == "model_loaded"]
    assert (loaded["changed"], loaded["now"]["state"]) == ("cold", "ready")
    called = [line for line in lines if line.get("route") == "/v1/completions"]
    assert [(line["model"], line["status"], line["code"]) for line in called] == [
        ("org/large", 200, ""),
        ("", 404, "model_not_found"),
        ("cold", 200, ""),
    ]
