"""Compressed bodies of KServe over HTTP."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable

import httpx
import numpy as np
import pytest

from nano_inference.kserve.http_codec import encode_http_request
from nano_inference.kserve.tensors import DATATYPES, NamedTensor

from .http_calls import (
    BYTES,
    INT8,
    JSON,
    LENGTH,
    asking,
    failed,
    infer,
    listening,
    of_each,
    read,
)
from .served import Echo, Several, Slow

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": zlib.compress,
}


@pytest.mark.parametrize("coding", PACK)
async def test_bodies_may_be_compressed_both_ways(coding: str) -> None:
    parts, length = encode_http_request(of_each())
    headers = BYTES | {LENGTH: str(length), "Content-Encoding": coding, "Accept-Encoding": coding}
    async with asking(Echo()) as http:
        answer = await http.post(
            "/v2/models/echo/infer", content=PACK[coding](b"".join(parts)), headers=headers
        )
    assert answer.headers["content-encoding"] == coding
    assert len(read(answer).outputs) == len(DATATYPES)


@pytest.mark.parametrize("given", ["gzip, deflate", "gzip, deflate, br", "br", "identity", "*", ""])
async def test_answers_are_not_compressed_for_who_knows_many_ways(given: str) -> None:
    async with asking(Echo()) as http:
        answer = await infer(http, of_each(), headers={"Accept-Encoding": given})
    assert "content-encoding" not in answer.headers
    assert len(read(answer).outputs) == len(DATATYPES)


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("number", [0, 5, 3 << 20])
async def test_what_is_unpacked_is_whole(coding: str, number: int) -> None:
    data = np.random.default_rng(0).integers(0, 3, number).astype(np.int32)
    parts, length = encode_http_request([NamedTensor("INT32", data)])
    headers = BYTES | {LENGTH: str(length), "Content-Encoding": coding}
    async with asking(Echo()) as http:
        answer = await http.post(
            "/v2/models/echo/infer", content=PACK[coding](b"".join(parts)), headers=headers
        )
    assert np.array_equal(read(answer).outputs[0].data, data)


@pytest.mark.parametrize("coding", PACK)
async def test_a_bomb_is_refused(coding: str) -> None:
    bomb = PACK[coding](b" " * (8 << 20))
    assert len(bomb) < 40_000
    async with asking(Echo(), max_body_bytes=40_000) as http:
        answer = await http.post(
            "/v2/models/echo/infer", content=bomb, headers=JSON | {"Content-Encoding": coding}
        )
        assert failed(answer, 413) == "request_too_large"


async def test_what_is_unpacked_counts_among_all_bodies() -> None:
    body = json.dumps({"inputs": [INT8]}).encode() + b" " * 900_000
    limits = {
        "max_body_bytes": 1_000_000,
        "max_bodies_bytes": 1_000_000,
        "max_weights_bytes": 1_000_000,
    }
    slow, headers = Slow(), JSON | {"Content-Encoding": "gzip"}
    async with listening(Echo(), slow, **limits) as place, httpx.AsyncClient() as http:
        http.base_url = httpx.URL(f"http://{place}")
        empty = json.dumps({"inputs": []}).encode() + b" " * 900_000
        held = asyncio.create_task(
            http.post("/v2/models/slow/infer", content=gzip.compress(empty), headers=headers)
        )
        await slow.until(lambda: len(slow.calls) == 1)
        answer = await http.post(
            "/v2/models/echo/infer", content=gzip.compress(body), headers=headers
        )
        assert failed(answer, 429) == "overloaded"
        held.cancel()
        await slow.until(lambda: slow.ended == ["cancelled"])


# The same in all processes that collect the tests: else the time of the moment stands in it.
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
async def test_what_can_not_be_unpacked(body: bytes, coding: str, status: int, code: str) -> None:
    headers = JSON | {"Content-Encoding": coding}
    async with asking(Echo()) as http:
        answer = await http.post("/v2/models/echo/infer", content=body, headers=headers)
    assert failed(answer, status) == code


async def test_only_tensors_may_be_compressed() -> None:
    headers = JSON | {"Content-Encoding": "gzip"}
    body = gzip.compress(b"{}")
    async with asking(Several()) as http:
        for path in ("/v2/models/several/generate", "/v2/repository/index", "/generate"):
            answer = await http.post(path, content=body, headers=headers)
            assert answer.status_code == 415
