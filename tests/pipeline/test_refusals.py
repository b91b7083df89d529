"""Bad input ends with a terminal error of its own code, and affects no other request."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest

from nano_inference import Completion, GenerateRequest, Pipeline, SamplingParams

from ..servers import plain_client
from .builders import GOOD, end_of, error_code
from .conftest import BUSES

# Over Redis, clients of any language send requests.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("shared", BUSES, indirect=True),
]


def good(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def sampling(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "sampling": changes}


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{not json", "malformed"),
    "wrong encoding": ('{"prompt": "caf\u00e9"}'.encode("latin-1"), "malformed"),
    "nothing at all": (b"", "malformed"),
    "cut off": (json.dumps(GOOD).encode()[:-5], "malformed"),
    "two prompts": (good(prompt_token_ids=[1]), "invalid_prompt"),
    "unknown field": (good(promt="x"), "invalid_request"),
    "unknown sampling field": (sampling(temprature=1), "invalid_request"),
    "wrong type": (good(prompt=12), "invalid_request"),
    "wrong type in sampling": (sampling(max_tokens="many"), "invalid_request"),
    "a list": (b"[1, 2]", "invalid_request"),
    "unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, "invalid_request"),
    "prompt too long": (good(prompt="12 + 30 = " * 3000), "prompt_too_long"),
    "max_tokens 0": (sampling(max_tokens=0), "invalid_max_tokens"),
    "bias of a word": (sampling(logit_bias={"the": 1}), "invalid_request"),
    "unknown model": (good(model="gpt-9"), "unknown_model"),
    "20 MB": (good(prompt="x" * 20_000_000), "request_too_large"),
    "expired": (good(budget_ns=0), "expired"),
    "control characters in the id": (good(request_id="a\nb"), "invalid_request_id"),
}


@pytest.mark.parametrize("name", BAD)
async def test_refusal_has_its_code_and_a_sentence(shared: Pipeline, name: str) -> None:
    request, code = BAD[name]
    refused, neighbour = await asyncio.gather(shared.complete(request), shared.complete(GOOD))
    assert error_code(refused) == code
    assert refused.status == ("expired" if code == "expired" else "error")
    assert len(refused.error.message) > 20
    assert refused.samples == ()
    assert neighbour.status == "done"


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", math.nan), ("logit_bias", {17: math.inf})]
)
async def test_numbers_that_are_not_finite_are_refused(
    shared: Pipeline, name: str, value: Any
) -> None:
    """JSON has no NaN; msgpack and Python callers do."""
    request = GenerateRequest(prompt="1 + 1 =", sampling=SamplingParams(**{name: value}))
    by_client = await shared.complete(request)
    assert error_code(by_client) == f"invalid_{name}"
    refused = await _complete_foreign(shared, request, msgspec.msgpack.encode(request))
    assert error_code(refused) == f"invalid_{name}"


async def test_bad_msgpack_is_refused(shared: Pipeline) -> None:
    refused = await _complete_foreign(shared, b"\xc1\x00\xff", b"\xc1\x00\xff")
    assert error_code(refused) == "malformed"


async def test_a_duplicate_request_id_is_refused(shared: Pipeline) -> None:
    request = good(request_id="twice", sampling={"max_tokens": 64, "ignore_eos": True})
    both = await asyncio.gather(shared.complete(request), shared.complete(request))
    # On a cluster either may be the first to arrive.
    first, second = sorted(both, key=lambda completion: completion.status)
    assert (first.status, second.status) == ("done", "error")
    assert error_code(second) == "duplicate_request"
    assert first.usage.completion_tokens == 64


async def _complete_foreign(pipeline: Pipeline, request: Any, msgpack: bytes) -> Completion:
    """Publishes as a client in another language would, and waits for the terminal message. In
    memory, where there is no such client, it is the request."""
    config = pipeline.config.bus
    if config.url == "memory":
        return await pipeline.complete(request)
    async with plain_client(config.url) as foreign:
        entry = (await foreign.xadd(f"{config.prefix}:requests", {b"msgpack": msgpack})).decode()
    return await end_of(pipeline.bus.results.follow(entry, entry))
