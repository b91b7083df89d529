"""Adapters of a running pipeline: loaded, replaced and unloaded, over the bus and over HTTP."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from nano_inference import Completion, Pipeline
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.backend import open_backend
from nano_inference.gateway.policy.store import PolicyStore
from nano_inference.gateway.serving import lane_state
from nano_inference.pipeline import pipeline as pipeline_module

from ..gateway.policy.conftest import bearer
from ..stages.executor.runner.adapters.making import make_adapter
from . import short_model
from .builders import asking, error_code
from .conftest import LIMIT_S, MakeConfig

# --- over the bus ----------------------------------------------------------------------------


SHORT_MODEL = True
PROMPT = "12 + 30 ="
TOKENS = 60
LONG = 300


@pytest.fixture(autouse=True)
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways know adapters by the lanes' reports, and a load ends when its own gateway does."""
    monkeypatch.setattr(pipeline_module, "BEAT_S", 0.05)
    monkeypatch.setattr(lane_state, "ASKED_EVERY_S", 0.05)


@cache
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(short_model.folder(), dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        make_adapter(base(), seed, made / name)
    return made


def request(model: str = "", tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return asking(PROMPT, tokens, model=model, **fields)


async def refusal(pipeline: Pipeline, model: str) -> str:
    """The code of the error; "" if there was none."""
    completion = await pipeline.complete(request(model, tokens=2))
    return "" if completion.error is None else completion.error.code


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
async def test_an_adapter_can_be_unloaded_while_requests_run(
    pipeline: Pipeline, folder: Path, in_flight: Any
) -> None:
    client = pipeline.client
    await client.load_adapter("a", str(folder / "one"))
    unloading: asyncio.Task[None] | None = None
    completion: Completion | None = None
    async for output in pipeline.submit(request("a", LONG)):
        if isinstance(output, Completion):
            completion = output
        elif unloading is None:
            unloading = asyncio.create_task(client.unload_adapter("a", in_flight=in_flight))
            while await refusal(pipeline, "a") != "unknown_model":
                pass
            assert in_flight == "abort" or not unloading.done()
    assert unloading is not None
    assert completion is not None
    await unloading
    if in_flight == "abort":
        assert completion.status == "cancelled"
        assert error_code(completion) == "aborted"
    else:
        assert completion.status == "done"
        assert len(completion.samples[0].token_ids) == LONG


# --- over HTTP -------------------------------------------------------------------------------


BASE = "tiny"


async def completed(http: httpx.AsyncClient, model: str) -> Any:
    body = {"model": model, "prompt": "12 + 30 =", "max_tokens": 12, "temperature": 0}
    return await http.post("/v1/completions", json=body | {"ignore_eos": True})


async def text_of(http: httpx.AsyncClient, model: str) -> str:
    answer = await completed(http, model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


async def test_adapters_load_over_http_as_with_vllm(http: httpx.AsyncClient, folder: Path) -> None:
    refused = await completed(http, "a")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    load = {"lora_name": "a", "lora_path": str(folder / "one")}
    loaded = await http.post("/v1/load_lora_adapter", json=load)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'a' added successfully.",
    )
    models = (await http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["parent"], each["root"]) for each in models] == [
        (BASE, None, str(short_model.folder())),
        ("a", BASE, str(folder / "one")),
    ]
    assert (await http.get("/v1/models/a")).json()["parent"] == BASE
    first, base = await text_of(http, "a"), await text_of(http, BASE)
    assert first != base
    message = {
        "model": "a",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "12 + 30 ="}],
    }
    assert (await http.post("/v1/messages", json=message)).json()["model"] == "a"
    counted = await http.post("/v1/messages/count_tokens", json=message | {"model": "b"})
    assert counted.status_code in (400, 404)

    again = await http.post("/v1/load_lora_adapter", json=load)
    assert again.status_code == 400
    load |= {"lora_path": str(folder / "two"), "load_inplace": True}
    assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200
    assert await text_of(http, "a") not in (first, base)
    bad = await http.post(
        "/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": str(folder)}
    )
    assert bad.status_code == 400
    assert bad.json()["error"]["code"] == "adapter_refused"

    unload = {"lora_name": "a"}
    assert (await http.post("/v1/unload_lora_adapter", json=unload)).status_code == 200
    assert (await completed(http, "a")).status_code == 404
    assert (await http.post("/v1/unload_lora_adapter", json=unload)).status_code == 404


async def test_adapters_load_over_http_as_with_sglang(
    http: httpx.AsyncClient, folder: Path
) -> None:
    for name in ("one", "two"):
        load = {"lora_name": name, "lora_path": str(folder / name), "pinned": False}
        answer = await http.post("/load_lora_adapter", json=load)
        assert answer.status_code == 200, answer.text
    assert answer.json()["loaded_adapters"] == {name: str(folder / name) for name in ("one", "two")}
    body = {
        "text": ["12 + 30 ="] * 3,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        "lora_path": ["one", None, "two"],
    }
    answers = (await http.post("/generate", json=body)).json()
    assert len({each["text"] for each in answers}) == 3
    assert answers[0]["text"] == await text_of(http, "one")
    assert answers[1]["text"] == await text_of(http, BASE)
    unknown = await http.post("/generate", json=body | {"lora_path": "three"})
    assert unknown.status_code in (400, 404)
    assert unknown.json()["error"]["code"] == "unknown_model"
    failed = await http.post("/unload_lora_adapter", json={"lora_name": "three"})
    assert failed.json()["success"] is False
    assert (await http.post("/unload_lora_adapter", json={"lora_name": "one"})).json()["success"]


async def test_as_many_adapters_load_as_there_may_be_of_the_largest_rank(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """All in one batch, beside the model alone; one more, or a larger one, is refused."""
    config = make_config(engine__max_adapters=3)
    most = config.engine
    model = AutoModelForCausalLM.from_pretrained(short_model.folder(), dtype="float32")
    for seed, rank in enumerate((most.max_adapter_rank, most.max_adapter_rank + 1)):
        make_adapter(model, seed, tmp_path / f"of-{rank}", r=rank, lora_alpha=2 * rank)
    names = [f"a{number}" for number in range(most.max_adapters)]
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http,
    ):

        async def loaded(name: str, rank: int = most.max_adapter_rank) -> str:
            """The code of the error, "" for none."""
            load = {"lora_name": name, "lora_path": str(tmp_path / f"of-{rank}")}
            answer = await http.post("/v1/load_lora_adapter", json=load)
            return "" if answer.is_success else str(answer.json()["error"]["code"])

        assert await loaded("larger", most.max_adapter_rank + 1) == "adapter_too_large"
        base = await text_of(http, BASE)
        assert [await loaded(name) for name in names] == [""] * len(names)
        assert await loaded("more") == "adapter_limit"
        alone = await text_of(http, names[0])
        assert alone != base
        texts = await asyncio.gather(*(text_of(http, name) for name in [*names, BASE]))
        assert texts == [alone] * len(names) + [base]
        unload = {"lora_name": names[0]}
        assert (await http.post("/v1/unload_lora_adapter", json=unload)).is_success
        assert await loaded("more") == ""


async def test_keys_and_other_gateways_accept_adapters(
    make_config: MakeConfig, folder: Path
) -> None:
    """The policy covers adapters; a key for some models may use theirs, and load none."""
    config = make_config(policy__backend="bus")
    async with Pipeline(config) as pipeline:
        store = PolicyStore(open_backend(config.policy, pipeline.client.bus.store.policy))
        administration = Administration(store)
        trainer = await administration.create_key(
            {"name": "trainer", "scopes": ["generate", "weights"]}
        )
        user = await administration.create_key({"name": "user", "models": ["one"]})
        async with (
            Gateway(pipeline.client, config) as gateway,
            Gateway(pipeline.client, config) as other,
            httpx.AsyncClient(base_url=gateway.url, headers=bearer(trainer)) as first,
            httpx.AsyncClient(base_url=other.url, headers=bearer(user)) as second,
        ):
            for name in ("one", "two"):
                load = {"lora_name": name, "lora_path": str(folder / name)}
                answer = await first.post("/v1/load_lora_adapter", json=load, timeout=LIMIT_S)
                assert answer.status_code == 200, answer.text
            while not (models := (await second.get("/v1/models")).json()["data"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert [each["id"] for each in models] == ["one"]
            assert await text_of(second, "one")
            for name in ("two", BASE):
                assert (await completed(second, name)).status_code == 404
            assert (await second.post("/v1/load_lora_adapter", json=load)).status_code == 403
