"""Tensors over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from nano_inference.config import RequestError
from nano_inference.kserve.http_codec import encode_http_request
from nano_inference.kserve.tensors import DATATYPES, InferResponse, NamedTensor

from .http_calls import BYTES, INT8, JSON, LENGTH, asking, failed, infer, listening, of_each, read
from .served import LIMIT_S, Echo, Failing, Several, Slow

IN_JSON = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "INT64": [-(2**63), 2**63 - 1],
    "UINT64": [0, 2**64 - 1],
    "FP32": [0.5, -1.0],
    "FP64": [1e300, -2.5],
    "BYTES": ["", "zwölf"],
}


def same(one: InferResponse, tensors: list[NamedTensor]) -> None:
    assert [each.name for each in one.outputs] == [each.name for each in tensors]
    for mine, theirs in zip(one.outputs, tensors, strict=True):
        assert mine.datatype == theirs.datatype
        assert mine.data.tolist() == theirs.data.tolist()


# --- tensors ------------------------------------------------------------------------------------


async def test_tensors_of_each_datatype_come_as_bytes_and_go_so() -> None:
    async with asking(Echo()) as http:
        answer = await infer(http, of_each(), id="mine")
    assert answer.headers["content-type"] == "application/octet-stream"
    found = read(answer)
    assert (found.model_name, found.id) == ("echo", "mine")
    order = list(DATATYPES)
    same(found, sorted(of_each(), key=lambda each: order.index(each.name)))


async def test_tensors_of_a_page_go_as_json() -> None:
    inputs = [
        {"name": name, "datatype": name, "shape": [2], "data": data}
        for name, data in IN_JSON.items()
    ]
    async with asking(Echo()) as http:
        answer = await http.post("/v2/models/echo/infer", json={"id": "7", "inputs": inputs})
    assert answer.headers["content-type"] == "application/json"
    assert LENGTH not in answer.headers
    told = answer.json()
    assert (told["model_name"], told["model_version"], told["id"]) == ("echo", "1", "7")
    assert {each["name"]: each["data"] for each in told["outputs"]} == IN_JSON


async def test_outputs_are_those_that_are_wanted_and_as_they_are_wanted() -> None:
    outputs = [
        {"name": "INT8", "parameters": {"binary_data": True}},
        {"name": "FP32"},
    ]
    inputs = [
        {"name": name, "datatype": name, "shape": [1], "data": [3]}
        for name in ("FP32", "INT8", "UINT8")
    ]
    body = {"inputs": inputs, "outputs": outputs}
    async with asking(Echo()) as http:
        answer = await http.post("/v2/models/echo/infer", json=body)
    head = json.loads(answer.content[: int(answer.headers[LENGTH])])
    assert [each["name"] for each in head["outputs"]] == ["INT8", "FP32"]
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 1}
    assert head["outputs"][1]["data"] == [3.0]
    assert answer.content[int(answer.headers[LENGTH]) :] == b"\x03"


async def test_large_tensors_come_and_go_whole() -> None:
    data = np.arange(3 << 20, dtype=np.int32)
    async with listening(Echo(), max_body_bytes=32 << 20) as place, httpx.AsyncClient() as http:
        http.base_url = httpx.URL(f"http://{place}")
        found = read(await infer(http, [NamedTensor("INT32", data)]))
    assert np.array_equal(found.outputs[0].data, data)


async def test_a_model_that_may_answer_often_answers_once() -> None:
    several = Several()
    times = NamedTensor("times", np.array([4], dtype=np.int32))
    async with asking(several) as http:
        found = read(await infer(http, [times], "several"))
    assert found.outputs[0].data.tolist() == [3]
    assert not several.calls[0].many


async def test_the_time_of_a_request_is_told_by_its_parameters_and_by_its_header() -> None:
    echo = Echo()
    async with asking(echo) as http:
        for headers, parameters, most_s in (
            ({}, {"timeout": 7_000_000}, 7),
            ({"X-Budget-Ms": "5000"}, {"timeout": 7_000_000}, 5),
            ({"X-Budget-Ms": "5000"}, {"timeout_ns": 3_000_000_000}, 3),
        ):
            answer = await infer(http, of_each(), headers=headers, parameters=parameters)
            assert answer.status_code == 200
            left_ns = echo.calls[-1].origin.left_ns
            assert left_ns is not None
            assert left_ns <= most_s * 1e9
        answer = await infer(http, of_each(), parameters={"timeout": "soon"})
        assert failed(answer, 400) == "invalid_budget"


async def test_a_call_ends_when_its_time_is_over() -> None:
    slow = Slow()
    async with asking(slow) as http:
        answer = await infer(http, [], "slow", parameters={"timeout": 1000})
    assert failed(answer, 504) == "expired"
    assert "(timeout) was over" in answer.json()["error"]
    assert slow.ended == ["cancelled"]


async def test_numbers_that_json_does_not_know() -> None:
    tensors = [NamedTensor("FP32", np.array([math.nan, math.inf], dtype=np.float32))]
    async with asking(Echo()) as http:
        head = {"name": "FP32", "parameters": {"binary_data": False}}
        parts, length = encode_http_request(tensors)
        told = json.loads(b"".join(parts)[:length])
        told["outputs"] = [head]
        told.get("parameters", {}).clear()
        body = json.dumps(told).encode()
        answer = await http.post(
            "/v2/models/echo/infer",
            content=body + b"".join(parts)[length:],
            headers=BYTES | {LENGTH: str(len(body))},
        )
    first, second = json.loads(answer.content)["outputs"][0]["data"]
    assert math.isnan(first)
    assert second == math.inf


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"{", {}, "malformed"),
        (b"[]", {}, "invalid_request"),
        (b"", {}, "malformed"),
        (b"\xff\xfe", {}, "malformed"),
        (b"[" * 100_000, {}, "malformed"),
        ({}, {}, "invalid_request"),
        ({"inputs": 7}, {}, "invalid_request"),
        ({"inputs": [INT8], "outputs": [{"name": "none"}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"name": "none"}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8, INT8]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"datatype": "INT9"}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"shape": [-1]}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"shape": [2**62, 2**62]}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"data": [300]}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"shape": [1, 1]}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8]}, {LENGTH: "1000"}, "invalid_request"),
        ({"inputs": [INT8]}, {LENGTH: "-1"}, "malformed"),
        ({"inputs": [INT8]}, {LENGTH: "9" * 5000}, "malformed"),
        ({"inputs": [INT8]}, {LENGTH: "ten"}, "malformed"),
        ({"inputs": [INT8]}, {LENGTH: "5"}, "malformed"),
        (
            {
                "inputs": [INT8],
                "outputs": [{"name": "INT8", "parameters": {"classification": 3}}],
            },
            {},
            "unsupported",
        ),
    ],
)
async def test_what_is_no_request(body: Any, headers: dict[str, str], code: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    echo = Echo()
    async with asking(echo) as http:
        answer = await http.post("/v2/models/echo/infer", content=content, headers=JSON | headers)
    assert failed(answer, 400) == code
    assert echo.calls == []


async def test_a_body_has_limits() -> None:
    data = np.zeros(5000, dtype=np.int8)
    nested = {"inputs": [INT8 | {"data": [[1]] * 600_000}]}
    async with asking(Echo(), max_body_bytes=4000) as http:
        answer = await infer(http, [NamedTensor("INT8", data)])
        assert failed(answer, 413) == "request_too_large"
    async with asking(Echo()) as http:
        answer = await http.post("/v2/models/echo/infer", json=nested)
        assert failed(answer, 413) == "request_too_large"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("no", code="invalid_tensor"), 400),
        (RequestError("no", code="overloaded"), 429),
        (RequestError("no", code="expired"), 504),
        (RequestError("no", code="lane_failed"), 500),
        (RequestError("no", code="shutting_down"), 503),
    ],
)
async def test_what_a_model_says_is_answered(error: RequestError, status: int) -> None:
    async with asking(Failing(error)) as http:
        answer = await http.post("/v2/models/failing/infer", json={"inputs": []})
    assert failed(answer, status) == error.code
    assert answer.json() == {"error": "no"}
    assert ("retry-after" in answer.headers) == (status == 429)


async def test_an_output_that_json_has_no_word_for_is_refused() -> None:
    tensors = [NamedTensor("BYTES", np.array([b"\xff"], dtype=np.object_))]
    async with asking(Echo()) as http:
        answer = await infer(http, tensors, requested_outputs=["BYTES"])
        assert read(answer).outputs[0].data.tolist() == [b"\xff"]
        wanted = {"name": "BYTES", "parameters": {"binary_data": False}}
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": "BYTES",
                        "datatype": "BYTES",
                        "shape": [1],
                        "parameters": {"binary_data_size": 5},
                    }
                ],
                "outputs": [wanted],
            }
        ).encode()
        answer = await http.post(
            "/v2/models/echo/infer",
            content=head + b"\x01\0\0\0\xff",
            headers=BYTES | {LENGTH: str(len(head))},
        )
    assert failed(answer, 400) == "invalid_tensor"
    assert "binary" in answer.json()["error"]


# --- kinds of bodies ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "application/octet-stream", "application/json"])
async def test_kinds_that_triton_s_clients_send(kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    async with asking(Echo()) as http:
        answer = await http.post(
            "/v2/models/echo/infer", content=json.dumps({"inputs": [INT8]}), headers=headers
        )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
        "text/plain;application/json",
    ],
)
async def test_forms_of_pages_are_refused(kind: str) -> None:
    async with asking(Echo()) as http:
        for path in ("/v2/models/echo/infer", "/v2/systemsharedmemory/unregister"):
            answer = await http.post(path, content=b"{}", headers={"Content-Type": kind})
            assert failed(answer, 415) == "unsupported_media_type"


async def test_bytes_are_taken_nowhere_else() -> None:
    async with asking(Echo()) as http:
        for path, status in (("/generate", 415), ("/v1/completions", 415), ("/v2x/infer", 404)):
            for headers in ({}, BYTES):
                answer = await http.post(path, content=b"{}", headers=headers)
                assert answer.status_code == status


# --- clients that leave -------------------------------------------------------------------------


async def test_a_dropped_connection_cancels() -> None:
    slow = Slow()
    body = b'{"inputs": []}'
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}"
    async with asyncio.timeout(LIMIT_S), listening(slow) as place:
        host, _, port = place.partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}\r\n\r\n".encode() + body)
        await slow.until(lambda: len(slow.calls) == 1)
        assert slow.ended == []
        writer.close()
        await slow.until(lambda: slow.ended == ["cancelled"])
