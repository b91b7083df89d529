"""Files, their contents and batches, on every kind of store."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from nano_inference.config import BusError, ConfigError
from nano_inference.store.batches import BatchProgress, BatchState, SegmentResult, StoredBatch
from nano_inference.store.blobs import CHUNK_BYTES, BlobStore, blobs_at, rechunked
from nano_inference.store.files import FileRecord, FilesFull, Piece

from ..buses import STORES

BUSES = STORES

NOW_S = int(time.time())
CONTENT = bytes(range(256)) * 2048 + b"end"
"""Three chunks, the last one short."""


def file(id: str, **fields: Any) -> FileRecord:
    given = {
        "tenant": "t",
        "filename": "a.jsonl",
        "purpose": "batch",
        "num_bytes": 10,
        "created_s": NOW_S,
        "expires_s": NOW_S + 3600,
    }
    return FileRecord(id=id, **{**given, **fields})


def batch(id: str, **fields: Any) -> BatchState:
    given = {"tenant": "t", "endpoint": "/v1/completions", "input_file": "f", "created_s": NOW_S}
    return BatchState(id=id, **{**given, "expires_s": NOW_S + 3600, **fields})


def progress_of(found: StoredBatch) -> BatchProgress:
    state = found.state
    return BatchProgress(
        id=state.id,
        tenant=state.tenant,
        endpoint=state.endpoint,
        status=state.status,
        created_s=state.created_s,
        total=state.total,
        completed=found.completed,
        failed=found.failed,
        lines_per_s=0.5,
        seen_s=NOW_S,
    )


async def parts(*found: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for each in found:
        yield each
    if error is not None:
        raise error


@pytest.fixture(params=["bus", "folder"])
def blobs(request: pytest.FixtureRequest, buses: Any, tmp_path: Path) -> BlobStore:
    storage = "" if request.param == "bus" else str(tmp_path / "files")
    return blobs_at(storage, buses.open().store.blobs)


async def test_a_blob_is_read_by_ranges(blobs: BlobStore) -> None:
    assert len(CONTENT) > 2 * CHUNK_BYTES
    assert await blobs.write("a/1", parts(CONTENT[:100], CONTENT[100:]), 60) == len(CONTENT)
    assert await blobs.write("a/2", parts(), 60) == 0
    for start, stop in ((0, 10), (CHUNK_BYTES - 1, CHUNK_BYTES + 1), (0, 10**9), (5, 5)):
        assert await blobs.read("a/1", start, stop) == CONTENT[start:stop]
    await blobs.delete(["a/1", "unknown"])
    with pytest.raises(KeyError):
        await blobs.read("a/1", 0, 1)


async def test_a_write_that_ends_early_leaves_nothing(blobs: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        await blobs.write("a", parts(CONTENT, error=ZeroDivisionError()), 60)
    with pytest.raises(KeyError):
        await blobs.read("a", 0, 1)
    assert not any(files for _, _, files in os.walk(tmp_path))


async def test_storage_that_fails_is_a_bus_error(tmp_path: Path, buses: Any) -> None:
    (tmp_path / "files").write_text("no folder")
    with pytest.raises(ConfigError, match=r"batches\.storage"):
        blobs_at("gopher://x", buses.open().store.blobs)
    with pytest.raises(ConfigError, match=r"batches\.storage"):
        blobs_at(str(tmp_path / "files" / "below"), buses.open().store.blobs)
    blobs = blobs_at(str(tmp_path / "folder"), buses.open().store.blobs)
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").write_text("gone")
    with pytest.raises(BusError, match="full") as caught:
        await blobs.write("a", parts(b"x"), 60)
    assert caught.value.code == "storage_failed"


async def test_chunks_have_one_size() -> None:
    chunks = [each async for each in rechunked(parts(b"ab", b"", b"cdefg"), 3)]
    assert chunks == [b"abc", b"def", b"g"]


async def test_files_of_a_tenant_have_a_limit(buses: Any) -> None:
    files = buses.open().store.files
    await files.reserve(file("a", num_bytes=5000, ready=False), 10_000)
    with pytest.raises(FilesFull):
        await files.reserve(file("b", num_bytes=5000, ready=False), 10_000)
    await files.reserve(file("b", num_bytes=5000, ready=False, tenant="other"), 10_000)
    await files.put(file("a", num_bytes=100, pieces=(Piece("x", 100),)))
    await files.reserve(file("b", num_bytes=5000, ready=False), 10_000)
    assert [each.id for each in await files.listed("t")] == ["b", "a"]
    assert await files.find("other", "a") is None
    assert await files.remove("t", ["a", "unknown"]) == 1
    assert await files.find("t", "a") is None


async def test_files_expire(buses: Any) -> None:
    files = buses.open().store.files
    await files.put(file("over", expires_s=NOW_S - 1))
    stopped = file("stopped", created_s=NOW_S - 4000, ready=False, expires_s=NOW_S + 60)
    await files.reserve(stopped, 10_000)
    await files.put(file("whole", created_s=NOW_S - 4000))
    assert [each.id for each in await files.listed("t")] == ["whole"]
    assert await files.find("t", "over") is None
    await files.put(file("other", tenant="a b", expires_s=NOW_S - 1))
    assert {each.id for each in await files.expired(9)} == {"over", "stopped", "other"}
    await files.remove("t", ["over", "stopped"])
    assert [each.id for each in await files.expired(9)] == ["other"]


async def test_a_state_is_replaced_only_if_it_is_known(buses: Any) -> None:
    bus = buses.open()
    batches, other = bus.store.batches, buses.another(bus).store.batches
    await batches.create(batch("b1"), 60)
    await batches.create(batch("b2", created_s=NOW_S + 1), 60)
    await batches.create(batch("b3", tenant="other"), 60)
    assert await batches.unfinished(2) == ["b1", "b3"]
    assert [each.state.id for each in await other.listed("t")] == ["b2", "b1"]
    known = await other.read("b1")
    assert await batches.replace(known, batch("b1", status="in_progress"))
    assert await other.replace(known, batch("b1", status="failed")) is None
    found = await other.read("b1")
    assert found is not None
    assert found.state.status == "in_progress"
    await batches.close("b1")
    assert await other.unfinished(9) == ["b1", "b3", "b2"], "it has not ended"
    known = await other.read("b1")
    assert await batches.replace(known, batch("b1", status="failed"))
    await batches.close("b1")
    assert await other.unfinished(9) == ["b3", "b2"]
    await batches.delete("t", "b2")
    assert [each.state.id for each in await other.listed("t")] == ["b1"]
    assert await other.read("b2") is None


async def test_a_segment_has_one_result(buses: Any) -> None:
    bus = buses.open()
    batches, other = bus.store.batches, buses.another(bus).store.batches
    await batches.create(batch("b", starts=((0, 0), (10, 3), (20, 6))), 60)
    assert await batches.take("b", 0, "one", 60)
    assert await batches.take("b", 0, "one", 60), "again by the same gateway"
    assert not await other.take("b", 0, "two", 60)
    await batches.renew("b", 0, 60, completed=2, failed=1)
    found = await other.read("b")
    assert found is not None
    assert (found.completed, found.failed) == (2, 1)
    await batches.release("b", 0)
    assert await other.take("b", 0, "two", 60)
    first = SegmentResult(completed=3, output=Piece("one", 30))
    assert await batches.finish("b", 0, first)
    assert not await other.finish("b", 0, SegmentResult(completed=3, output=Piece("two", 30)))
    assert await batches.finish("b", 0, first), "a repeated write"
    found = await other.read("b")
    assert found is not None
    assert dict(found.done) == {0: first}
    assert (found.completed, found.failed) == (3, 0)
    assert found.state.segments == 2
    skipped = {number: SegmentResult(cancelled=3) for number in (0, 1)}
    assert await batches.take("b", 1, "one", 60)
    assert await other.skip("b", skipped, "two", 60) == [], "one counts, the other is computed"
    await batches.release("b", 1)
    assert await other.skip("b", skipped, "two", 60) == [1]
    assert not await batches.finish("b", 1, first)
    assert await other.skip("b", {}, "two", 60) == []


async def test_a_batch_that_has_ended_keeps_its_counts_alone(buses: Any) -> None:
    bus = buses.open()
    batches, records = bus.store.batches, bus.store.batches._records
    starts = tuple((100 * number, number) for number in range(1001))
    state = batch("b", status="in_progress", starts=starts, total=1000)
    await batches.create(state, 60)
    for number in range(999):
        name = f"b/{number}"
        await batches.note_blobs("b", [name])
        result = SegmentResult(completed=1, output=Piece(name, 9), completion_tokens=2)
        assert await batches.finish("b", number, result)
    await batches.finish("b", 999, SegmentResult(cancelled=1))
    found = await batches.read("b")
    await batches.note_progress(progress_of(found))
    assert await batches.progress() == (1, [progress_of(found)])
    await batches.close("b")
    assert (await batches.progress())[0] == 1, "it has not ended"
    assert await batches.replace(found, msgspec.structs.replace(state, status="completed"))
    await batches.close("b")
    # By gateways that have not seen its end.
    await batches.renew("b", 999, 60, completed=5)
    await batches.close("b")
    found = await batches.read("b")
    assert (found.completed, found.counts.cancelled) == (999, 1)
    assert found.counts.completion_tokens == 1998
    assert await batches.progress() == (0, [])
    key = batches._keys.batch("b")
    fields = await records.run("HGETALL", key)
    assert sum(map(len, fields.values())) < 1000
    await batches.delete("t", "b")
    assert await records.run("HGETALL", key) == {}
    assert await records.run("HGETALL", batches._keys.batches("t")) == {}


async def test_nothing_is_kept_of_batches_that_have_expired(redis_buses: Any) -> None:
    """Each key has an end, but for lists that are empty by then."""
    batches = redis_buses.open().store.batches
    await batches.create(batch("b"), 60)
    await batches.take("b", 0, "one", 60)
    await batches.renew("b", 0, 60, completed=1)
    await batches.note_blobs("b", ["x"])
    await batches.finish("b", 0, SegmentResult(completed=1))
    await batches.note_progress(progress_of(await batches.read("b")))
    async with Redis.from_url(redis_buses.url) as redis:
        names = [each async for each in redis.scan_iter(f"{redis_buses.prefix}:*")]
        lasting = {each for each in names if await redis.ttl(each) < 0}
        assert lasting == {batches._keys.open_batches}
        assert len(names) == 5
        await redis.delete(batches._keys.batch("b"))
    assert await batches.unfinished(9) == ["b"]
    await batches.close("b")
    assert await batches.unfinished(9) == []
    assert await batches.listed("t") == []


async def test_a_batch_of_another_version_stays_for_its_gateways(buses: Any) -> None:
    bus = buses.open()
    batches = bus.store.batches
    await batches.create(batch("b"), 60)
    key = bus.store.batches._keys.batch("b")
    await bus.store.batches._records.run("HSET", key, b"state", b'{"status": "new"}')
    assert await batches.read("b") is None
    assert await batches.listed("t") == []
    await batches.close("b")
    assert await batches.unfinished(9) == ["b"]
    await bus.store.batches._records.run("DEL", key)
    await batches.close("b")
    assert await batches.unfinished(9) == []
