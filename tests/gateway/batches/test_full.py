"""Uploads that are broken, and storage that is full or elsewhere: refused, and nothing lost."""

from __future__ import annotations

import json
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import httpx
import pytest
from obstore.store import from_url
from redis.asyncio import Redis

from nano_inference.bus import open_bus
from nano_inference.config import BusConfig
from nano_inference.gateway.batches import runner

from ...cli.servers import free_port
from ...examples.environments import environment
from ...rig import mortal_server
from ..fake import Client, FakeEngine, app_of, chunk, completion, http_of

SETTINGS = {
    "gateway.message_format": "off",
    "batches.max_file_bytes": 8 << 20,
    "batches.max_tenant_bytes": 32 << 20,
}
PATH = "/v1/files"
B = "0f3"
FORM = (
    f'--{B}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--{B}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n'
    "Content-Type: application/octet-stream\r\n\r\n"
).encode()
END = f"\r\n--{B}--\r\n".encode()
HEADERS = {"Content-Type": f"multipart/form-data; boundary={B}"}
PIECES = (
    b"--",
    B.encode(),
    b"\r\n",
    b"\r",
    b"\n",
    b"\0",
    b'"',
    b"; name=",
    b"file",
    FORM[:40],
    END,
)
TYPES = ("multipart/form-data", "multipart/form-data; boundary=", "text/plain", "", "a" * 5000)


def form(content: bytes) -> bytes:
    return FORM + content + END


def mutated(rng: random.Random, body: bytes) -> bytes:
    """A form with some of its bytes changed, removed, doubled or in another place."""
    found = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(found) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0:
                del found[at : min(end, at + 20)]
            case 1:
                found[at:at] = rng.choice(PIECES)
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 9))
            case 3:
                del found[at:]
            case 4:
                found[at:at] = found[at:end][:200]
            case _:
                found[at : at + 1] = rng.randbytes(1)
    return bytes(found)


def blobs_in(engine: FakeEngine) -> set[bytes]:
    return {key for key in engine.bus.store.blobs._records._values if b":blob:" in key}


async def test_each_broken_upload_has_a_status_and_leaves_nothing(
    http: Client, engine: FakeEngine, soak: bool
) -> None:
    rng = random.Random(5)
    body = form(b'{"custom_id": "a"}\n' * 5)
    statuses: dict[int, int] = {}
    upload = {"bytes": 100, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
    part = f"/v1/uploads/{(await http.post('/v1/uploads', json=upload)).json()['id']}/parts"
    for number in range(10_000 if soak else 300):
        headers = dict(HEADERS)
        if rng.random() < 0.1:
            headers["Content-Type"] = rng.choice(TYPES)
        given = mutated(rng, body)
        of_part = number % 4 == 3
        if of_part:
            given = given.replace(b'name="file"', b'name="data"')
        answer = await http.post(part if of_part else PATH, content=given, headers=headers)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 413, 415), (answer.text, given)
        if answer.status_code == 200 and not of_part:
            file_id = answer.json()["id"]
            content = await http.get(f"{PATH}/{file_id}/content")
            assert content.status_code == 200
            assert len(content.content) == answer.json()["bytes"]
            assert (await http.delete(f"{PATH}/{file_id}")).status_code == 200
    assert {200, 400} <= statuses.keys()
    assert (await http.get(PATH)).json()["data"] == []
    assert (await http.post(part.replace("parts", "cancel"))).status_code == 200
    assert blobs_in(engine) == set()


@contextmanager
def full_disk(at_bytes: int) -> Iterator[None]:
    """Let no file of this process become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_full_disk_refuses_a_file_and_keeps_the_others(
    engine: FakeEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    async with http_of(app_of(engine, {**SETTINGS, "batches.storage": str(folder)})) as http:
        small = await http.post(PATH, content=form(b"small"), headers=HEADERS)
        with full_disk(1 << 19):
            whole = await http.post(PATH, content=form(b"x" * (3 << 20)), headers=HEADERS)
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "storage_failed"
        (listed,) = (await http.get(PATH)).json()["data"]
        assert listed["id"] == small.json()["id"]
        assert (await http.get(f"{PATH}/{listed['id']}/content")).content == b"small"
        assert [name for _, _, names in os.walk(folder) for name in names] == [listed["id"]]
        again = await http.post(PATH, content=form(b"x" * (3 << 20)), headers=HEADERS)
        assert again.status_code == 200


@pytest.mark.soak(only=True)
async def test_a_full_redis_refuses_files_and_a_batch_waits_for_room(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    monkeypatch.setattr(runner, "DEFAULT_RETRY_S", 0.05)
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "a"}}
    lines = [json.dumps(line | {"custom_id": f"c{n}"}).encode() for n in range(20)]
    async with mortal_server(tmp_path / "redis") as server, Redis(port=server.port) as plain:
        bus = open_bus(BusConfig(url=server.url))
        engine.bus.store = bus.store
        engine.outputs = lambda request: [chunk(request), completion(request)]
        engine.hold()
        app = app_of(engine, SETTINGS)
        async with http_of(app) as http, anyio.create_task_group() as group:
            group.start_soon(app.batches.run_forever)
            file = (await http.post(PATH, content=form(b"\n".join(lines)), headers=HEADERS)).json()
            body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
            batch = (await http.post("/v1/batches", json=body)).json()
            await engine.until(lambda: len(engine.requests) == 20)
            await plain.config_set("maxmemory", 1)
            refused = await http.post(PATH, content=form(b"x" * (1 << 20)), headers=HEADERS)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "bus_unavailable"
            engine.go()
            await engine.until(lambda: len(engine.ended) == 20)
            await plain.config_set("maxmemory", 0)
            found = await http.get(f"/v1/batches/{batch['id']}")
            while found.json()["status"] != "completed":
                found = await http.get(f"/v1/batches/{batch['id']}")
            answers = await http.get(f"{PATH}/{found.json()['output_file_id']}/content")
            ids = [json.loads(each)["custom_id"] for each in answers.text.splitlines()]
            assert ids == [f"c{n}" for n in range(20)]
            assert len((await http.get(PATH)).json()["data"]) == 2
            blobs = [each async for each in plain.scan_iter("*:blob:*")]
            assert len(blobs) == 2, "of the input and the output"
            group.cancel_scope.cancel()
        await bus.aclose()


@pytest.mark.soak(only=True)
async def test_files_are_in_a_bucket(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, cache: pytest.Cache
) -> None:
    programs = await anyio.to_thread.run_sync(environment, "moto", cache.mkdir("clients"))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = await anyio.open_process([str(programs / "moto_server"), "-p", str(port)])
    try:
        settings = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
        for name, value in (settings | {"ENDPOINT": url, "ALLOW_HTTP": "true"}).items():
            monkeypatch.setenv(f"AWS_{name}", value)
        async with httpx.AsyncClient() as plain:
            with anyio.fail_after(60):
                while not await _made(plain, f"{url}/files"):  # noqa: ASYNC110
                    await anyio.sleep(0.1)
        bucket = from_url("s3://files")

        def names() -> list[str]:
            return [each["path"] for page in bucket.list() for each in page]

        storage = {**SETTINGS, "batches.storage": "s3://files/of/ours"}
        async with http_of(app_of(engine, storage)) as http:
            content = os.urandom(6 << 20)  # in several parts
            answer = await http.post(PATH, content=form(content), headers=HEADERS)
            file_id = answer.json()["id"]
            assert (await http.get(f"{PATH}/{file_id}/content")).content == content
            assert names() == [f"of/ours/{file_id}"]
            cut = await http.post(PATH, content=form(content)[:-9], headers=HEADERS)
            assert cut.status_code == 400
            assert len(names()) == 1
            assert (await http.delete(f"{PATH}/{file_id}")).status_code == 200
            assert names() == []
            server.kill()
            await server.wait()
            assert (await http.post(PATH, content=form(b"x"), headers=HEADERS)).status_code == 503
    finally:
        if server.returncode is None:
            server.kill()
        await server.aclose()


async def _made(plain: httpx.AsyncClient, bucket: str) -> bool:
    """Make a bucket; return False while the server starts."""
    try:
        return (await plain.put(bucket)).status_code == 200
    except httpx.ConnectError:
        return False
