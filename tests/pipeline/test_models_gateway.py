"""A gateway in front of two models on one bus: each answers its requests, over all interfaces."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
import safetensors.torch
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI

from nano_inference.config import Config, ModelConfig, load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.kserve.protobuf import METHODS, SERVICE
from nano_inference.pipeline.client import BusClient
from nano_inference.pipeline.models import ModelStatus
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.store.registry import ModelRecord

from ..oracle import announcing
from .builders import error_code
from .conftest import LIMIT_S

FIRST, SECOND = 36, 37
"""Tokens, which are "A" and "B"."""

MODELS = {"first": FIRST, "org/second": SECOND}
"""By their ids the only token that each says."""

IDS = {token: name for name, token in MODELS.items()}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Deployment:
    """Two models that run, a third that does not, and two gateways before them."""

    def __init__(self, config: Config, client: BusClient, gateways: list[Gateway]) -> None:
        self.config = config
        self.client = client
        self.gateway, self.other = gateways

    async def put(self, spec: ModelConfig, *, ready: bool) -> ModelStatus:
        state = "ready" if ready else "unloaded"
        record = ModelRecord(spec=spec, state=state, takes_requests=ready)  # type: ignore[arg-type]
        await self.client.bus.store.models.put(record)
        return ModelStatus(id=spec.id, state=record.state)


def folder_of(parent: Path, token: int) -> str:
    """A model that says one token whatever it is asked."""
    tiny = Config().engine.model_folder
    folder = parent / f"says-{token}"
    shutil.copytree(tiny, folder)
    weights = safetensors.torch.load_file(tiny / "model.safetensors")
    made = {name: each.contiguous() for name, each in announcing(weights, 0).items()}
    made["model.embed_tokens.weight"][token, 0] = 16.0
    safetensors.torch.save_file(made, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(
    redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    parent = tmp_path_factory.mktemp("models")
    specs = [
        ModelConfig(
            id=name,
            path=folder_of(parent, token),
            aliases=(f"alias-{token}",),
            default=token == FIRST,
        )
        for name, token in MODELS.items()
    ]
    overrides: dict[str, Any] = {
        "engine.dtype": "float32",
        "engine.kv_cache_bytes": 1 << 24,
        "bus.url": redis_url,
        "bus.prefix": f"test-{uuid.uuid4().hex[:12]}",
        "gateway.port": 0,
        "gateway.grpc_port": 0,
        "gateway.message_format": "off",
    }
    config = load_config(env={}, overrides=overrides)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(BusClient.connect(config.bus))
        for spec in specs:
            await stack.enter_async_context(Pipeline(config.of_model(spec)))
            await client.bus.store.models.put(
                ModelRecord(spec=spec, state="ready", takes_requests=True)
            )
        cold = ModelConfig(id="cold", path=specs[0].path)
        await client.bus.store.models.put(ModelRecord(spec=cold))
        gateways = [await stack.enter_async_context(Gateway(client, config)) for _ in range(2)]
        yield Deployment(config, client, gateways)


@pytest_asyncio.fixture(loop_scope="module")
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=deployment.gateway.url, timeout=LIMIT_S) as client:
        yield client


@pytest.mark.parametrize(
    ("name", "token"),
    [("first", FIRST), ("alias-36", FIRST), ("org/second", SECOND), ("alias-37", SECOND)],
)
async def test_openai_s_client_reaches_two_models(
    deployment: Deployment, name: str, token: int
) -> None:
    extra = {"return_token_ids": True}
    for base, model in ((f"{deployment.gateway.url}/v1", name), (None, "")):
        url = base or f"{deployment.gateway.url}/models/{name}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
            answer = await openai.completions.create(
                model=model, prompt="hi", max_tokens=3, temperature=0, extra_body=extra
            )
            assert answer.choices[0].token_ids == [token] * 3  # type: ignore[attr-defined]
            messages: Any = [{"role": "user", "content": "hi"}]
            chat = await openai.chat.completions.create(
                model=model, messages=messages, max_tokens=3, temperature=0
            )
            assert chat.model == IDS[token]
            assert chat.choices[0].message.content == answer.choices[0].text
            stream = await openai.completions.create(
                model=model, prompt="hi", max_tokens=3, temperature=0, stream=True
            )
            assert "".join([each.choices[0].text async for each in stream]) == (
                answer.choices[0].text
            )
    async with AsyncOpenAI(base_url=f"{deployment.gateway.url}/v1", api_key="none") as openai:
        listed = [each.id async for each in openai.models.list()]
        assert listed == ["cold", "first", "org/second"]
        found = await openai.models.retrieve(name)
        assert found.id == IDS[token]


@pytest.mark.parametrize(("name", "status"), [("nobody", 404), ("cold", 503)])
async def test_openai_s_client_gets_the_error_of_an_unloaded_model(
    deployment: Deployment, name: str, status: int
) -> None:
    async with AsyncOpenAI(
        base_url=f"{deployment.gateway.url}/v1", api_key="none", max_retries=0
    ) as openai:
        with pytest.raises(APIStatusError) as error:
            await openai.completions.create(model=name, prompt="hi")
    assert error.value.status_code == status
    assert error.value.code == ("model_not_found" if status == 404 else "model_not_loaded")


async def test_anthropic_s_client_reaches_two_models(deployment: Deployment) -> None:
    said = []
    async with AsyncAnthropic(
        base_url=deployment.gateway.url, api_key="none", max_retries=0
    ) as anthropic:
        for name in ("alias-36", "org/second"):
            message = await anthropic.messages.create(
                model=name,
                max_tokens=3,
                extra_body={"temperature": 0},
                messages=[{"role": "user", "content": "hi"}],
            )
            said.append((message.model, message.content[0].text))  # type: ignore[union-attr]
    assert said == [("first", "AAA"), ("org/second", "BBB")]


async def test_new_weights_change_one_model_alone(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    second = f"{deployment.gateway.url}/models/org/second"
    assert (await http.post(f"{second}/pause_generation", json={})).status_code == 200
    asked = {"text": "hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    waiting = asyncio.create_task(http.post(f"{second}/generate", json=asked))
    answer = await http.post("/generate", json=asked)
    assert answer.json()["output_ids"] == [FIRST] * 3
    assert not waiting.done()
    assert (await http.post(f"{second}/continue_generation", json={})).status_code == 200
    assert (await waiting).json()["output_ids"] == [SECOND] * 3
    assert (await http.post("/flush_cache", params={"model": "alias-37"})).status_code == 200


async def test_a_stream_goes_on_at_another_gateway(
    deployment: Deployment, http: httpx.AsyncClient
) -> None:
    body = {"model": "alias-37", "prompt": "hi", "max_tokens": 40, "temperature": 0}
    async with (
        http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
        httpx.AsyncClient(base_url=deployment.other.url, timeout=LIMIT_S) as other,
    ):
        lines = answer.aiter_lines()
        event_id = (await anext(lines)).removeprefix("id: ")
        call_id = (await anext(lines)).partition('"id":"')[2].partition('"')[0]
        again = await other.get(f"/v1/streams/{call_id}")
        behind = await other.get(f"/v1/streams/{call_id}", headers={"Last-Event-ID": event_id})
    assert text_of(again) == "B" * 40
    assert 0 < len(text_of(behind)) < 40


def text_of(stream: httpx.Response) -> str:
    """What a stream that came to its end has said."""
    assert stream.text.endswith("data: [DONE]\n\n")
    return "".join(part.partition('"')[0] for part in stream.text.split('"text":"')[1:])


async def test_routed_requests_are_answered(deployment: Deployment) -> None:
    """A gateway routes requests, if no other process does."""
    for name, token in (("org/second", SECOND), ("alias-36", FIRST), ("", FIRST)):
        request = {"prompt": "hi", "model": name, "sampling": {"max_tokens": 3, "temperature": 0}}
        done = await deployment.client.complete(request)
        assert done.error is None, done.error
        assert list(done.samples[0].token_ids) == [token] * 3
    refused = await deployment.client.complete({"prompt": "hi", "model": "nobody"})
    assert error_code(refused) == "unknown_model"


async def test_grpc_loads_lists_and_infers(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    cold = (await deployment.client.bus.store.models.read())["cold"].spec

    async def load(model: str) -> ModelStatus:
        asked.append(("load", model))
        return await deployment.put(cold, ready=True)

    async def unload(
        model: str, *, timeout_s: float | None = None, remove: bool = False
    ) -> ModelStatus:
        assert not remove
        asked.append(("unload", model))
        return await deployment.put(cold, ready=False)

    monkeypatch.setattr(deployment.client, "load_model", load)
    monkeypatch.setattr(deployment.client, "unload_model", unload)

    async with grpc.aio.insecure_channel(deployment.gateway.places["grpc"]) as channel:

        async def call(rpc: str, /, **fields: Any) -> Any:
            method = METHODS[rpc]
            ask = channel.unary_unary(
                f"/{SERVICE}/{rpc}",
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            return await ask(method.request(**fields), timeout=LIMIT_S)

        async def states() -> dict[str, str]:
            return {each.name: each.state for each in (await call("RepositoryIndex")).models}

        before = await states()
        assert (before["first"], before["org/second.tokens"]) == ("READY", "READY")
        assert before["cold"] == "UNAVAILABLE"
        assert (await call("ModelReady", name="alias-37.score")).ready
        assert (await call("ServerReady")).ready
        await call("RepositoryModelLoad", model_name="cold")
        await call("RepositoryModelUnload", model_name="cold")
        assert asked == [("load", "cold"), ("unload", "cold")]
        inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]
        infer = {"inputs": inputs, "raw_input_contents": [b"\x02\x00\x00\x00hi"]}
        outputs = []
        for name in ("first", "alias-37"):
            answer = await call("ModelInfer", model_name=name, **infer)
            outputs.append((answer.model_name, answer.raw_output_contents[0]))
        assert [name for name, _ in outputs] == ["first", "org/second"]
        assert outputs[0][1] != outputs[1][1]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("ModelInfer", model_name="cold", **infer)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("ModelInfer", model_name="nobody", **infer)
        assert error.value.code() == grpc.StatusCode.NOT_FOUND
