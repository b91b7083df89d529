"""kv-events: entries of the stream, as lines."""

from __future__ import annotations

import json

from redis import Redis

from nano_inference.bus.kv_events import AllBlocksCleared, KVEventBatch, encode_batch
from nano_inference.config import Config
from nano_inference.store.redis.keys import Keys

from .conftest import Run, assert_refused


def publish(redis_url: str, prefix: str, sequence: int, model: str = "") -> None:
    batch = encode_batch(KVEventBatch(1.5, (AllBlocksCleared(),), 0))
    entry = {"model": model, "lane": "0", "replica": 0, "incarnation": "batching-1"}
    with Redis.from_url(redis_url) as redis:
        redis.xadd(Keys(prefix).kv_events, {**entry, "sequence": sequence, "batch": batch})


def test_kept_entries_are_printed_as_lines(run: Run, on_nobody: str, redis_url: str) -> None:
    for sequence in (0, 3):
        publish(redis_url, on_nobody, sequence)
    ran = run("kv-events", "--kept", "--limit", "2")
    assert (ran.status, ran.stderr) == (0, "")
    first, second = map(json.loads, ran.stdout.splitlines())
    assert first == {
        "model": "",
        "lane": "0",
        "replica": 0,
        "incarnation": "batching-1",
        "sequence": 0,
        "batch": [1.5, [{"type": "AllBlocksCleared"}], 0],
        "missed": 0,
    }
    assert (second["sequence"], second["missed"]) == (3, 2)


def test_kept_entries_are_printed_at_both(
    run: Run, on_served: Config, place: list[str], redis_url: str
) -> None:
    publish(redis_url, on_served.bus.prefix, 0)
    ran = run("kv-events", "--kept", "--limit", "1", *place)
    assert (ran.status, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["sequence"] == 0


def test_a_bus_in_memory_is_refused(run: Run) -> None:
    assert_refused(run("kv-events", "--bus", "memory"), "memory")
