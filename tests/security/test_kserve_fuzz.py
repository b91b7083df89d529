"""Ten thousand requests of KServe V2, most of them crooked: read as what they are, or refused.

Nothing else is raised, and nothing is made that is larger than what came.

A case that fails is named with its number, which makes it again.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from nano_inference.config import RequestError
from nano_inference.gateway.server.http import status_of
from nano_inference.kserve.codec import decode_http_request
from nano_inference.kserve.grpc_codec import decode_infer_request, decode_infer_response
from nano_inference.kserve.protobuf import ModelInferRequest, ModelInferResponse
from nano_inference.kserve.tensors import DTYPES, Array, InferRequest, NamedTensor

from .mutations.protobuf import rewired
from .mutations.tensors import Crooked, Draft, Region, as_http, as_protobuf, crooked, odd_http
from .mutations.wire import spoiled

SEED = 29
CASES = 10_000
EVERY_DAY = 600
MOST_BYTES = 64
"""For each byte that came, so many may be made of it; and a hundred thousand besides."""

CODES = {
    *("invalid_tensor", "invalid_request", "unsupported", "invalid_region", "unknown_region"),
    "malformed",
}


def refusal(decode: Callable[[], object]) -> str:
    """The code with which it is refused; "" where it is not. Whatever else is raised comes out."""
    found: RequestError | None = None
    try:
        decode()
    except RequestError as error:
        found = error
    if found is None:
        return ""
    assert found.code in CODES, found
    assert status_of(found) in (400, 404)
    assert found.message.isprintable(), found.message
    assert 20 < len(found.message) < 1000, found.message
    return found.code


def frugally(work: Callable[[], str], size: int, what: str) -> str:
    """What `work` gives, which takes little memory at any time for so many bytes that came.

    Other threads of the process take memory as well, which counts here; so what takes much is done
    again, and fails where it does each time.
    """
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            given = work()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if peak < MOST_BYTES * size + 100_000:
            return given
        peaks.append(peak)
    raise AssertionError(f"{what}: {peaks} bytes for {size}")


def check_same(found: InferRequest, case: Crooked) -> None:
    """Asserts that a good request has come as it was meant."""
    assert [each.name for each in found.inputs] == [each.name for each in case.draft.inputs]
    for tensor, meant in zip(found.inputs, case.draft.inputs, strict=True):
        assert (tensor.datatype, list(tensor.shape)) == (meant.datatype, meant.shape)
        if meant.datatype == "BYTES":
            assert tensor.data.ravel().tolist() == meant.values
        else:
            expected = np.frombuffer(meant.raw, DTYPES[tensor.datatype])
            assert tensor.data.tobytes() == expected.tobytes()
    assert [each.name for each in found.outputs] == [name for name, _ in case.draft.outputs]
    assert found.id == case.draft.id
    assert dict(found.parameters) == case.draft.parameters


def whole(tensors: tuple[NamedTensor, ...]) -> list[Array]:
    """Copies of them, for which each element is read."""
    return [tensor.data.copy() for tensor in tensors]


@pytest.fixture
def number_of_cases(soak: bool) -> int:
    return CASES if soak else EVERY_DAY


@pytest.mark.soak
@pytest.mark.parametrize("over_http", [False, True], ids=["gRPC", "HTTP"])
def test_requests(number_of_cases: int, *, over_http: bool) -> None:
    for number in range(number_of_cases):
        rng, region = random.Random(f"{SEED}:{number}"), Region()
        case = crooked(rng, region)
        if over_http:
            body, length = as_http(case.draft)
            decode, size = partial(decode_http_request, "m", "", body, length, region), len(body)
        else:
            message = as_protobuf(case.draft)
            decode, size = partial(decode_infer_request, message, region), message.ByteSize()
        code = frugally(partial(refusal, decode), size, f"case {number} ({case.kind})")
        assert code in (case.codes or ("",)), f"case {number} ({case.kind}): {code!r} {case.draft}"
        if not case.codes:
            check_same(decode(), case)


Make = Callable[[Draft, random.Random, Region], tuple[Callable[[], object], int] | None]
"""Returns what decodes a spoiled draft, and its size in bytes; None for what is no message."""


def spoil_all(number_of_cases: int, make: Make) -> int:
    """The smaller one of the numbers of spoiled drafts that are read and that are refused."""
    read = refused = 0
    for number in range(number_of_cases):
        rng, region = random.Random(f"{SEED}:{number}"), Region()
        if (made := make(crooked(rng, region).draft, rng, region)) is not None:
            decode, size = made
            code = frugally(partial(refusal, decode), size, f"case {number}")
            read, refused = read + (not code), refused + bool(code)
    return min(read, refused)


@pytest.mark.soak
@pytest.mark.parametrize("answers", [False, True], ids=["requests", "answers"])
def test_bytes(number_of_cases: int, *, answers: bool) -> None:
    """Messages of which some bytes are others; what protobuf can't read is no message."""

    def make(draft: Draft, rng: random.Random, region: Region) -> Any:
        # Tensors stand under the same numbers in both.
        raw = as_protobuf(draft).SerializeToString()
        raw = spoiled(raw, rng) if rng.random() < 0.2 else rewired(raw, rng)
        kind = ModelInferResponse if answers else ModelInferRequest
        try:
            message = kind.FromString(raw)
        except DecodeError:
            return None
        if answers:
            return lambda: whole(decode_infer_response(message, region).outputs), len(raw)
        return lambda: whole(decode_infer_request(message, region).inputs), len(raw)

    assert spoil_all(number_of_cases, make) > number_of_cases // 30


@pytest.mark.soak
def test_odd_http_bodies(number_of_cases: int) -> None:
    """JSON with odd values, or with a wrong length."""

    def make(draft: Draft, rng: random.Random, region: Region) -> Any:
        body, length = odd_http(draft, rng)
        decode = partial(decode_http_request, "m", "", body, length, region)
        return lambda: whole(decode().inputs), len(body)

    assert spoil_all(number_of_cases, make) > number_of_cases // 100
