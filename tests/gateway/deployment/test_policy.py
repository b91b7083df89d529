"""One policy for several models: keys, limits, guardrails."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.document import Guardrails, PolicyDocument

from ..errors import error_of
from ..fake import completion, sample
from .deployed import Deployment, Front, opened


@pytest.fixture
async def keyed(deployment: Deployment) -> Front:
    return await opened(deployment, {"policy.backend": "bus"})


async def key(front: Front, **wish: Any) -> dict[str, str]:
    store = front.app.policy.store
    made = await Administration(store).create_key({"name": "somebody"} | wish)
    await store.refresh()
    return {"Authorization": f"Bearer {made['key']}"}


def body(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "hi", "max_tokens": 2} if model else {"prompt": "hi"}


async def test_without_a_key_no_model_is_revealed(keyed: Front) -> None:
    async with keyed.client() as http:
        for path in ("/v1/completions", "/models/small/v1/completions"):
            for model in ("small", "nobody", ""):
                answer = await http.post(path, json=body(model))
                assert error_of(answer, 401) == "missing_api_key"
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.post("/admin/models/cold/load")).status_code == 401


@pytest.mark.parametrize("name", ["org/large", "gpt-4o"])
async def test_a_key_is_for_models_by_their_ids(keyed: Front, name: str) -> None:
    headers = await key(keyed, models=["small"], scopes=["generate", "weights"])
    async with keyed.client(headers=headers) as http:
        assert (await http.post("/v1/completions", json=body("gpt-4o-mini"))).status_code == 200
        assert (await http.post("/v1/completions", json=body(""))).status_code == 200
        refused = [
            await http.post("/v1/completions", json=body(name)),
            await http.post(f"/models/{name}/v1/completions", json=body("")),
            await http.post("/v1/messages", json=body(name) | {"messages": []}),
            await http.post("/generate", json={"text": "hi", "model": name}),
            await http.post("/tokenize", json=body(name)),
            await http.post("/pause_generation", json={"model": name}),
            await http.get("/get_model_info", params={"model": name}),
            await http.get(f"/v1/models/{name}"),
            await http.post(f"/v2/models/{name}/generate", json={"text_input": "hi"}),
            await http.get(f"/v2/models/{name}.tokens"),
        ]
        assert [each.status_code for each in refused] == [404] * len(refused)
        assert [each["id"] for each in (await http.get("/v1/models")).json()["data"]] == ["small"]
        index = (await http.post("/v2/repository/index", json={})).json()
        assert {each["name"].partition(".")[0] for each in index} == {"small"}


async def test_unknown_models_are_not_revealed_without_a_key(
    keyed: Front, deployment: Deployment
) -> None:
    """Neither their states nor their names."""
    headers = await key(keyed, models=["small"])
    calls = [
        ("/v1/completions", "cold"),
        ("/v1/completions", "smal"),
        ("/models/cold/v1/completions", ""),
        ("/models/org-large/v1/completions", ""),
    ]
    async with keyed.client() as http:
        for path, model in calls:
            answer = await http.post(path, json=body(model))
            assert error_of(answer, 401) == "missing_api_key"
        for path, model in calls:
            answer = await http.post(path, json=body(model), headers=headers)
            assert error_of(answer, 404) == "model_not_found"
            assert "for this key" in answer.text
            assert "unloaded" not in answer.text
            assert "org/large" not in answer.text


async def test_an_alias_in_a_key_is_no_model(keyed: Front) -> None:
    headers = await key(keyed, models=["gpt-4o"])
    async with keyed.client(headers=headers) as http:
        assert (await http.post("/v1/completions", json=body("gpt-4o"))).status_code == 404


async def test_only_administrators_load_models(keyed: Front, deployment: Deployment) -> None:
    headers = await key(keyed, scopes=["generate", "weights"])
    paths = ["/admin/models/cold/load", "/models/load", "/v2/repository/models/cold/load"]
    async with keyed.client(headers=headers) as http:
        for path in paths:
            assert (await http.post(path, json={"model": "cold"})).status_code == 403
    assert deployment.asked == []


async def test_limits_hold_for_all_models_together(keyed: Front) -> None:
    headers = await key(keyed, limits={"requests_per_minute": 2})
    async with keyed.client(headers=headers) as http:
        assert (await http.post("/v1/completions", json=body("small"))).status_code == 200
        assert (await http.post("/v1/completions", json=body("gpt-4o"))).status_code == 200
        for model in ("small", "gpt-4o"):
            assert (await http.post("/v1/completions", json=body(model))).status_code == 429


async def test_the_block_list_is_one_and_ends_requests_at_their_model(
    keyed: Front, deployment: Deployment
) -> None:
    def blocking(document: PolicyDocument) -> PolicyDocument:
        return msgspec.structs.replace(document, guardrails=Guardrails(literals=("secret",)))

    await keyed.app.policy.store.change(blocking)
    deployment.engines["org/large"].outputs = lambda request: [
        completion(request, sample(text="a secret, told"))
    ]
    async with keyed.client(headers=await key(keyed)) as http:
        for model in ("small", "gpt-4o"):
            refused = await http.post("/v1/completions", json=body(model) | {"prompt": "SECRET"})
            assert refused.json()["error"]["code"] == "content_filter"
        cut = await http.post("/v1/completions", json=body("gpt-4o"))
        assert cut.json()["choices"][0]["finish_reason"] == "content_filter"


async def test_a_flood_at_one_model_delays_no_call_of_another(deployment: Deployment) -> None:
    front = await opened(deployment, {"gateway.max_in_flight": 2})
    small = deployment.engines["small"]
    small.outputs = lambda request: []
    (waiting,) = (app.interfaces.submissions for app in front.models.apps if app.id == "small")
    flood = {"model": "small", "prompt": ["hi"] * 20, "max_tokens": 2}
    async with front.client() as http, anyio.create_task_group() as group:
        group.start_soon(lambda: http.post("/v1/completions", json=flood))
        await small.until(lambda: bool(small.requests))
        assert waiting.waiting > 0
        answer = await http.post("/v1/completions", json=body("gpt-4o"))
        assert (answer.status_code, waiting.waiting > 0) == (200, True)
        group.cancel_scope.cancel()
