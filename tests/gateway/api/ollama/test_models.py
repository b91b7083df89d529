"""Models as Ollama's clients see them, of one model and of several."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.public import CompletionSample, Output
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...deployment.deployed import Deployment, opened
from ...errors import code_of
from ...fake import Client, completion, data_of, report, sample

LOAD = {
    "weight_bytes": 5000,
    "parameters": 7_600_000_000,
    "dtype": "bfloat16",
    "device": "cuda:0",
    "capabilities": "generate,embed",
}


def loaded(http: Client) -> None:
    stages = ("admission", "fairness", "batching", "streaming")
    http.engine.stage_reports = [
        report(adapters=(LoadedAdapter(id="mine", version=1),)),
        *(report(stage=stage) for stage in stages[1:]),
        report(stage="executor", load=LOAD),
    ]


async def test_models_are_listed_with_their_tag(http: Client) -> None:
    loaded(http)
    tags = (await http.get("/api/tags")).json()["models"]
    assert [each["name"] for each in tags] == ["tiny:latest", "mine:latest"]
    details = tags[1]["details"]
    assert (details["parent_model"], details["parameter_size"]) == ("tiny", "7.6B")
    running = (await http.get("/api/ps")).json()["models"]
    assert [each["size_vram"] for each in running] == [5000, 5000]
    assert (await http.head("/api/tags")).status_code == 200


async def test_a_model_that_is_not_loaded_does_not_run(http: Client) -> None:
    assert (await http.get("/api/ps")).json() == {"models": []}
    assert len((await http.get("/api/tags")).json()["models"]) == 1


async def test_a_model_is_shown_with_its_abilities(http: Client) -> None:
    loaded(http)
    for field in ("model", "name"):
        shown = (await http.post("/api/show", json={field: "tiny:latest"})).json()
        assert shown["model_info"]["general.architecture"] == "qwen2"
        assert shown["model_info"]["qwen2.context_length"] == 2048
        assert shown["capabilities"] == ["completion", "embedding"]
        assert "<|im_start|>" in shown["template"]
    assert code_of(await http.post("/api/show", json={"model": "x"}), 404) == "unknown_model"


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
    ("/api/generate", {"prompt": "a"}),
    ("/api/embed", {"input": "a"}),
    ("/api/embeddings", {"prompt": "a"}),
    ("/api/pull", {"stream": False}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_an_unknown_model_is_not_found(http: Client, path: str, body: dict[str, Any]) -> None:
    answer = await http.post(path, json=body | {"model": "llama3.2:3b"})
    assert code_of(answer, 404) == "unknown_model"
    assert answer.json()["error"].startswith("model not found: ")
    for name in ("tiny", "tiny:latest"):
        assert (await http.post(path, json=body | {"model": name})).status_code == 200


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_call_without_a_prompt_loads_or_unloads(http: Client, path: str) -> None:
    answer = (await http.post(path, json={"model": "tiny", "keep_alive": "5m"})).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")
    kept = await http.post(path, json={"model": "tiny", "keep_alive": "0s"})
    assert code_of(kept, 400) == "unsupported"


async def test_vectors_have_length_one_in_the_newer_call_only(http: Client) -> None:
    def outputs(request: Any) -> list[Output]:
        made: CompletionSample = sample((), embedding=(3.0, 4.0))
        return [completion(request, made)]

    http.engine.outputs = outputs
    answer = (await http.post("/api/embed", json={"input": ["a", "b"], "dimensions": 2})).json()
    assert answer["embeddings"] == [[3.0, 4.0]] * 2
    assert (answer["prompt_eval_count"], answer["model"]) == (8, "tiny")
    assert (await http.post("/api/embeddings", json={"prompt": "a"})).json() == {
        "embedding": [3.0, 4.0]
    }
    new, _, old = (request.embed for request in http.engine.requests)
    assert new is not None
    assert old is not None
    assert (new.normalize, new.dimensions, old.normalize) == (True, 2, False)
    assert (await http.post("/api/embed", json={"input": ""})).json()["embeddings"] == []
    assert (await http.post("/api/embeddings", json={})).json() == {"embedding": []}


async def test_a_text_that_is_too_long_loses_its_end_to_be_embedded(http: Client) -> None:
    text = "1" * 3000
    await http.post("/api/embed", json={"input": [text, "a"]})
    long, short = http.engine.requests
    assert (len(long.prompt_token_ids or ()), short.prompt) == (2048, "a")
    refused = await http.post("/api/embed", json={"input": [text], "truncate": False})
    assert refused.status_code == 200
    assert http.engine.requests[-1].prompt == text, "which admission refuses"


async def test_what_makes_or_moves_models_is_refused(http: Client) -> None:
    for path in ("/api/create", "/api/push", "/api/copy", "/api/blobs/sha256:1"):
        assert code_of(await http.post(path, json={"model": "a"}), 400) == "unsupported"
    deleted = await http.request("DELETE", "/api/delete", json={"model": "tiny"})
    assert code_of(deleted, 400) == "unsupported"


# --- several models -------------------------------------------------------------------------------


@pytest.fixture
async def deployment() -> Deployment:
    made = Deployment()
    await made.put("small", default=True)
    await made.put("org/large:7b")
    await made.put("cold", "unloaded")
    return made


async def test_a_deployment_s_models_are_listed_loaded_and_unloaded(
    deployment: Deployment,
) -> None:
    front = await opened(deployment)
    async with front.client() as http:
        tags = (await http.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["cold:latest", "org/large:7b", "small:latest"]
        assert (await http.get("/models/small/api/tags")).json()["models"] == tags[2:]
        shown = await http.post("/api/show", json={"name": "cold"})
        assert shown.json()["modelfile"] == "FROM cold\n"
        called = {"messages": [{"role": "user", "content": "a"}]}
        for name in ("org/large:7b", "small:latest"):
            answer = await http.post("/api/chat", json=called | {"model": name})
            assert data_of(answer)[0]["message"]["content"] == f"by {name.removesuffix(':latest')}"
        pulled = await http.post("/api/pull", json={"model": "cold:latest"})
        assert data_of(pulled)[-1] == {"status": "success"}
        await front.seen()
        await http.post("/api/pull", json={"model": "small"})
        unloaded = await http.post("/api/generate", json={"model": "cold", "keep_alive": 0})
        assert unloaded.json()["done_reason"] == "unload"
        await http.request("DELETE", "/api/delete", json={"model": "org/large:7b"})
        unknown = await http.post("/api/pull", json={"model": "other"})
        assert unknown.status_code == 404
    assert deployment.asked == [("load", "cold"), ("unload", "cold"), ("remove", "org/large:7b")]
