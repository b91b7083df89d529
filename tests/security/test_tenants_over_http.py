"""One client of the gateway does not take what the next one needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config, load_config
from nano_inference.gateway.call import MAX_TENANT_LENGTH
from nano_inference.stages.admission.checks import MAX_TENANT_LENGTH as ADMISSIONS

from ..gateway.errors import error_of
from ..gateway.fake import FakeEngine, completion, report
from .conftest import OpenHttp

LIMIT_S = 20
TURNS = 10_000


class GatedEngine(FakeEngine):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.most = self.running = 0

    async def _made(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        self._change()
        try:
            await self.gate.wait()
            yield completion(request)
        finally:
            self.running -= 1
            if not self.gate.is_set():
                self.left.append(request.request_id)
            self._change()

    def of(self, tenant: str) -> int:
        """Return the number of a tenant's requests that have arrived."""
        return sum(request.tenant == tenant for request in self.requests)


@pytest.fixture
async def engine() -> GatedEngine:
    return GatedEngine()


@asynccontextmanager
async def meanwhile(*calls: Awaitable[httpx.Response]) -> AsyncIterator[list[Any]]:
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        async with asyncio.timeout(LIMIT_S):
            yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def one(http: httpx.AsyncClient, tenant: str = "", **body: Any) -> Awaitable[httpx.Response]:
    headers = {"X-Tenant": tenant} if tenant else {}
    return http.post("/generate", json={"text": "a"} | body, headers=headers)


async def waiting(http: httpx.AsyncClient) -> int:
    (load,) = (await http.get("/v1/loads")).json()["loads"]
    return int(load["num_waiting_reqs"])


async def until_waiting(http: httpx.AsyncClient, number: int) -> None:
    for _ in range(TURNS):
        if await waiting(http) == number:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{await waiting(http)} wait, not {number}")


async def abort_until_done(
    http: httpx.AsyncClient, calls: list[Any], *bodies: dict[str, Any]
) -> None:
    """Abort like slime: requests that have only just come may not be found yet."""
    for _ in range(TURNS):
        if all(call.done() for call in calls):
            return
        for body in bodies:
            await http.post("/abort_request", json=body)
        await asyncio.sleep(0)
    raise AssertionError("not aborted")


# --- whose a request is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "tenant"),
    [
        ("127.0.0.1", "http:127.0.0.1"),
        ("::ffff:10.0.0.7", "http:10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "http:2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "http:2001:db8:1:2::/64"),
        ("fe80::1%eth0", "http:fe80::/64"),
        ("testclient", "http:testclient"),
        ("\x1b[31m", "http:unknown"),
    ],
)
async def test_a_client_is_known_by_its_address(
    open_http: OpenHttp, engine: GatedEngine, address: str, tenant: str
) -> None:
    engine.gate.set()
    await one(open_http(address))
    assert [request.tenant for request in engine.requests] == [tenant]


async def test_a_client_names_its_tenant(http: httpx.AsyncClient, engine: GatedEngine) -> None:
    engine.gate.set()
    await one(http, "team a", text=["a", "b"])
    assert [request.tenant for request in engine.requests] == ["team a"] * 2


@pytest.mark.parametrize("name", ["", "a" * 129, "a\x85b", "a\tb"])
async def test_a_name_that_admission_would_refuse(
    http: httpx.AsyncClient, engine: GatedEngine, name: str
) -> None:
    headers = {b"X-Tenant": name.encode("latin-1")}
    answer = await http.post("/generate", json={"text": "a"}, headers=headers)
    assert error_of(answer, 400) == "invalid_tenant"
    assert not engine.requests
    assert MAX_TENANT_LENGTH == ADMISSIONS


async def test_no_client_preempts_others(open_http: OpenHttp, engine: GatedEngine) -> None:
    engine.gate.set()
    refused = [await one(open_http(), priority=1), await one(open_http(), priority=1000)]
    refused += [await one(open_http(gateway__max_priority=7), priority=8)]
    assert [answer.status_code for answer in refused] == [400] * 3
    await one(open_http(gateway__max_priority=7), priority=7)
    await one(open_http(), priority=-3)
    assert [request.priority for request in engine.requests] == [7, -3]


# --- places in the pipeline ---------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 300])
async def test_many_at_once_wait_and_are_all_served(
    open_http: OpenHttp, engine: GatedEngine, batches: int
) -> None:
    http = open_http(gateway__max_in_flight=100)
    prompts = ["a"] * (1200 // batches)
    async with meanwhile(*(one(http, text=prompts) for _ in range(batches))) as calls:
        await engine.until(lambda: len(engine.requests) == 50)
        engine.gate.set()
        answers = await asyncio.gather(*calls)
    assert {answer.status_code for answer in answers} == {200}
    assert len(engine.requests) == 1200
    assert engine.most == 50


async def test_a_place_is_given_back_however_a_request_ends(
    open_http: OpenHttp, engine: GatedEngine
) -> None:
    http = open_http(gateway__max_in_flight=4)
    for body in ({"text": ["a"] * 9}, {"stream": True}, {"rid": ["r", "r"], "text": ["a", "b"]}):
        engine.requests.clear()
        async with meanwhile(one(http, **body)):
            if "rid" not in body:
                await engine.until(lambda: len(engine.requests) > 0)
        await engine.until(lambda: engine.running == 0)
    engine.gate.set()
    async with meanwhile(*(one(http) for _ in range(9))) as calls:
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_disconnect_ends_the_wait_for_a_slot(
    open_http: OpenHttp, engine: GatedEngine
) -> None:
    engine.stage_reports = [report()]
    http = open_http(gateway__max_in_flight=4)
    async with meanwhile(one(http, text=["a"] * 3)):
        await engine.until(lambda: len(engine.requests) == 2)
        async with meanwhile(one(http, text=["b"] * 50), *(one(http) for _ in range(7))):
            await until_waiting(http, 2 + 1 + 50 + 7)
        await until_waiting(http, 2 + 1)
    assert {request.prompt for request in engine.requests} == {"a"}
    await until_waiting(http, 0)


async def test_waiting_requests_are_aborted_at_once(
    open_http: OpenHttp, engine: GatedEngine
) -> None:
    http = open_http(gateway__max_in_flight=4)
    async with meanwhile(one(http, text=["a"] * 2)):
        await engine.until(lambda: len(engine.requests) == 2)
        async with meanwhile(one(http, rid="r"), one(http, rid="s", text=["b", "c"])) as calls:
            await abort_until_done(http, calls, {"rid": "r"}, {"rid": "s"})
            first, batch = [call.result().json() for call in calls]
        async with meanwhile(one(http), one(http, stream=True)) as calls:
            await abort_until_done(http, calls, {"abort_all": True})
    for answer in (first, *batch):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(engine.requests) == 2


async def test_more_lanes_have_more_places(open_http: OpenHttp, engine: GatedEngine) -> None:
    engine.stage_reports = [report(lane=lane) for lane in "01"]
    http = open_http(admission__max_in_flight=8, engine__max_batch_size=2)
    async with meanwhile(one(http, text=["a"] * 20)):
        await engine.until(lambda: len(engine.requests) == 6)
        async with meanwhile(one(http, "newcomer", text=["a"] * 20)):
            await engine.until(lambda: engine.of("newcomer") == 3)
            await http.get("/health")
            assert len(engine.requests) == 9


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, 768),
        ({"admission.max_in_flight": 4096}, 3072),
        ({"engine.max_batch_size": 1024}, 2048),
        ({"gateway.max_in_flight": 10}, 10),
        ({"admission.max_in_flight": 1, "engine.max_batch_size": 1}, 2),
    ],
)
def test_one_tenant_alone_fills_a_batch(settings: dict[str, Any], places: int) -> None:
    config: Config = load_config(env={}, overrides=settings)
    assert config.gateway_places == places
    if config.gateway.max_in_flight is None:
        assert places // 2 >= config.engine.batch_size_on("cuda")
