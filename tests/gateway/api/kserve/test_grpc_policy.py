"""What the policy says holds for each request over gRPC, be it one of a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.policy.administration import Administration
from nano_inference.kserve.codec import encode_infer_request
from nano_inference.kserve.pool import BufferPool
from nano_inference.kserve.protobuf import message
from nano_inference.kserve.tensors import NamedTensor

from .grpc_calls import Client, Engine, Model, code_of, request, served, values

KEYS = {"policy__backend": "bus"}


def administration(gateway: Gateway) -> Administration:
    store = gateway._app.policy.store
    assert store is not None
    return Administration(store)


async def key(gateway: Gateway, **fields: Any) -> tuple[tuple[str, str], ...]:
    """A new one, as metadata that brings it."""
    wish = {"name": "somebody", "scopes": ["generate"], **fields}
    made = await administration(gateway).create_key(wish)
    return (("authorization", f"Bearer {made['key']}"),)


def prompt(text: str) -> Any:
    data = np.array([text.encode()], dtype=np.object_)
    return encode_infer_request("tiny", [NamedTensor("text_input", data)])


async def codes(call: Client, metadata: Any, *texts: str) -> list[str]:
    """Of some requests of one stream, one after the other, each the stable code; "" for none."""
    stream, found = call.stream(metadata=metadata), []
    for text in texts:
        await stream.send(prompt(text))
        found.append(code_of(await stream.read()))
    assert await stream.read_all() == []
    return found


async def test_a_guardrail() -> None:
    engine = Engine()
    async with served(engine=engine, **KEYS) as (gateway, call):
        metadata = await key(gateway)
        await administration(gateway).set_guardrails({"literals": ["bad"], "patterns": []})
        blocked = await call("ModelInfer", prompt("so \uff42ad"), metadata=metadata)
        assert (blocked.code, blocked.stable) == ("INVALID_ARGUMENT", "content_filter")
        assert await codes(call, metadata, "fine", "BAD", "fine") == ["", "content_filter", ""]
    assert [request.prompt for request in engine.requests] == ["fine", "fine"]


async def test_limits() -> None:
    async with served(**KEYS) as (gateway, call):
        metadata = await key(gateway, limits={"requests_per_minute": 2})
        assert await codes(call, metadata, "a", "b", "c") == ["", "", "rate_limit_exceeded"]
        full = await call("ModelInfer", prompt("d"), metadata=metadata)
        assert (full.code, full.stable) == ("RESOURCE_EXHAUSTED", "rate_limit_exceeded")
        assert int(full.trailers["retry-after"]) >= 1
        assert full.trailers["x-ratelimit-limit-requests"] == "2"


async def test_the_audit_log_has_the_prompt_of_each(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    audit = {"policy__audit_file": str(file), "policy__audit_key": "k" * 32}
    async with served(**KEYS, **audit, policy__audit_text=True) as (gateway, call):
        metadata = await key(gateway, tenant="gold")
        assert await codes(call, metadata, "one", "two") == ["", ""]
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    told = [(line["prompt"], line["answer"], line["tenant"]) for line in calls]
    assert told == [(["one"], ["five six"], "gold"), (["two"], ["five six"], "gold")]
    assert {line["route"] for line in calls} == {"/inference.GRPCInferenceService/ModelStreamInfer"}
    assert [line["completion_tokens"] for line in calls] == [2, 2]


async def test_a_region_of_another_key_is_neither_read_nor_written() -> None:
    async with served(Model(), shared_memory=True, **KEYS) as (gateway, call):
        mine, other = [await key(gateway, tenant=name) for name in ("one", "other")]
        with BufferPool(8, 1) as pool:
            slot = pool.acquire_slot_blocking()
            here = slot.scratch(2, "<f4")
            here[:] = [5, 6]
            region = message("SystemSharedMemoryRegisterRequest")(
                name="mine", key=pool.key, byte_size=8
            )
            asked = request()
            del asked.raw_input_contents[:]
            asked.inputs[0].parameters["shared_memory_region"].string_param = "mine"
            asked.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
            into = request()
            output = into.outputs.add(name="x")
            output.parameters["shared_memory_region"].string_param = "mine"
            output.parameters["shared_memory_byte_size"].int64_param = 8
            await call("SystemSharedMemoryRegister", region, metadata=mine)
            assert not (await call("SystemSharedMemoryStatus", metadata=other)).regions
            await call("SystemSharedMemoryUnregister", metadata=other)
            for each in (asked, into):
                answer = await call("ModelInfer", each, metadata=other)
                assert (answer.code, answer.stable) == ("NOT_FOUND", "unknown_region")
                stream = call.stream(metadata=other)
                await stream.send(each)
                assert code_of(await stream.read()) == "unknown_region"
            assert values(await call("ModelInfer", asked, metadata=mine)) == [5, 6]
            assert not (await call("ModelInfer", into, metadata=mine)).raw_output_contents
            assert here.tolist() == [1, 2]
