"""The policy holds over HTTP and gRPC, for each request of a stream as well."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nano_inference.gateway.api.kserve.operations import OPERATIONS, Operation, paths_of
from nano_inference.gateway.caller import SCOPES, may
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.policy.administration import Administration
from nano_inference.kserve.grpc_codec import encode_infer_request
from nano_inference.kserve.pool import BufferPool
from nano_inference.kserve.protobuf import METHODS
from nano_inference.kserve.tensors import InferRequest, text_tensor

from ...fake import FakeEngine
from .calls import Client, Failed, Model, code_of, request, served, values

KEYS = {"policy__backend": "bus"}
INFER = "ModelInfer"
UNSUPPORTED = {
    "CudaSharedMemoryRegister",
    "LogSettings",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "TraceSetting",
}


def administration(gateway: Gateway) -> Administration:
    store = gateway._app.policy.store
    return Administration(store)


async def key(gateway: Gateway, *scopes: str, **fields: Any) -> dict[str, str]:
    """The header of a new key."""
    wish = {"name": "somebody", "scopes": scopes or ("generate",), **fields}
    made = await administration(gateway).create_key(wish)
    return {"authorization": f"Bearer {made['key']}"}


class Interface:
    """Calls a gateway over one transport, and returns stable codes, "" for success."""

    def __init__(self, name: str, gateway: Gateway, call: Client, http: httpx.AsyncClient) -> None:
        self.name, self.gateway, self._call, self._http = name, gateway, call, http

    async def run(
        self, operation: Operation, headers: dict[str, str], name: str = "", **fields: Any
    ) -> tuple[str, Any]:
        """An operation's code, and its response: JSON, or a message."""
        if self.name == "grpc":
            field = "model_name" if operation.method.startswith("RepositoryModel") else "name"
            named = {field: name} if name else {}
            asked = METHODS[operation.method].request(**named, **fields)
            found = await self._call(operation.method, asked, metadata=tuple(headers.items()))
            return (found.stable, None) if isinstance(found, Failed) else ("", found)
        methods, _, optional = operation.route.partition(" ")
        method, paths = methods.split(",")[0], paths_of(optional)
        fitting = [path for path in paths if ("{" in path) == bool(name)]
        path = (fitting or paths)[-1]
        path = path.replace("{model:name}", name or "m").replace("{region:name}", name or "r")
        answer = await self._http.request(
            method, path, json=fields if method == "POST" else None, headers=headers
        )
        code = answer.headers.get("X-Error-Code", "")
        return code, answer.json() if not code and answer.content else None

    async def infer(
        self, headers: dict[str, str], model: str = "echo", read: dict[str, Any] | None = None
    ) -> tuple[str, list[float]]:
        """The code and values of a call with [1, 2], or with an input in a region."""
        if self.name == "grpc":
            asked = request(model)
            kinds = {str: "string_param", int: "int64_param"}
            if read:
                del asked.raw_input_contents[:]
                for name, value in read.items():
                    setattr(asked.inputs[0].parameters[name], kinds[type(value)], value)
            found = await self._call(INFER, asked, metadata=tuple(headers.items()))
            if isinstance(found, Failed):
                return found.stable, []
            return "", values(found)
        data = {"parameters": read} if read else {"data": [1, 2]}
        body: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], **data}]}
        path = f"/v2/models/{model}/infer"
        answer = await self._http.post(path, json=body, headers=headers)
        if answer.status_code != 200:
            return answer.headers["X-Error-Code"], []
        return "", answer.json()["outputs"][0]["data"]


@asynccontextmanager
async def opened(name: str, *models: Model, **settings: Any) -> AsyncIterator[Interface]:
    async with (
        served(*models, **KEYS, **settings) as (gateway, call),
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        yield Interface(name, gateway, call, http)


INTERFACES = pytest.mark.parametrize("interface", ["http", "grpc"])


@INTERFACES
async def test_each_operation_needs_its_scope(interface: str) -> None:
    """Health checks are open to all."""
    assert {each.method for each in OPERATIONS} == METHODS.keys() - {INFER, "ModelStreamInfer"}
    async with opened(interface, Model()) as ask:
        for scope in SCOPES:
            headers = await key(ask.gateway, scope)
            for operation in OPERATIONS:
                code, _ = await ask.run(operation, headers)
                refused = code == "insufficient_scope"
                assert refused is not may([scope], operation.needed), (scope, operation.method)
                assert refused or (code == "unsupported") == (operation.method in UNSUPPORTED)
            code, _ = await ask.infer(headers)
            assert (code == "insufficient_scope") is not may([scope], "generate")
        for operation in OPERATIONS:
            code, _ = await ask.run(operation, {})
            assert (code == "missing_api_key") == (operation.needed != "nothing")
        assert (await ask.infer({}))[0] == "missing_api_key"


@INTERFACES
async def test_a_key_for_one_model_shows_no_other(interface: str) -> None:
    async with opened(interface, Model("one"), Model("two")) as ask:
        operations = {each.method: each for each in OPERATIONS}
        headers = await key(ask.gateway, models=["one"])
        _, index = await ask.run(operations["RepositoryIndex"], headers)
        _, statistics = await ask.run(operations["ModelStatistics"], headers)
        if interface == "grpc":
            names = [[each.name for each in index.models]]
            names.append([each.name for each in statistics.model_stats])
        else:
            names = [[each["name"] for each in index]]
            names.append([each["name"] for each in statistics["model_stats"]])
        assert names == [["one"], ["one"]]
        assert await ask.infer(headers, "one") == ("", [1, 2])
        assert (await ask.infer(headers, "two"))[0] == "model_not_found"
        for method in ("ModelMetadata", "ModelConfig", "ModelStatistics"):
            assert (await ask.run(operations[method], headers, "one"))[0] == ""
            assert (await ask.run(operations[method], headers, "two"))[0] == "model_not_found"


@INTERFACES
async def test_a_region_of_another_tenant_is_not_reachable(interface: str) -> None:
    """Nor does it hide another tenant's region of the same name; keys of one tenant share it."""
    place = {"shared_memory_region": "mine", "shared_memory_byte_size": 8}
    operations = {each.method: each for each in OPERATIONS}
    register, status, unregister = (
        operations[f"SystemSharedMemory{what}"] for what in ("Register", "Status", "Unregister")
    )
    async with opened(interface, Model(), shared_memory=True) as ask:
        mine, same = [await key(ask.gateway, tenant="one") for _ in range(2)]
        other = await key(ask.gateway, tenant="other")
        with BufferPool(8, 1) as pool, BufferPool(8, 1) as another:
            for number, each in enumerate((pool, another)):
                each.acquire_slot_blocking().scratch(2, "<f4")[:] = [5 + number, 6]
            assert (await ask.run(register, mine, "mine", key=pool.key, byte_size=8))[0] == ""
            # Whatever a client calls its tenant.
            for headers in (other, other | {"x-tenant": "one"}):
                code, found = await ask.run(status, headers)
                assert (code, not (found if interface == "http" else found.regions)) == ("", True)
                assert (await ask.run(unregister, headers))[0] == ""
                assert (await ask.infer(headers, read=place))[0] == "unknown_region"
            assert (await ask.run(register, other, "mine", key=another.key, byte_size=8))[0] == ""
            for headers, held in ((mine, 5), (same, 5), (other, 6)):
                assert await ask.infer(headers, read=place) == ("", [held, 6])


async def test_the_tenant_of_a_call() -> None:
    model = Model()
    async with served(model) as (_, call):
        await call(INFER, request())
        await call(INFER, request(), metadata=(("x-tenant", "gold"),))
        answer = await call(INFER, request(), metadata=(("x-tenant", "g" * 1000),))
        assert answer.stable == "invalid_tenant"
    assert [each.call.tenant for each in model.calls] == ["http:127.0.0.1", "gold"]


# --- streams --------------------------------------------------------------------------------------


def prompt(text: str) -> Any:
    inputs = (text_tensor("text_input", text),)
    return encode_infer_request(InferRequest(model_name="tiny", inputs=inputs))


async def codes(call: Client, headers: dict[str, str], *texts: str) -> list[str]:
    """The stable codes of some requests of one stream, one after the other."""
    stream, found = call.stream(metadata=tuple(headers.items())), []
    for text in texts:
        await stream.send(prompt(text))
        found.append(code_of(await stream.read()))
    assert await stream.read_all() == []
    return found


async def test_a_stream_needs_the_scope_generate(tmp_path: Path) -> None:
    """A refused stream is in the audit log."""
    audit = tmp_path / "audit"
    settings = {"policy__audit_file": str(audit), "policy__audit_key": "k" * 32}
    async with served(**KEYS, **settings) as (gateway, call):
        assert [each.stable for each in await call.stream().read_all()] == ["missing_api_key"]
        for scope in SCOPES:
            headers = await key(gateway, scope)
            found = await call.stream(metadata=tuple(headers.items())).read_all()
            assert ([each.stable for each in found] == ["insufficient_scope"]) is not may(
                [scope], "generate"
            )
    line = json.loads(audit.read_text().splitlines()[0])
    assert (line["status"], line["code"]) == (401, "missing_api_key")


async def test_a_revoked_key_ends_with_the_next_request_of_a_stream() -> None:
    async with served(Model(decoupled=True), **KEYS) as (gateway, call):
        stream = call.stream(metadata=tuple((await key(gateway)).items()))
        await stream.send(request())
        assert values((await stream.read()).infer_response) == [1, 2]
        store = gateway._app.policy.store
        await administration(gateway).revoke_key(next(iter((await store.document()).keys)))
        await stream.send(request())
        assert [code_of(part) for part in await stream.read_all()] == ["invalid_api_key"]


async def test_guardrails_check_each_request() -> None:
    engine = FakeEngine()
    async with served(engine=engine, **KEYS) as (gateway, call):
        headers = await key(gateway)
        await administration(gateway).set_guardrails({"literals": ["bad"], "patterns": []})
        blocked = await call(INFER, prompt("so \uff42ad"), metadata=tuple(headers.items()))
        assert (blocked.code, blocked.stable) == ("INVALID_ARGUMENT", "content_filter")
        assert await codes(call, headers, "fine", "BAD", "fine") == ["", "content_filter", ""]
    assert [request.prompt for request in engine.requests] == ["fine", "fine"]


async def test_limits_count_each_request() -> None:
    async with served(**KEYS) as (gateway, call):
        headers = await key(gateway, limits={"requests_per_minute": 2})
        assert await codes(call, headers, "a", "b", "c") == ["", "", "rate_limit_exceeded"]
        full = await call(INFER, prompt("d"), metadata=tuple(headers.items()))
        assert (full.code, full.stable) == ("RESOURCE_EXHAUSTED", "rate_limit_exceeded")
        assert int(full.trailers["retry-after"]) >= 1
        assert full.trailers["x-ratelimit-limit-requests"] == "2"


async def test_the_audit_log_has_the_prompt_of_each_request(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    audit = {"policy__audit_file": str(file), "policy__audit_key": "k" * 32}
    async with served(**KEYS, **audit, policy__audit_text=True) as (gateway, call):
        headers = await key(gateway, tenant="gold")
        assert await codes(call, headers, "one", "two") == ["", ""]
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    answered = [(line["prompt"], line["answer"], line["tenant"]) for line in calls]
    assert answered == [(["one"], ["five six"], "gold"), (["two"], ["five six"], "gold")]
    assert {line["route"] for line in calls} == {"/inference.GRPCInferenceService/ModelStreamInfer"}
    assert [line["completion_tokens"] for line in calls] == [2, 2]
