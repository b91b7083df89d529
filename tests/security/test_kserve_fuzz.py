"""Ten thousand requests of KServe V2, most of them crooked: read as what they are, or refused.

Nothing else is raised, and nothing is made that is larger than what came.

A case that fails is named with its number, which makes it again.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from nano_inference.config import RequestError
from nano_inference.gateway.server.http import status_of
from nano_inference.kserve.codec import decode_http_request
from nano_inference.kserve.grpc_codec import decode_infer_request, decode_infer_response
from nano_inference.kserve.protobuf import ModelInferRequest, ModelInferResponse
from nano_inference.kserve.tensors import InferRequest, InferResponse

from ..kserve.drawn import Memory
from .mutations.protobuf import rewired
from .mutations.tensors import REGION_BYTES, Draft, as_http, as_protobuf, crooked, odd_http
from .mutations.wire import spoiled

SEED = 29
CASES = 10_000
EVERY_DAY = 125
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
    """Return the result of `work`, which must use little memory for so many received bytes.

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


Made = tuple[Callable[[], InferRequest | InferResponse], int] | None
"""A draft's decoder, and its size in bytes; None for a draft that is no message."""


def as_message(draft: Draft, rng: random.Random, memory: Memory) -> Made:
    message = as_protobuf(draft)
    return partial(decode_infer_request, message, memory), message.ByteSize()


def as_body(draft: Draft, rng: random.Random, memory: Memory) -> Made:
    body, length = as_http(draft)
    return partial(decode_http_request, "m", "", body, length, memory), len(body)


def as_odd_body(draft: Draft, rng: random.Random, memory: Memory) -> Made:
    """JSON with odd values, or with a wrong length."""
    body, length = odd_http(draft, rng)
    return partial(decode_http_request, "m", "", body, length, memory), len(body)


def as_odd_message(
    draft: Draft, rng: random.Random, memory: Memory, kind: Any = ModelInferRequest
) -> Made:
    """A message of which some bytes are others."""
    raw = as_protobuf(draft).SerializeToString()
    raw = spoiled(raw, rng) if rng.random() < 0.2 else rewired(raw, rng)
    decode = decode_infer_request if kind is ModelInferRequest else decode_infer_response
    try:
        return partial(decode, kind.FromString(raw), memory), len(raw)
    except DecodeError:
        return None


def as_odd_answer(draft: Draft, rng: random.Random, memory: Memory) -> Made:
    """The same of an answer, in which tensors stand under the same numbers."""
    return as_odd_message(draft, rng, memory, ModelInferResponse)


def read(decode: Callable[[], InferRequest | InferResponse]) -> None:
    """Decode a message, and read each element of its tensors."""
    found = decode()
    for tensor in found.inputs if isinstance(found, InferRequest) else found.outputs:
        tensor.data.copy()


@pytest.mark.soak
@pytest.mark.parametrize("make", [as_message, as_body, as_odd_body, as_odd_message, as_odd_answer])
def test_requests_are_read_or_refused_in_little_memory(
    make: Callable[[Draft, random.Random, Memory], Made], soak: bool
) -> None:
    number_of_cases = CASES if soak else EVERY_DAY
    refused = Counter[bool]()
    for number in range(number_of_cases):
        rng, memory = random.Random(f"{SEED}:{number}"), Memory(REGION_BYTES)
        case = crooked(rng, memory.data)
        if (made := make(case.draft, rng, memory)) is None:
            continue
        told = f"case {number} ({case.kind})"
        code = frugally(partial(refusal, partial(read, made[0])), made[1], told)
        if make in (as_message, as_body):
            assert code in (case.codes or ("",)), f"{told}: {code!r} {case.draft}"
        refused[bool(code)] += 1
    assert min(refused[True], refused[False]) > number_of_cases // 100
