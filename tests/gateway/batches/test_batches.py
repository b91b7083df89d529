"""Files and batches over OpenAI's interface, by its client library."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import httpx2
import pytest
from anthropic import APIStatusError as AnthropicError
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError

from nano_inference.config import BusError
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.batches import runner
from nano_inference.gateway.batches.lines import lines_of
from nano_inference.gateway.serving.request_ids import mark_of
from nano_inference.store.batches import SegmentResult
from nano_inference.telemetry import instruments, names

from ..fake import Client, FakeEngine, app_of, chunk, completion, observed, refused
from ..recorded import Recorded, ids

SETTINGS = {
    "gateway.message_format": "off",
    "batches.segment_lines": 3,
    "batches.max_in_flight": 4,
    "gateway.max_in_flight": 8,
    "batches.max_file_bytes": 20_000,
    "batches.max_tenant_bytes": 100_000,
}
PATH = "/v1/completions"


def line(number: int, **changed: Any) -> str:
    body = {"model": "tiny", "prompt": f"prompt {number}", **changed.pop("body", {})}
    whole = {"custom_id": f"c{number}", "method": "POST", "url": PATH, "body": body, **changed}
    return json.dumps(whole)


@pytest.fixture
async def app(engine: FakeEngine, config: Any) -> AsyncIterator[GatewayApp]:
    """The application, with its runner of batches."""
    app = app_of(engine, config)
    running = asyncio.create_task(app.batches.run_forever())
    yield app
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture
async def client(app: GatewayApp) -> AsyncIterator[AsyncOpenAI]:
    transport = httpx2.ASGITransport(observed(app))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield AsyncOpenAI(
            base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=http
        )


def held(engine: FakeEngine) -> None:
    """Let the engine stop each request after its first token, until `go`."""
    engine.outputs = lambda request: [chunk(request), completion(request)]
    engine.hold()


async def uploaded(client: AsyncOpenAI, *lines: str) -> str:
    content = "\n".join(lines).encode()
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


async def begun(client: AsyncOpenAI, *lines: str, **more: Any) -> str:
    file_id = await uploaded(client, *lines)
    made = await client.batches.create(
        input_file_id=file_id, endpoint=PATH, completion_window="24h", **more
    )
    assert made.status == "validating"
    return made.id


async def ended(client: AsyncOpenAI, batch_id: str) -> Any:
    while True:
        found = await client.batches.retrieve(batch_id)
        if found.status in ("completed", "failed", "expired", "cancelled"):
            return found
        await anyio.sleep(0.01)


async def results(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    found = [json.loads(each) for each in text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


async def test_each_line_has_one_answer(client: AsyncOpenAI, engine: FakeEngine) -> None:
    batch = await ended(
        client, await begun(client, *map(line, range(8)), metadata={"what": "test"})
    )
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.total) == (8, 8)
    assert batch.error_file_id is None
    found = await results(client, batch.output_file_id)
    assert list(found) == [f"c{number}" for number in range(8)], "in the order of the input"
    first = found["c0"]["response"]
    assert first["status_code"] == 200
    assert first["body"]["choices"][0]["text"] == "five six"
    assert {each.priority for each in engine.requests} == {-1000}, "below everything else"
    assert len(engine.requests) == 8
    listed = await client.batches.list()
    assert [each.metadata for each in listed.data] == [{"what": "test"}]


async def test_lines_on_a_bus_in_memory_are_no_durable_calls(
    engine: FakeEngine, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.bus.durable = False
    monkeypatch.setattr(engine.bus.store.calls, "keep", None)  # which a durable call would call
    app = app_of(engine, config)
    running = asyncio.create_task(app.batches.run_forever())
    transport = httpx2.ASGITransport(observed(app))
    async with httpx2.AsyncClient(transport=transport) as http:
        own = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
        batch = await ended(own, await begun(own, line(0), line(1)))
        assert list(await results(own, batch.output_file_id)) == ["c0", "c1"]
    running.cancel()
    await asyncio.wait([running])


async def test_operators_see_batches_and_find_their_lines(engine: FakeEngine, config: Any) -> None:
    """Metrics, the progress of an open batch, and spans; not of lines that are refused."""
    recorded = Recorded()
    app = app_of(engine, config, recorded.measures)
    held(engine)
    running = asyncio.create_task(app.batches.run_forever())
    transport = httpx2.ASGITransport(observed(app))
    async with httpx2.AsyncClient(transport=transport) as http:
        own = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
        batch_id = await begun(own, line(0), line(1), "no json")
        await engine.until(lambda: len(engine.requests) == 2)
        number, found = await app.batches.store.progress()
        assert (number, [(each.id, each.total, each.open) for each in found]) == (
            1,
            [(batch_id, 3, 3)],
        )
        assert recorded.values(instruments.BATCHES) == {(): 1}
        assert recorded.values(instruments.BATCH_OPEN_LINES) == {(): 3}
        engine.go()
        await ended(own, batch_id)
    running.cancel()
    await asyncio.wait([running])
    counts = recorded.values(instruments.BATCH_LINES)
    assert counts == {("completed",): 2, ("failed",): 1, ("expired",): 0, ("cancelled",): 0}
    assert recorded.values(instruments.BATCH_OPEN_LINES) == {(): 0}
    spans = [each for each in recorded.spans() if each.attributes[names.BATCH_ID] == batch_id]
    (whole,) = [each for each in spans if each.name == "batch"]
    assert whole.attributes["nano.batch.lines.completed"] == 2
    lines = {each.attributes[names.BATCH_LINE]: each for each in spans if each is not whole}
    assert {number: each.name for number, each in lines.items()} == {
        0: "text_completion tiny",
        1: "text_completion tiny",
    }
    traces = {ids(each)[:2] for each in lines.values()}
    assert len({trace for trace, _ in traces}) == 2, "each has a trace of its own"
    assert {(each.trace_id, each.span_id) for each in engine.traces if each} == traces


async def test_a_line_that_can_not_run_is_an_error_line(client: AsyncOpenAI) -> None:
    lines = [
        line(0),
        "no json",
        line(2, url="/v1/other"),
        line(3, body={"max_tokens": "x"}),
        line(4, body={"stream": True}),
        "",
        line(5, method="GET"),
        line(6, custom_id=""),
    ]
    batch = await ended(client, await begun(client, *lines))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 1, 6)
    text = (await client.files.content(batch.error_file_id)).text
    found = [json.loads(each) for each in text.splitlines()]
    assert [each["custom_id"] for each in found] == ["", "c2", "c3", "c4", "c5", ""]
    assert found[0]["error"]["code"] == "malformed"
    assert found[0]["error"]["message"].startswith("line 2 can't be read")
    assert found[2]["response"]["body"]["error"]["param"] == "max_tokens"


async def test_a_file_of_no_lines_fails(client: AsyncOpenAI) -> None:
    batch = await ended(client, await begun(client, " ", ""))
    assert batch.status == "failed"
    assert batch.errors.data[0].code == "empty_file"
    batch = await ended(client, await begun(client, line(1), line(2), line(1)))
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == ("duplicate_custom_id", 3)


async def test_a_refusal_for_load_is_tried_again(client: AsyncOpenAI, engine: FakeEngine) -> None:
    usual = engine.outputs

    def outputs(request: Any) -> Any:
        first = len(engine.requests) == 1
        return (refused("overloaded", retry_after_s=0.01) if first else usual)(request)

    engine.outputs = outputs
    batch = await ended(client, await begun(client, line(0)))
    assert batch.request_counts.completed == 1
    assert len(engine.requests) == 2


@pytest.mark.parametrize("how", ["aborted", "lost"])
async def test_an_aborted_or_lost_line_runs_anew(
    client: AsyncOpenAI, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(runner, "DEFAULT_RETRY_S", 0.01)
    usual = engine.outputs

    def outputs(request: Any) -> Any:
        if len(engine.requests) > 1:
            return usual(request)
        if how == "lost":  # by a failover of the bus
            raise BusError("the entry is in no queue", code="unknown_request")
        return [completion(request, status="cancelled")]

    engine.outputs = outputs
    batch = await ended(client, await begun(client, line(0)))
    assert batch.request_counts.completed == 1
    assert len(engine.requests) == 2


async def test_a_cancelled_batch_keeps_its_answers(
    client: AsyncOpenAI, app: GatewayApp, engine: FakeEngine
) -> None:
    usual = engine.outputs
    engine.outputs = lambda request: usual(request) if "prompt 0" in str(request.prompt) else []
    batch_id = await begun(client, *map(line, range(12)))
    await engine.until(lambda: "prompt 0" in str([each.prompt for each in engine.requests]))
    await engine.until(lambda: len(engine.ended) == 1)
    assert (await client.batches.cancel(batch_id)).status == "cancelling"
    batch = await ended(client, batch_id)
    assert batch.status == "cancelled"
    assert list(await results(client, batch.output_file_id)) == ["c0"]
    found = await app.batches.store.read(batch_id)
    assert found is not None
    assert (found.counts.completed, found.counts.cancelled) == (1, 11)
    with pytest.raises(APIStatusError, match="no line is left"):
        await client.batches.cancel(batch_id)


async def test_two_gateways_share_a_batch(
    client: AsyncOpenAI, app: GatewayApp, engine: FakeEngine, config: Any
) -> None:
    another = app_of(engine, config)
    async with anyio.create_task_group() as group:
        group.start_soon(another.batches.run_forever)
        batch = await ended(client, await begun(client, *map(line, range(30))))
        group.cancel_scope.cancel()
    assert batch.request_counts.completed == 30
    assert len(await results(client, batch.output_file_id)) == 30
    assert len(engine.requests) == 30, "no line ran twice"


async def test_lines_go_on_while_the_bus_is_away(
    client: AsyncOpenAI, app: GatewayApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, looks, back = app.batches.store.read, 0, anyio.Event()

    async def read(batch_id: str) -> Any:
        nonlocal looks
        looks += engine.requests != []
        if 0 < looks < 3:
            raise BusError("it is away")
        if looks:
            back.set()
        return await usual(batch_id)

    monkeypatch.setattr(app.batches.store, "read", read)
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    held(engine)
    batch_id = await begun(client, *map(line, range(4)))
    await engine.until(lambda: len(engine.requests) == 4)
    await back.wait()
    engine.go()
    assert (await ended(client, batch_id)).request_counts.completed == 4
    assert len(engine.requests) == 4, "no line ran twice"
    assert engine.left == []


async def test_a_segment_that_another_gateway_has_recorded_is_left(
    client: AsyncOpenAI, app: GatewayApp, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    held(engine)
    batch_id = await begun(client, *map(line, range(3)))
    await engine.until(lambda: len(engine.requests) == 3)
    assert await app.batches.store.finish(batch_id, 0, SegmentResult(completed=3))
    assert (await ended(client, batch_id)).request_counts.completed == 3
    assert len(engine.requests) == 3, "no line begins again"


async def test_a_draining_gateway_leaves_its_lines_to_others(
    client: AsyncOpenAI,
    app: GatewayApp,
    engine: FakeEngine,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    released, usual = anyio.Event(), app.batches.store.release

    async def release(batch_id: str, number: int) -> None:
        await usual(batch_id, number)
        if number == 0 and app.kserve.readiness.draining:
            released.set()

    monkeypatch.setattr(app.batches.store, "release", release)
    held(engine)
    batch_id = await begun(client, *map(line, range(6)))
    await engine.until(lambda: len(engine.requests) == 4)
    app.kserve.readiness.draining = True
    with anyio.fail_after(5):
        await released.wait()
    engine.go()
    another = app_of(engine, config)
    async with anyio.create_task_group() as group:
        group.start_soon(another.batches.run_forever)
        batch = await ended(client, batch_id)
        group.cancel_scope.cancel()
    assert batch.request_counts.completed == 6
    assert len(await results(client, batch.output_file_id)) == 6


async def test_a_refused_tenant_holds_no_place(client: AsyncOpenAI, engine: FakeEngine) -> None:
    usual = engine.outputs

    def outputs(request: Any) -> Any:
        one = request.tenant == "one"
        return (refused("overloaded", retry_after_s=60.0) if one else usual)(request)

    engine.outputs = outputs
    one, two = (client.with_options(default_headers={"X-Tenant": each}) for each in ("one", "two"))
    waiting = await begun(one, *map(line, range(8)))
    await engine.until(lambda: len(engine.requests) >= 4)
    assert (await ended(two, await begun(two, line(0)))).request_counts.completed == 1
    assert (await one.batches.retrieve(waiting)).status == "in_progress"


async def test_lines_take_no_places_of_the_tenants_other_calls(
    client: AsyncOpenAI, engine: FakeEngine
) -> None:
    held(engine)
    batch_id = await begun(client, *map(line, range(4)))
    await engine.until(lambda: len(engine.requests) == 4)  # half of the gateway's places
    async with anyio.create_task_group() as group:
        group.start_soon(partial(client.completions.create, model="tiny", prompt="now"))
        await engine.until(lambda: len(engine.requests) == 5)
        engine.go()
    assert (await ended(client, batch_id)).request_counts.completed == 4


async def test_few_lines_are_in_flight_while_other_calls_run(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "QUIET_S", 0.05)
    app = app_of(engine, SETTINGS | {"batches.max_beside": 2})
    held(engine)
    async with (
        httpx2.AsyncClient(transport=httpx2.ASGITransport(observed(app))) as http,
        anyio.create_task_group() as group,
    ):
        client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
        group.start_soon(partial(client.completions.create, model="tiny", prompt="now"))
        await engine.until(lambda: len(engine.requests) == 1)
        batch_id = await begun(client, *map(line, range(9)))
        group.start_soon(app.batches.run_forever)
        await engine.until(lambda: len(engine.requests) == 3)
        await anyio.sleep(0.1)
        assert len(engine.requests) == 3, "the call and two lines"
        engine.go()
        assert (await ended(client, batch_id)).request_counts.completed == 9
        assert len(engine.requests) == 10
        group.cancel_scope.cancel()


async def test_lines_that_end_at_once_leave_turns_of_the_loop_to_other_calls(
    engine: FakeEngine,
) -> None:
    lines = 100
    many = {"batches.max_in_flight": lines, "batches.segment_lines": lines}
    app = app_of(engine, SETTINGS | many | {"gateway.max_in_flight": 4 * lines})
    usual, answered, most = app.batches.answer, 0, 0

    async def answer(call: Any, body: bytes) -> Any:
        nonlocal answered
        found = await usual(call, body)
        answered += 1
        return found

    app.batches.answer = answer
    held(engine)
    async with (
        httpx2.AsyncClient(transport=httpx2.ASGITransport(observed(app))) as http,
        anyio.create_task_group() as group,
    ):
        group.start_soon(app.batches.run_forever)
        client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
        batch_id = await begun(client, *map(line, range(lines)))
        await engine.until(lambda: len(engine.requests) == lines)
        engine.go()
        while answered < lines:
            before = answered
            await asyncio.sleep(0)
            most = max(most, answered - before)
        assert (await ended(client, batch_id)).request_counts.completed == lines
        group.cancel_scope.cancel()
    assert most <= 8, "not all of them before another task goes on"


async def test_a_long_line_takes_no_more_memory_than_the_longest_that_may_run() -> None:
    async def parts(*found: bytes) -> AsyncIterator[bytes]:
        for each in found:
            yield each

    whole = b"\xef\xbb\xbf{1}\n\n  \r\n" + b"x" * 50 + b"\nlast"
    for size in (1, 3, 7, 100):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        found = [each async for each in lines_of(parts(*pieces), 10)]
        assert [(each.start, each.stop) for each in found] == [(0, 7), (12, 63), (63, 67)]
        assert [each.content[:11] for each in found] == [b"{1}", b"x" * 11, b"last"]
        assert len(found[1].content) <= max(11, 11 + size)


async def test_what_killed_gateways_wrote_is_deleted_at_the_end(
    client: AsyncOpenAI, app: GatewayApp, engine: FakeEngine
) -> None:
    held(engine)
    batch_id = await begun(client, line(0))
    await engine.until(lambda: len(engine.requests) == 1)
    batches, blobs = app.batches.store, app.batches.files.blobs

    async def content() -> AsyncIterator[bytes]:
        yield b"unfinished"

    await batches.note_blobs(batch_id, ["of-killed"])
    await blobs.write("of-killed", content(), 60)
    engine.go()
    batch = await ended(client, batch_id)
    with pytest.raises(KeyError):
        await blobs.read("of-killed", 0, 1)
    assert len(await results(client, batch.output_file_id)) == 1


async def test_another_tenant_sees_nothing(client: AsyncOpenAI) -> None:
    batch_id = await begun(client, line(0))
    batch = await ended(client, batch_id)
    other = client.with_options(default_headers={"X-Tenant": "other"})
    assert (await other.batches.list()).data == []
    assert (await other.files.list()).data == []
    for call in (
        other.batches.retrieve(batch_id),
        other.batches.cancel(batch_id),
        other.files.content(batch.output_file_id),
        other.files.delete(batch.input_file_id),
    ):
        with pytest.raises(NotFoundError):
            await call


async def test_a_file_is_read_listed_and_deleted(client: AsyncOpenAI) -> None:
    content = b"\xff\x00 any bytes" * 100
    made = await client.files.create(
        file=("ä.bin", content),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (made.filename, made.bytes, made.purpose) == ("ä.bin", len(content), "user_data")
    assert made.expires_at == made.created_at + 3600
    assert (await client.files.content(made.id)).content == content
    assert [each.id for each in (await client.files.list(purpose="user_data")).data] == [made.id]
    assert (await client.files.list(purpose="batch")).data == []
    with pytest.raises(BadRequestError, match="order is 'up'; it may be 'asc', 'desc'"):
        await client.files.list(order="up")  # type: ignore[arg-type]
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(NotFoundError):
        await client.files.content(made.id)


async def test_a_file_comes_in_parts(client: AsyncOpenAI, app: GatewayApp) -> None:
    content = "\n".join(map(line, range(20))).encode()
    made = await client.uploads.upload_file_chunked(
        file=content,
        filename="in.jsonl",
        bytes=len(content),
        mime_type="application/jsonl",
        purpose="batch",
        part_size=700,
        md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
    )
    assert made.status == "completed"
    assert made.file is not None
    assert (await client.files.content(made.file.id)).content == content
    batch = await client.batches.create(
        input_file_id=made.file.id, endpoint=PATH, completion_window="24h"
    )
    assert (await ended(client, batch.id)).request_counts.completed == 20
    begun = await client.uploads.create(
        bytes=10, filename="a", mime_type="text/plain", purpose="batch"
    )
    parts = client.uploads.parts
    first = await parts.create(begun.id, data=b"12345")
    with pytest.raises(APIStatusError, match="10 bytes"):
        await parts.create(begun.id, data=b"x" * 11)
    with pytest.raises(BadRequestError, match="5 bytes"):
        await client.uploads.complete(begun.id, part_ids=[first.id])
    with pytest.raises(BadRequestError, match="part_x"):
        await client.uploads.complete(begun.id, part_ids=["part_x"])
    with pytest.raises(NotFoundError):
        await client.files.retrieve(begun.id.replace("upload_", "file-"))
    assert (await client.uploads.cancel(begun.id)).status == "cancelled"
    with pytest.raises(NotFoundError):
        await parts.create(begun.id, data=b"12345")
    with pytest.raises(KeyError):
        await app.batches.files.blobs.read(first.id, 0, 1)


async def test_a_name_of_a_file_can_not_end_a_header(client: AsyncOpenAI) -> None:
    made = await client.files.create(file=('a\n"b: c\x7f\u2028', b"x"), purpose="user_data")
    header = (await client.files.content(made.id)).response.headers["content-disposition"]
    assert header.isprintable()


async def test_bad_uploads_leave_nothing(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="purpose"):
        await client.files.create(file=("a", b"x"), purpose="other")  # type: ignore[arg-type]
    with pytest.raises(APIStatusError, match=r"batches\.max_file_bytes"):
        await client.files.create(file=("a", b"x" * 20_001), purpose="batch")
    for _ in range(4):
        await client.files.create(file=("a", b"x" * 19_000), purpose="batch")
    with pytest.raises(APIStatusError, match=r"batches\.max_tenant_bytes"):
        await client.files.create(file=("a", b"x" * 19_000), purpose="batch")
    assert len((await client.files.list()).data) == 4


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"--b\r\n", 400),
        (b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n', 400),
        (b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx', 400),
        (b"\x00" * 100, 400),
    ],
)
async def test_a_broken_form_is_refused(http: Client, body: bytes, status: int) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await http.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert (await http.get("/v1/files")).json()["data"] == []


async def test_batches_of_anthropics_messages(app: GatewayApp) -> None:
    transport = httpx2.ASGITransport(observed(app))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = AsyncAnthropic(
            base_url="http://127.0.0.1", api_key="none", max_retries=0, http_client=http
        )
        batches = client.messages.batches
        body: Any = {
            "model": "tiny",
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "a"}],
        }
        wrong = body | {"max_tokens": "x"}
        asked: Any = [{"custom_id": f"c{n}", "params": body} for n in range(4)]
        made = await batches.create(requests=[*asked, {"custom_id": "bad", "params": wrong}])
        while made.processing_status != "ended":
            await anyio.sleep(0.01)
            made = await batches.retrieve(made.id)
        assert (made.request_counts.succeeded, made.request_counts.errored) == (4, 1)
        found = [each async for each in await batches.results(made.id)]
        assert [each.custom_id for each in found] == ["c0", "c1", "c2", "c3", "bad"]
        assert found[0].result.type == "succeeded"
        assert found[0].result.message.content[0].text == "five six"  # type: ignore[union-attr]
        assert found[4].result.type == "errored"
        assert [each.id for each in (await batches.list()).data] == [made.id]
        await batches.delete(made.id)
        assert (await batches.list()).data == []
        with pytest.raises(AnthropicError, match="earlier request"):
            await batches.create(requests=[asked[0], asked[0]])


async def test_the_results_of_a_batch_have_its_id_as_their_tag(
    client: AsyncOpenAI, engine: FakeEngine
) -> None:
    """Also beside a line that names its request itself."""
    named = {"url": "/generate", "body": {"rid": "mine", "text": "x"}}
    file_id = await uploaded(client, line(1), line(2))
    other = await uploaded(client, json.dumps({"custom_id": "c", "method": "POST", **named}))
    batches = [
        await client.batches.create(
            input_file_id=each,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
        )
        for each, endpoint in ((file_id, PATH), (other, "/generate"))
    ]
    for each in batches:
        found = await ended(client, each.id)
        assert found.request_counts.failed == 0, found
    ids = {request.request_id for request in engine.requests}
    tenant = engine.requests[0].tenant
    assert sum(mark_of(tenant, batches[0].id) in each for each in ids) == 2
    assert "mine" in ids
