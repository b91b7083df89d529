"""Ten thousand random and mutated entries on every stream that a stage reads."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import msgspec
import pytest
import redis.asyncio
from redis.asyncio import Redis

from nano_inference import Completion, Pipeline
from nano_inference.bus.links import LINKS
from nano_inference.store.redis.keys import JSON, MESSAGE, MSGPACK, WRITER, Keys

from .conftest import MakeConfig

# At full length; every day a tenth of it.
REQUESTS = 7000
PER_LINK = 3000 // len(LINKS)
LIMIT_S = 300
BASE = {
    "prompt": "98 + 25 =",
    "n": 2,
    "stream": True,
    "priority": 1,
    "tenant": "t",
    "budget_ns": 10**12,
    "cache_salt": "s",
    "sampling": {
        "temperature": 0.5,
        "max_tokens": 1,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [3],
        "logit_bias": {"5": 1.5},
        "logprobs": 1,
        "prompt_logprobs": 1,
        "min_tokens": 1,
    },
}
ODD = (
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff" * 9,
    b"[" * 5000,
    b'{"n":1e999}',
    b'{"n":' + b"9" * 500 + b"}",
)


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, left out, repeated or put in."""
    data = bytearray(raw)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place : place + rng.randrange(1, 9)]
            case 2:
                data[place:place] = data[place : place + rng.randrange(1, 30)]
            case 3:
                data[place:place] = rng.randbytes(rng.randrange(1, 9))
            case _:
                data[place:place] = rng.choice((b"-", b"9", b'"', b"null", b"1e400", b"[]", b"{}"))
    return bytes(data)


def request_fields(rng: random.Random) -> dict[bytes, bytes]:
    if rng.random() < 0.05:
        return {rng.randbytes(rng.randrange(4)): rng.randbytes(9), JSON: rng.choice(ODD)}
    if rng.random() < 0.1:
        return {rng.choice((JSON, MSGPACK)): rng.choice(ODD) or rng.randbytes(40)}
    if rng.random() < 0.3:
        return {MSGPACK: mutate(rng, msgspec.msgpack.encode(BASE))}
    fields = {JSON: mutate(rng, msgspec.json.encode(BASE))}
    if rng.random() < 0.2:
        fields[b"traceparent"] = rng.randbytes(20)
    return fields


async def link_traffic(foreign: Redis, keys: Keys, pipeline: Pipeline) -> dict[bytes, list[bytes]]:
    """What the stages say to each other while they work, to be mutated."""
    seen: dict[bytes, list[bytes]] = {keys.link(link.name): [] for link in LINKS}
    positions: dict[bytes, bytes] = dict.fromkeys(seen, b"0-0")
    running = asyncio.create_task(
        pipeline.complete({**BASE, "sampling": {"max_tokens": 50, "ignore_eos": True}})
    )
    while not running.done():
        for key, entries in await foreign.xread(positions, block=100):
            seen[key] += [fields[MESSAGE] for _, fields in entries]
            positions[key] = entries[-1][0]
    return seen


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("make_config", ["redis-links"], indirect=True)
async def test_every_entry_is_answered_and_the_pipeline_goes_on(
    make_config: MakeConfig, soak: bool
) -> None:
    rng = random.Random(5)
    part = 1 if soak else 20
    requests, per_link = REQUESTS // part, PER_LINK // part
    config = make_config(
        bus__results_maxlen=10**6,
        admission__max_queued=10**6,
        # Some mutated messages are valid and contradict what came before: their stage starts anew.
        admission__max_lane_deaths=10**6,
        pipeline__max_restarts=10**6,
        pipeline__restart_backoff_s=0.001,
    )
    keys = Keys(config.bus.prefix, "0")
    async with (
        asyncio.timeout(LIMIT_S),
        Pipeline(config) as pipeline,
        redis.asyncio.from_url(config.bus.url, protocol=2) as foreign,
    ):
        tail = await pipeline.bus.results.tail()
        traffic = await link_traffic(foreign, keys, pipeline)
        assert sum(map(len, traffic.values())) > 40
        for key, messages in traffic.items():
            for _ in range(per_link):
                raw = mutate(rng, rng.choice(messages)) if messages else b""
                fields = {MESSAGE: rng.choice((raw, raw, rng.randbytes(40), rng.choice(ODD)))}
                await foreign.xadd(key, {WRITER: rng.randbytes(8), **fields})
        entries = {
            (await foreign.xadd(keys.requests, request_fields(rng))).decode()
            for _ in range(requests)
        }
        answers: Counter[str] = Counter()
        codes: Counter[str] = Counter()
        while entries - answers.keys():
            completion: Completion = await anext(tail)
            answers[completion.entry_id] += 1
            codes[completion.error.code if completion.error else completion.status] += 1
        await tail.aclose()
        assert all(answers[entry] == 1 for entry in entries)
        assert len(codes) > (4 if soak else 2), codes
        assert codes["done"] > requests // 20, codes
        assert (await pipeline.complete({"prompt": "98 + 25 ="})).status == "done"
    assert set(codes) & {"lane_failed", "stage_failed", "internal_error"} == set(), codes
