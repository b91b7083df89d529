"""The client: requests, responses, errors and retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from nano_inference.config import NanoInferenceError
from nano_inference.kserve import client as client_module
from nano_inference.kserve.client import KServeClient, KServeError
from nano_inference.kserve.pool import BufferPool, PoolSlot
from nano_inference.kserve.protobuf import message
from nano_inference.kserve.tensors import InferResponse, NamedTensor

from ..certificates import Authority
from ..errors import raises
from ..rig import load
from .echo_server import EchoServer, Failure, echo_server, final, streamed

LIMIT_S = 30
HOUR_NS = 3600 * 10**9
UNAVAILABLE = Failure(grpc.StatusCode.UNAVAILABLE, "it stops", "shutting_down", "0")
FLOATS = NamedTensor("a", np.arange(6, dtype=np.float32))
TEXTS = NamedTensor("b", np.array([b"some", b"", b"bytes"], dtype=np.object_))
BOTH = [FLOATS, TEXTS]

refused = partial(raises, kind=KServeError)


class Echo(EchoServer):
    """A server, and a client of it."""

    client: KServeClient


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    async with (
        asyncio.timeout(LIMIT_S),
        echo_server(kind=Echo) as server,
        KServeClient(server.address) as server.client,
    ):
        yield server


class Clock:
    """The client's clock, which goes forward by hours where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._original = client_module.monotonic_ns
        self._ahead_ns = 0
        monkeypatch.setattr(client_module, "monotonic_ns", self)

    def __call__(self) -> int:
        return self._original() + self._ahead_ns

    def wait(self, hours: float) -> None:
        self._ahead_ns += int(hours * HOUR_NS)


def check_same(response: InferResponse, wanted: list[NamedTensor]) -> None:
    assert len(response.outputs) == len(wanted)
    for name, data in wanted:
        made = response.output(name)
        assert made.dtype == data.dtype
        np.testing.assert_array_equal(made, data)


async def streamed_by(echo: Echo, **options: Any) -> list[InferResponse]:
    return [each async for each in echo.client.stream("echo", BOTH, **options)]


def budgets(echo: Echo) -> list[int | None]:
    """What each call of inference said about its time."""
    return [
        each.parameters["timeout_ns"].int64_param if "timeout_ns" in each.parameters else None
        for each in echo.of("ModelInferRequest")
    ]


# --- requests and responses -----------------------------------------------------------------------


async def test_tensors_go_within_the_messages(echo: Echo) -> None:
    response = await echo.client.infer(
        "echo", BOTH, id="it", version="1", outputs=["b", "a"], parameters={"x": 1, "y": "z"}
    )
    assert (response.model_name, response.id) == ("echo", "it")
    check_same(response, BOTH)
    (sent,) = echo.of("ModelInferRequest")
    assert (sent.model_version, [each.name for each in sent.outputs]) == ("1", ["b", "a"])
    assert (sent.parameters["x"].int64_param, sent.parameters["y"].string_param) == (1, "z")
    assert len(sent.raw_input_contents) == 2


@pytest.mark.parametrize("budget_ns", [0, -1, -(10**20)])
async def test_no_budget_is_no_deadline(echo: Echo, budget_ns: int) -> None:
    await echo.client.infer("echo", BOTH, budget_ns=budget_ns)
    await echo.client.infer("echo", BOTH)
    assert budgets(echo) == [None, None]
    assert echo.left_s == [None, None]


async def test_calls_carry_the_key_and_the_metadata(echo: Echo) -> None:
    metadata = {"traceparent": "00-1-2-01"}
    async with KServeClient(echo.address, api_key="ni-key", metadata=metadata) as client:
        await client.infer("echo", BOTH)
        assert [each async for each in client.stream("echo", BOTH)]
    for each in echo.metadata:
        assert each["authorization"] == "Bearer ni-key"
        assert each["traceparent"] == "00-1-2-01"
    assert len(echo.metadata) == 2


async def test_tls_with_certificates_of_both(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b", "other")
    issued, own = authority.issue("server"), authority.issue("client")
    server = grpc.ssl_server_credentials(
        [(issued.key.read_bytes(), issued.certificate.read_bytes())],
        root_certificates=authority.file.read_bytes(),
        require_client_auth=True,
    )
    mine = (own.key.read_bytes(), own.certificate.read_bytes())
    async with asyncio.timeout(LIMIT_S), echo_server(server) as echo:
        known = grpc.ssl_channel_credentials(authority.file.read_bytes(), *mine)
        async with KServeClient(echo.address, credentials=known) as client:
            check_same(await client.infer("echo", BOTH), BOTH)
        wrong = grpc.ssl_channel_credentials(other.file.read_bytes(), *mine)
        async with KServeClient(echo.address, credentials=wrong, retries=0) as client:
            with refused("unreachable"):
                await client.infer("echo", BOTH)


# --- errors --------------------------------------------------------------------------------------

ERRORS = [
    (Failure(grpc.StatusCode.INVALID_ARGUMENT, code="invalid_tensor"), "invalid_tensor"),
    (Failure(grpc.StatusCode.DEADLINE_EXCEEDED), "expired"),
    (Failure(grpc.StatusCode.INVALID_ARGUMENT), "invalid_request"),
    (Failure(grpc.StatusCode.NOT_FOUND), "not_found"),
    (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED), "overloaded"),
    (Failure(grpc.StatusCode.UNIMPLEMENTED), "unsupported"),
    (Failure(grpc.StatusCode.DATA_LOSS), "internal_error"),
]


@pytest.mark.parametrize(("failure", "code"), ERRORS)
async def test_an_error_keeps_its_meaning_and_is_not_tried_again(
    echo: Echo, failure: Failure, code: str
) -> None:
    echo.failures = [failure, failure]
    with refused(code, failure.text, status=failure.status):
        await echo.client.infer("echo", BOTH)
    with refused(code, failure.text, status=failure.status):
        await streamed_by(echo)
    assert len(echo.received) == 2


async def test_an_unreachable_server_is_an_error() -> None:
    address = f"127.0.0.1:{load('chaos_rig').free_port()}"
    async with asyncio.timeout(LIMIT_S), KServeClient(address, retries=1) as client:
        for call in (client.infer("echo", BOTH), client.ready()):
            with refused("unreachable", status=grpc.StatusCode.UNAVAILABLE):
                await call


async def test_a_call_that_hangs_ends_with_its_deadline(echo: Echo) -> None:
    echo.hangs = True
    with refused("expired", status=grpc.StatusCode.DEADLINE_EXCEEDED):
        await echo.client.infer("echo", BOTH, budget_ns=10**8)
    await echo.cancelled.wait()


async def test_cancelling_the_caller_cancels_the_call(echo: Echo) -> None:
    echo.hangs = True
    begun = asyncio.Event()
    echo.on_call = begun.set
    calling = asyncio.create_task(echo.client.infer("echo", BOTH))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await echo.cancelled.wait()


# --- again ---------------------------------------------------------------------------------------


async def test_a_retry_has_the_rest_of_the_budget(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    echo.failures = [UNAVAILABLE, UNAVAILABLE]
    echo.on_call = lambda: clock.wait(2)
    check_same(await echo.client.infer("echo", BOTH, budget_ns=5 * HOUR_NS), BOTH)
    first, second, third = (each or 0 for each in budgets(echo))
    for before, after in ((first, second), (second, third)):
        assert 2 * HOUR_NS <= before - after < 2 * HOUR_NS + LIMIT_S * 10**9
    deadlines = [left_s or 0 for left_s in echo.left_s]
    assert 0 < deadlines[2] < deadlines[1] < deadlines[0]


async def test_an_expired_budget_is_not_sent_as_no_limit(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    echo.failures = [UNAVAILABLE]
    echo.on_call = lambda: clock.wait(2)
    with refused("expired", status=grpc.StatusCode.DEADLINE_EXCEEDED):
        await echo.client.infer("echo", BOTH, budget_ns=HOUR_NS)
    assert len(echo.received) == 1


async def test_retries_are_limited_by_number_and_budget(echo: Echo) -> None:
    async with KServeClient(echo.address, retries=1) as client:
        echo.failures = [UNAVAILABLE] * 3
        with refused("shutting_down"):
            await client.infer("echo", BOTH)
        assert len(echo.received) == 2
        # A wait beyond the budget fails at once.
        echo.failures = [UNAVAILABLE._replace(retry_after="1000")]
        with refused("shutting_down", retry_after_s=1000.0):
            await client.infer("echo", BOTH, budget_ns=100 * 10**9)
        assert len(echo.received) == 3


# --- streams -------------------------------------------------------------------------------------


def answer(number: int, *, last: bool = False) -> object:
    response = message("ModelInferResponse")(model_name="echo", id="it")
    response.outputs.add(name="a", datatype="FP32", shape=[1])
    response.raw_output_contents.append(np.float32(number).tobytes())
    response.parameters["triton_final_response"].bool_param = last
    return streamed(response)


@pytest.mark.parametrize("end", ["empty", "last"])
async def test_a_stream_gives_each_answer_and_ends(echo: Echo, end: str) -> None:
    echo.answers = [answer(0), answer(1), answer(2, last=end == "last")]
    echo.answers += [final()] if end == "empty" else []
    async with aclosing(echo.client.stream("echo", BOTH, budget_ns=HOUR_NS, outputs=["a"])) as made:
        numbers = [each.outputs[0].data[0] async for each in made]
    assert numbers == [0, 1, 2]
    (sent,) = echo.of("ModelInferRequest")
    assert sent.parameters["triton_enable_empty_final_response"].bool_param
    assert 0 < sent.parameters["timeout_ns"].int64_param <= HOUR_NS


async def test_a_broken_stream_is_an_error(echo: Echo) -> None:
    echo.answers = [answer(0)]
    numbers = []
    with refused("connection_lost"):
        async for each in echo.client.stream("echo", BOTH):
            numbers.append(each.outputs[0].data[0])
    assert numbers == [0]
    assert len(echo.received) == 1, "what was answered is not asked again"


async def test_the_error_of_a_request_on_a_stream(echo: Echo) -> None:
    failed = message("ModelStreamInferResponse")(error_message="no such model")
    parameters = failed.infer_response.parameters
    parameters["nano-inference-code"].string_param = "model_not_found"
    parameters["grpc-status"].int64_param = 5
    echo.answers = [failed]
    with refused("model_not_found", "no such model", status=grpc.StatusCode.NOT_FOUND):
        await streamed_by(echo)
    # Triton says neither.
    echo.answers = [message("ModelStreamInferResponse")(error_message="no")]
    with refused("internal_error", status=grpc.StatusCode.UNKNOWN):
        await streamed_by(echo)


async def test_a_stream_is_retried_before_its_first_response(echo: Echo) -> None:
    echo.failures = [UNAVAILABLE]
    (response,) = await streamed_by(echo, budget_ns=HOUR_NS)
    check_same(response, BOTH)
    first, second = (each or 0 for each in budgets(echo))
    assert 0 < second < first


async def test_cancelling_the_reader_cancels_the_stream(echo: Echo) -> None:
    async with aclosing(echo.client.stream("echo", BOTH)) as made:
        await anext(made)
        echo.hangs = True
        left = echo.client.stream("echo", BOTH)
        waiting = asyncio.ensure_future(anext(left))
        while len(echo.received) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await echo.cancelled.wait()


# --- a pool --------------------------------------------------------------------------------------

SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "inline"])


@asynccontextmanager
async def slot_of(echo: Echo, shared: bool = True) -> AsyncIterator[PoolSlot]:
    """A slot of a pool; one of shared memory is registered."""
    with BufferPool(1 << 16, n_slots=4, use_shm=shared) as pool:
        if shared:
            await echo.client.register(pool)
        yield await pool.acquire_slot()


@SHARED
async def test_all_tensors_go_through_a_slot(echo: Echo, shared: bool) -> None:
    async with slot_of(echo, shared) as slot:
        given, place, texts = slot.scratch([(6, np.float32), (8, np.float32), (100, np.uint8)])
        given[:] = FLOATS.data
        response = await echo.client.infer(
            "echo",
            [NamedTensor("a", given), TEXTS],
            outputs=[NamedTensor("a", place), NamedTensor("b", texts)],
            slot=slot,
        )
        check_same(response, BOTH)
        (sent,) = echo.of("ModelInferRequest")
        assert len(sent.raw_input_contents) == (0 if shared else 2)
        regions = {each.parameters["shared_memory_region"].string_param for each in sent.inputs}
        assert regions == ({slot.pool.name} if shared else {""})
        np.testing.assert_array_equal(place[:6], FLOATS.data)
        assert texts.tobytes().startswith(b"\4\0\0\0some\0\0\0\0\5\0\0\0bytes")
        made = response.output("a")
        assert np.shares_memory(made, place)
        slot.pool.release_slot(slot)
        with pytest.raises(IndexError):
            made[0]


async def test_an_unregistered_pool_is_not_used(echo: Echo) -> None:
    async with slot_of(echo) as slot:
        assert list(echo.regions.status()) == [slot.pool.name]
        await echo.client.unregister(slot.pool)
        check_same(await echo.client.infer("echo", BOTH, slot=slot), BOTH)
        (sent,) = echo.of("ModelInferRequest")
        assert len(sent.raw_input_contents) == 2
        await echo.client.register(slot.pool)
        await echo.client.__aexit__(None, None, None)
        assert not echo.regions.status(), "whoever leaves gives back what it had attached"
        await echo.client.__aenter__()


async def test_a_forgotten_pool_is_registered_again_once(echo: Echo) -> None:
    forgotten = Failure(grpc.StatusCode.NOT_FOUND, code="unknown_region")
    async with slot_of(echo) as slot:
        # As after a restart.
        echo.regions.unregister()
        echo.failures = [UNAVAILABLE, forgotten]
        check_same(await echo.client.infer("echo", BOTH, slot=slot), BOTH)
        echo.failures = [forgotten, forgotten]
        with refused("unknown_region"):  # once is enough
            await echo.client.infer("echo", BOTH, slot=slot)
        assert len(echo.of("SystemSharedMemoryRegisterRequest")) == 3


@SHARED
async def test_an_output_larger_than_its_place_is_refused(echo: Echo, shared: bool) -> None:
    async with slot_of(echo, shared) as slot:
        (place,) = slot.scratch([((5,), np.float32)])
        with raises("invalid_tensor", kind=NanoInferenceError):
            await echo.client.infer("echo", [FLOATS], outputs=[NamedTensor("a", place)], slot=slot)


async def test_impossible_calls_are_refused(echo: Echo) -> None:
    async with slot_of(echo, shared=False) as inline, slot_of(echo) as slot:
        with pytest.raises(ValueError, match="not in shared memory"):
            await echo.client.register(inline.pool)
        elsewhere = NamedTensor("a", np.zeros(8, np.float32))
        with pytest.raises(ValueError, match="scratch"):
            await echo.client.infer("echo", BOTH, outputs=[elsewhere], slot=slot)
        with pytest.raises(ValueError):  # noqa: PT011  (the pool's own)
            await echo.client.infer("echo", [NamedTensor("a", np.zeros(1 << 16))], slot=slot)
