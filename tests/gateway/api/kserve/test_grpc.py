"""KServe V2 over gRPC: what each method answers, and how each kind of call ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
import tritonclient.grpc
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.public import Usage
from nano_inference.config import RequestError
from nano_inference.gateway.api.kserve.grpc_connection import (
    MOST_BYTES,
    MOST_FIELDS,
    check_fields,
    count_fields,
    failure_of,
)
from nano_inference.gateway.api.kserve.grpc_server import MOST_AT_ONCE
from nano_inference.gateway.api.kserve.served import Answer, ModelCall
from nano_inference.gateway.server.http import EngineError
from nano_inference.kserve.codec import MAX_TENSORS
from nano_inference.kserve.protobuf import METHODS, message

from ....errors import raises
from .calls import Client, Failed, Model, code_of, request, served, until, values

CODES = {
    "invalid_tensor": "INVALID_ARGUMENT",
    "missing_api_key": "UNAUTHENTICATED",
    "insufficient_scope": "PERMISSION_DENIED",
    "model_not_found": "NOT_FOUND",
    "unknown_region": "NOT_FOUND",
    "request_timeout": "DEADLINE_EXCEEDED",
    "expired": "DEADLINE_EXCEEDED",
    "weights_timeout": "DEADLINE_EXCEEDED",
    "request_too_large": "RESOURCE_EXHAUSTED",
    "overloaded": "RESOURCE_EXHAUSTED",
    "rate_limit_exceeded": "RESOURCE_EXHAUSTED",
    "unsupported": "UNIMPLEMENTED",
    "idempotency_key_reused": "INVALID_ARGUMENT",
    "shutting_down": "UNAVAILABLE",
    "not_ready": "UNAVAILABLE",
    "internal_error": "INTERNAL",
    "lane_failed": "INTERNAL",
}


@pytest.mark.parametrize(("code", "name"), CODES.items())
def test_each_kind_of_error_keeps_its_meaning(code: str, name: str) -> None:
    failure = failure_of(EngineError("no", code=code, retry_after_s=3.0))
    assert failure.code.name == name
    assert failure.trailers()["nano-inference-code"] == code
    assert failure.trailers()["retry-after"] == "3"


def test_long_messages_are_shortened() -> None:
    failure = failure_of(RequestError("é" * 10_000, code="invalid_request"))
    assert len(failure.details) < 1000


# --- what can't be answered -----------------------------------------------------------------------


async def test_malformed_messages_are_refused() -> None:
    async with served(Model()) as (_, call):
        for method in METHODS.keys() - {"ModelStreamInfer"}:
            answer = await call(method, b"\xff\xff")
            assert (answer.code, answer.stable) == ("INVALID_ARGUMENT", "malformed"), method
        empty = call.stream(timeout=None)
        one = call.channel.stream_unary(METHODS["ModelInfer"].path)()
        await one.done_writing()
        assert (await call.end("ModelInfer", one)).code == "RESOURCE_EXHAUSTED"
        assert await empty.read_all() == []


async def test_impossible_requests_are_refused() -> None:
    async with served(Model()) as (_, call):
        strange = request()
        strange.inputs[0].shape[0] = 7
        wrong = await call("ModelInfer", strange, metadata=(("x-request-id", "mine"),))
        assert (wrong.code, wrong.stable) == ("INVALID_ARGUMENT", "invalid_tensor")
        assert wrong.trailers["x-request-id"] == "mine"
        assert (await call("ModelInfer", request("none"))).code == "NOT_FOUND"


@pytest.mark.parametrize(
    "compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]
)
async def test_large_messages_are_refused_compressed_or_not(compression: grpc.Compression) -> None:
    """gRPC itself refuses the message."""
    most = 100_000
    large = request(values=[0.0] * most).SerializeToString()
    small = request(values=[0.0] * (most // 8)).SerializeToString()
    async with served(Model(), max_body_bytes=most) as (_, call):
        refused = await call("ModelInfer", large, compression=compression)
        assert refused.code == "RESOURCE_EXHAUSTED"
        answer = await call("ModelInfer", small, compression=compression)
        assert len(values(answer)) == most // 8


async def test_answers_may_be_larger_than_requests() -> None:
    """Triton's client takes answers of this size."""
    model = Model()
    async with served(model, max_body_bytes=40 << 20, max_bodies_bytes=512 << 20) as (gateway, _):
        place = f"127.0.0.1:{gateway.grpc_port}"
        client = await asyncio.to_thread(tritonclient.grpc.InferenceServerClient, place)
        large = tritonclient.grpc.InferInput("x", [8 << 20], "FP32")
        large.set_data_from_numpy(np.zeros(8 << 20, np.float32))
        result = await asyncio.to_thread(client.infer, "echo", [large])
        assert result.as_numpy("x").shape == (8 << 20,)
        await asyncio.to_thread(client.close)


async def test_internal_errors_are_not_shown_to_clients() -> None:
    model = Model()
    model.failure = ZeroDivisionError("a secret")
    async with served(model) as (_, call):
        with structlog.testing.capture_logs() as lines:
            broken = await call("ModelInfer", request())
            stream = call.stream()
            await stream.send(request())
            parts = await stream.read_all()
    assert (broken.code, broken.stable) == ("INTERNAL", "internal_error")
    assert "secret" not in broken.details + parts[-1].error_message
    assert [line["event"] for line in lines].count("grpc_handler_failed") == 2


# --- time ----------------------------------------------------------------------------------------

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("options", "parameters", "at_most_s"),
    [
        ({"timeout": 100.0}, {}, 100),
        ({"metadata": (("x-budget-ms", "90000"),)}, {}, 90),
        ({}, {"timeout_ns": 80 * 10**9}, 80),
        ({}, {"timeout": 70 * 10**6}, 70),
        (
            {"timeout": 60.0, "metadata": (("x-budget-ms", str(HOUR_MS)),)},
            {"timeout_ns": 10**13},
            60,
        ),
        ({"timeout": 100.0}, {"timeout_ns": 50 * 10**9}, 50),
    ],
)
async def test_the_shortest_of_all_limits_holds(
    options: dict[str, Any], parameters: dict[str, Any], at_most_s: int
) -> None:
    model = Model()
    async with served(model) as (_, call):
        await call("ModelInfer", request(**parameters), **options)
    left_ns = model.calls[0].call.left_ns
    # A client of gRPC sends its time limit rounded up: from 100 s upwards to whole seconds.
    assert at_most_s - 30 < left_ns / 1e9 <= at_most_s + 1


class Billed(Model):
    """A model with one request in the pipeline."""

    async def answer_all(self, call: ModelCall, answer: Answer) -> None:
        spent = Usage(time={"queue": 20, "own_decode": 300}, billed_ns=7)
        if not call.many:
            call.call.account.add(spent)
        await super().answer_all(call, answer)
        call.call.account.add(spent)


def spent_ns(response: Any) -> dict[str, int]:
    found = {name: value.int64_param for name, value in response.parameters.items()}
    return {name: found[name] for name in found if name.endswith("_ns")}


async def test_the_time_is_in_the_only_response_and_in_the_last_one_of_a_stream() -> None:
    async with served(Billed(), Billed("many", decoupled=True, answers=2)) as (_, call):
        own = spent_ns(await call("ModelInfer", request()))
        assert own.pop("time_delivery_ns") > 0
        assert own == {"time_queue_ns": 20, "time_own_decode_ns": 300, "billed_ns": 7}
        stream = call.stream()
        await stream.send(request("many", triton_enable_empty_final_response=True))
        *parts, last = [part.infer_response for part in await stream.read_all()]
    assert [spent_ns(part) for part in parts] == [{}, {}]
    found = spent_ns(last)
    assert (found["time_own_decode_ns"], found["billed_ns"]) == (300, 7)


async def test_no_time_limit_by_default() -> None:
    model = Model()
    async with served(model) as (_, call):
        assert values(await call("ModelInfer", request())) == [1, 2]
        # Some clients set this for no limit.
        assert values(await call("ModelInfer", request(), timeout=1e9)) == [1, 2]
    assert model.calls[0].call.deadline_ns is None


@pytest.mark.parametrize("parameters", [{"timeout_ns": 1000}, {"timeout": 1}, {"timeout_ns": -1}])
async def test_expired_calls_are_cancelled(parameters: dict[str, int]) -> None:
    model = Model(held=True)
    async with served(model) as (_, call):
        late = await call("ModelInfer", request(**parameters))
        assert (late.code, late.stable) == ("DEADLINE_EXCEEDED", "expired")
        stream = call.stream()
        await stream.send(request(**parameters))
        assert [code_of(part) for part in await stream.read_all()] == ["expired"]
    assert model.ended == ["cancelled"] * 2


async def test_invalid_time_limits_are_refused() -> None:
    async with served(Model()) as (_, call):
        for parameters in ({"timeout": "soon"}, {"timeout_ns": True}):
            answer = await call("ModelInfer", request(**parameters))
            assert (answer.code, answer.stable) == ("INVALID_ARGUMENT", "invalid_budget")
        answer = await call("ModelInfer", request(), metadata=(("x-budget-ms", "soon"),))
        assert (answer.code, answer.stable) == ("INVALID_ARGUMENT", "invalid_budget")


# --- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("leaves", ["cancel", "deadline", "channel"])
@pytest.mark.parametrize("streams", [False, True])
async def test_disconnect_cancels_requests(leaves: str, streams: bool) -> None:
    model = Model(held=True)
    async with served(model) as (gateway, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
            call = Client(channel)
            options = {"timeout": 0.3} if leaves == "deadline" else {}
            if streams:
                stream = call.stream(**options)
                await stream.send(request(request_id="0"), request(request_id="1"))
                under_way, asked = stream.call, 2
            else:
                data = request(request_id="0").SerializeToString()
                under_way, asked = call.begin("ModelInfer", data, **options), 1
            await until(lambda: len(model.calls) == asked)
            if leaves == "cancel":
                under_way.cancel()
            elif leaves == "channel":
                await channel.close(None)
            await until(lambda: model.ended.count("cancelled") == asked)
        await gateway._server.calls.idle()


# --- streams -------------------------------------------------------------------------------------


async def test_requests_of_a_stream_run_concurrently() -> None:
    slow, fast = Model("slow", decoupled=True, held=True), Model("fast", decoupled=True)
    async with served(slow, fast) as (_, call):
        stream = call.stream()
        await stream.send(request("slow", request_id="0"), request("fast", request_id="1"))
        assert (await stream.read()).infer_response.id == "1"
        slow.free.set()
        (last,) = await stream.read_all()
        assert last.infer_response.id == "0"
        assert await stream.call.code() == grpc.StatusCode.OK


async def test_an_error_ends_its_own_request() -> None:
    model = Model(decoupled=True)
    async with served(model) as (_, call):
        stream = call.stream()
        strange = request(request_id="1")
        strange.inputs[0].datatype = "FP33"
        await stream.send(request(request_id="0"), strange, request("none", request_id="2"))
        await stream.send(request(request_id="3"))
        parts = {part.infer_response.id: part for part in await stream.read_all()}
        assert values(parts["0"].infer_response) == values(parts["3"].infer_response) == [1, 2]
        for name, code, number in (("1", "invalid_tensor", 3), ("2", "model_not_found", 5)):
            assert parts[name].error_message
            assert code_of(parts[name]) == code
            assert parts[name].infer_response.parameters["grpc-status"].int64_param == number
        assert await stream.call.code() == grpc.StatusCode.OK


def finals(parts: list[Any]) -> list[bool]:
    return [part.infer_response.parameters["triton_final_response"].bool_param for part in parts]


@pytest.mark.parametrize("wanted", [True, False])
async def test_the_final_response_is_marked_on_request(wanted: bool) -> None:
    model = Model(decoupled=True, answers=3)
    async with served(model, Model("one")) as (_, call):
        stream = call.stream()
        asked = {"triton_enable_empty_final_response": wanted}
        await stream.send(request(request_id="a", **asked))
        parts = await stream.read_all()
        assert finals(parts) == [False] * 3 + [True] * wanted
        if wanted:
            last = parts[-1].infer_response
            assert (last.id, last.model_name, len(last.outputs)) == ("a", "echo", 0)
        stream = call.stream()
        await stream.send(request("one", **asked))
        # Where there is always one, that says it.
        assert finals(await stream.read_all()) == [True]


async def test_single_responses_come_in_order() -> None:
    slow, fast = Model("slow", held=True), Model("fast")
    async with served(slow, fast) as (_, call):
        stream = call.stream()
        await stream.send(request("slow"), request("none"), request("fast"))
        await until(lambda: len(fast.calls) == 1)
        slow.free.set()
        names = [part.infer_response.model_name for part in await stream.read_all()]
        assert names == ["slow", "", "fast"]


async def test_concurrent_requests_of_a_stream_are_limited() -> None:
    model = Model(decoupled=True, held=True)
    async with served(model) as (_, call):
        stream = call.stream()
        total = MOST_AT_ONCE + 5
        for index in range(total):
            await stream.send(request(request_id=str(index)))
        await until(lambda: len(model.calls) == MOST_AT_ONCE)
        # The others have come, and are not read.
        assert (await call("ServerLive")).live
        assert len(model.calls) == MOST_AT_ONCE
        model.free.set()
        ids = {part.infer_response.id for part in await stream.read_all()}
        assert len(ids) == total


async def test_a_malformed_message_ends_a_stream_after_its_responses() -> None:
    model = Model(decoupled=True, held=True)
    async with served(model) as (_, call):
        stream = call.stream()
        await stream.send(request(), b"\xff\xff")
        await until(lambda: model.calls)
        model.free.set()
        answer, end = await stream.read(), await stream.read()
        assert values(answer.infer_response) == [1, 2]
        assert (end.code, end.stable) == ("INVALID_ARGUMENT", "malformed")


async def test_unread_responses_are_bounded() -> None:
    model = Model(decoupled=True, answers=10_000)
    async with served(model, Model("other")) as (_, call):
        stream = call.stream()
        await stream.send(request(values=[0.0] * 25_000))
        sent = 0
        while sent != model.sent or not sent:
            sent = model.sent
            # Others are served meanwhile.
            for _ in range(20):
                assert values(await call("ModelInfer", request("other"))) == [1, 2]
        assert sent * 100_000 < 20 << 20
        for _ in range(sent + 5):
            assert (await stream.read()).infer_response.outputs
        stream.call.cancel()
        await until(lambda: model.ended == ["cancelled"])


async def test_a_client_that_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "nano_inference.gateway.api.kserve.grpc_connection.LEAST_BYTES_PER_S"
    monkeypatch.setattr(module, 1 << 40)
    model = Model(decoupled=True, answers=10_000)
    async with served(model, send_timeout_s=0.1) as (gateway, call):
        stream = call.stream()
        await stream.send(request(values=[0.0] * 25_000))
        await until(lambda: model.calls)
        await gateway._server.calls.idle()
        while not isinstance(part := await stream.read(), Failed):
            assert part.infer_response.outputs
        assert (part.code, part.stable) == ("DEADLINE_EXCEEDED", "request_timeout")


# --- fields of a message --------------------------------------------------------------------------


INFER = METHODS["ModelInfer"]

MANY = {
    "inputs": b"\x2a\x00",
    "outputs": b"\x32\x00",
    "parameters": b"\x22\x00",
    "raw contents": b"\x3a\x00",
    "fields of no meaning": b"\xf8\x01\x00",
}


@pytest.mark.parametrize("what", MANY)
@pytest.mark.parametrize("within", [False, True])
def test_too_many_fields_are_refused(what: str, within: bool) -> None:
    data = MANY[what] * (MOST_FIELDS + 1)
    if within:
        # They are other fields of an input, and as many.
        data = input_of(data)
    with raises("request_too_large"):
        check_fields(INFER, data)


def input_of(fields: bytes) -> bytes:
    """An input of these fields."""
    length, size = b"", len(fields)
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return b"\x2a" + length + bytes([size]) + fields


def test_as_many_tensors_as_are_taken_pass() -> None:
    asked = message("ModelInferRequest")()
    for number in range(MAX_TENSORS):
        asked.inputs.add(name=f"in {number}", datatype="FP32", shape=[1, 2, 3])
        asked.outputs.add(name=f"out {number}")
        for tensor in (asked.inputs[-1], asked.outputs[-1]):
            tensor.parameters["shared_memory_region"].string_param = "region"
            tensor.parameters["shared_memory_byte_size"].int64_param = 24
            tensor.parameters["shared_memory_offset"].int64_param = 24 * number
        asked.raw_input_contents.append(b"")
    check_fields(INFER, asked.SerializeToString())


def test_many_elements_pass() -> None:
    asked = message("ModelInferRequest")(raw_input_contents=[bytes(1 << 20)])
    asked.inputs.add(name="a", shape=[1 << 20]).contents.bool_contents.extend([True] * 100_000)
    asked.inputs.add(name="b").contents.bytes_contents.extend([b""] * 100_000)
    check_fields(INFER, asked.SerializeToString())


def test_messages_without_tensors_are_small() -> None:
    other = METHODS["ModelReady"]
    check_fields(other, bytes(MOST_BYTES))
    with pytest.raises(RequestError, match="no tensors"):
        check_fields(other, bytes(MOST_BYTES + 1))


def test_groups_are_refused() -> None:
    with raises("malformed"):
        check_fields(INFER, b"\x0b\x0c" + b"\x2a\x00" * (MOST_FIELDS + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_counted(data: bytes) -> None:
    with suppress(RequestError):
        assert count_fields(data) <= len(data)


@given(
    st.lists(st.text(max_size=3), max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    st.lists(st.binary(max_size=300), max_size=5),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=5),
)
def test_each_field_is_counted_once(
    names: list[str], shape: list[int], raw: list[bytes], parameters: dict[str, float]
) -> None:
    asked = message("ModelInferRequest")(raw_input_contents=raw)
    for name in names:
        # A shape is one field, whatever its length.
        asked.inputs.add(name=name, shape=shape)
    for name, value in parameters.items():
        asked.parameters[name].double_param = value
    each = sum(1 + bool(name) + bool(shape) for name in names)
    entries = 3 * len(parameters)
    assert count_fields(asked.SerializeToString()) == each + len(raw) + entries
