"""Inference with tensors over HTTP: limits, kinds of bodies, and compression."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nano_inference.config import RequestError
from nano_inference.kserve.tensors import DATATYPES, NamedTensor

from .calls import (
    BYTES,
    INT8,
    JSON,
    LENGTH,
    Echo,
    Several,
    Slow,
    asking,
    body_of,
    failed,
    infer,
    listening,
    of_each,
    read,
    until,
)

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": zlib.compress,
}
INFER = "/v2/models/echo/infer"


async def test_large_tensors_come_and_go_whole() -> None:
    data = np.arange(3 << 20, dtype=np.int32)
    async with listening(Echo(), max_body_bytes=32 << 20) as http:
        found = read(await infer(http, [NamedTensor("INT32", data)]))
    assert np.array_equal(found.as_numpy("INT32"), data)


async def test_json_outputs_say_so_and_have_no_length() -> None:
    async with asking(Echo()) as http:
        answer = await http.post(INFER, json={"id": "7", "inputs": [INT8]})
        assert answer.headers["content-type"] == "application/json"
        assert LENGTH not in answer.headers
        assert (answer.json()["model_version"], answer.json()["id"]) == ("1", "7")
        assert (await infer(http, of_each())).headers["content-type"] == BYTES["Content-Type"]


@pytest.mark.parametrize(
    ("budget_ms", "timeout_us", "limit"),
    [("9999", 1000, "(timeout)"), ("1", 10**9, "(X-Budget-Ms"), ("1", None, "(X-Budget-Ms")],
)
async def test_an_expired_call_names_its_shortest_limit(
    budget_ms: str, timeout_us: int | None, limit: str
) -> None:
    body = {"inputs": [], "parameters": {} if timeout_us is None else {"timeout": timeout_us}}
    async with asking(Slow()) as http:
        headers = {"X-Budget-Ms": budget_ms}
        answer = await http.post("/v2/models/slow/infer", json=body, headers=headers)
    assert failed(answer, 504) == "expired"
    assert f"time {limit}" in answer.json()["error"]


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"{", {}, "malformed"),
        ({}, {}, "invalid_request"),
        ({"inputs": [INT8], "outputs": [{"name": "none"}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"name": "none"}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8, INT8]}, {}, "invalid_tensor"),
        ({"inputs": [INT8 | {"shape": [1, 1]}]}, {}, "invalid_tensor"),
        ({"inputs": [INT8]}, {LENGTH: "1000"}, "invalid_request"),
        ({"inputs": [INT8]}, {LENGTH: "-1"}, "malformed"),
        ({"inputs": [INT8]}, {LENGTH: "9" * 5000}, "malformed"),
        ({"inputs": [INT8]}, {LENGTH: "ten"}, "malformed"),
        ({"inputs": [INT8]}, {LENGTH: "5"}, "malformed"),
    ],
)
async def test_malformed_requests_do_not_reach_the_model(
    body: Any, headers: dict[str, str], code: str
) -> None:
    """tests/kserve/test_refusals.py has what the codec refuses."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    echo = Echo()
    async with asking(echo) as http:
        answer = await http.post(INFER, content=content, headers=JSON | headers)
    assert failed(answer, 400) == code
    assert echo.calls == []


async def test_a_body_has_limits() -> None:
    data = np.zeros(5000, dtype=np.int8)
    nested = {"inputs": [INT8 | {"data": [[1]] * 600_000}]}
    async with asking(Echo(), max_body_bytes=4000) as http:
        answer = await infer(http, [NamedTensor("INT8", data)])
        assert failed(answer, 413) == "request_too_large"
    async with asking(Echo()) as http:
        assert failed(await http.post(INFER, json=nested), 413) == "request_too_large"


@pytest.mark.parametrize(
    ("code", "status"), [("invalid_tensor", 400), ("overloaded", 429), ("lane_failed", 500)]
)
async def test_a_models_error_is_the_response(code: str, status: int) -> None:
    failing = Several(failure=RequestError("no", code=code))
    inputs = [{"name": "times", "datatype": "INT32", "shape": [1], "data": [0]}]
    async with asking(failing) as http:
        answer = await http.post("/v2/models/several/infer", json={"inputs": inputs})
    assert failed(answer, status) == code
    assert answer.json() == {"error": "no"}
    assert ("retry-after" in answer.headers) == (status == 429)


# --- kinds of bodies ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "application/octet-stream", "application/json"])
async def test_content_types_of_tritons_clients_are_accepted(kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    async with asking(Echo()) as http:
        answer = await http.post(INFER, content=json.dumps({"inputs": [INT8]}), headers=headers)
    assert answer.status_code == 200


async def test_other_interfaces_take_no_bytes() -> None:
    async with asking(Echo()) as http:
        for path, status in (("/generate", 415), ("/v1/completions", 415), ("/v2x/infer", 404)):
            for headers in ({}, BYTES):
                answer = await http.post(path, content=b"{}", headers=headers)
                assert answer.status_code == status


# --- compression --------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("number", [0, 5, 3 << 20])
async def test_compressed_bodies_are_whole(coding: str, number: int) -> None:
    data = np.random.default_rng(0).integers(0, 3, number).astype(np.int32)
    body, headers = body_of([NamedTensor("INT32", data)])
    headers |= {"Content-Encoding": coding, "Accept-Encoding": coding}
    async with asking(Echo()) as http:
        answer = await http.post(INFER, content=PACK[coding](body), headers=headers)
    assert answer.headers["content-encoding"] == coding
    assert np.array_equal(read(answer).as_numpy("INT32"), data)


@pytest.mark.parametrize("given", ["gzip, deflate", "gzip, deflate, br", "br", "identity", "*", ""])
async def test_responses_are_not_compressed_unless_one_coding_is_accepted(given: str) -> None:
    async with asking(Echo()) as http:
        answer = await infer(http, of_each(), headers={"Accept-Encoding": given})
    assert "content-encoding" not in answer.headers
    assert len(read(answer).get_response()["outputs"]) == len(DATATYPES)


@pytest.mark.parametrize("coding", PACK)
async def test_a_decompression_bomb_is_refused(coding: str) -> None:
    bomb = PACK[coding](b" " * (8 << 20))
    assert len(bomb) < 40_000
    async with asking(Echo(), max_body_bytes=40_000) as http:
        answer = await http.post(INFER, content=bomb, headers=JSON | {"Content-Encoding": coding})
        assert failed(answer, 413) == "request_too_large"


async def test_decompressed_bytes_count_among_all_bodies() -> None:
    most = 1_000_000
    limits = dict.fromkeys(("max_body_bytes", "max_bodies_bytes", "max_weights_bytes"), most)
    slow, headers = Slow(), JSON | {"Content-Encoding": "gzip"}
    spaces = b" " * 900_000
    async with listening(Echo(), slow, **limits) as http:
        empty = gzip.compress(b'{"inputs": []}' + spaces)
        held = asyncio.create_task(
            http.post("/v2/models/slow/infer", content=empty, headers=headers)
        )
        await until(lambda: slow.calls)
        body = gzip.compress(json.dumps({"inputs": [INT8]}).encode() + spaces)
        answer = await http.post(INFER, content=body, headers=headers)
        assert failed(answer, 429) == "overloaded"
        held.cancel()
        await until(lambda: slow.ended == ["cancelled"])


# Without the current time, so that all processes collect the same test ids.
PACKED = gzip.compress(b"{}", mtime=0)


@pytest.mark.parametrize(
    ("body", "coding", "status", "code"),
    [
        (b"{}", "gzip", 400, "malformed"),
        (b"", "gzip", 400, "malformed"),
        (PACKED[:-1], "gzip", 400, "malformed"),
        (PACKED + b"x", "gzip", 400, "malformed"),
        (PACKED, "deflate", 400, "malformed"),
        (gzip.compress(PACKED, mtime=0), "gzip, gzip", 400, "malformed"),
        (PACKED, "gzip, deflate", 415, "unsupported_media_type"),
        (b"{}", "br", 415, "unsupported_media_type"),
        (b"{}", "x" * 5000, 415, "unsupported_media_type"),
    ],
)
async def test_malformed_compression_is_refused(
    body: bytes, coding: str, status: int, code: str
) -> None:
    headers = JSON | {"Content-Encoding": coding}
    async with asking(Echo()) as http:
        answer = await http.post(INFER, content=body, headers=headers)
    assert failed(answer, status) == code


async def test_only_tensors_may_be_compressed() -> None:
    headers = JSON | {"Content-Encoding": "gzip"}
    body = gzip.compress(b"{}")
    async with asking(Several()) as http:
        for path in ("/v2/models/several/generate", "/v2/repository/index", "/generate"):
            answer = await http.post(path, content=body, headers=headers)
            assert answer.status_code == 415
