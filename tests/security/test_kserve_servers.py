"""Ten thousand calls of KServe V2, over gRPC and over HTTP, most of them crooked: each has its
status, whoever else calls notices nothing, and nothing is left of them.

A case that fails is named with its number, which makes it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import structlog

from nano_inference.gateway.api.kserve.served import Answer, ModelCall
from nano_inference.gateway.gateway import Gateway
from nano_inference.kserve.protobuf import ModelInferRequest, ModelInferResponse
from nano_inference.kserve.tensors import DATATYPES

from ..cli.servers import free_port
from ..cli.servers import served as serving
from ..gateway.api.kserve.calls import Client, Echo, Failed, served, until
from ..resident import resident_bytes
from .mutations.kserve import (
    ANYTHING,
    Call,
    call,
    http_call,
    infer,
    long_answer,
    odd_headers,
    of_a_lane,
    region_message,
)
from .mutations.tensors import REGION, REGION_BYTES, Draft, Region
from .mutations.wire import Answer as HttpAnswer
from .mutations.wire import read_answer

SEED = 31
CASES = 10_000
EVERY_DAY = 60
LIMIT_S = 60
MOST_BODY_BYTES = 4 << 20
WARM = 50
"""Cases after which a server has all that it makes once."""

MOST_GROWTH_BYTES = 8 << 20
"""Of 10,000 calls: 0.5 to 3 MB are seen, of which the lines that the test keeps are the most."""


ERRORS = Path(__file__).parents[2] / "docs" / "errors.md"
CODES = set(re.findall(r"`([a-z_]+)`", ERRORS.read_text()))
"""Whatever stands there between such marks, the stable codes among them."""

CLIENTS_FAULT = {
    *("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED"),
}


@contextmanager
def shared() -> Iterator[tuple[Region, str]]:
    """Memory that a client shares, and its key."""
    made = SharedMemory(create=True, size=REGION_BYTES)
    try:
        yield made.buf, f"/{made.name.lstrip('/')}"
    finally:
        made.close()
        made.unlink()


def files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mapped() -> int:
    """Pieces of shared memory in this process."""
    return Path("/proc/self/maps").read_text().count(" /dev/shm/")


@contextmanager
def nothing_left() -> Iterator[None]:
    """Asserts that as much shared memory is mapped as before, and that no log has an error."""
    before = mapped()
    with structlog.testing.capture_logs() as lines:
        try:
            yield
        except AssertionError as error:
            for line in _errors(lines):
                error.add_note(f"{line} {traceback.format_exception(line.get('exc_info'))}")
            raise
    assert mapped() == before
    assert not _errors(lines)


def _errors(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["log_level"] in ("error", "critical")]


class Forgetful(Echo):
    """Gives back what it is given, and keeps nothing of it."""

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        await self.answer_all(call, answer)


class Held(NamedTuple):
    """What the process holds when no call is under way."""

    files: int
    tasks: int
    resident_bytes: int


def held() -> Held:
    return Held(files(), len(asyncio.all_tasks()), resident_bytes())


async def at_rest(gateway: Gateway, before: Held) -> None:
    """Waits until nothing of any call is left, and asserts that what is held has not grown."""
    calls = gateway._grpc
    assert calls is not None
    limits = gateway._server.limits
    await until(lambda: not len(calls.in_flight) and not limits.held_bytes)
    # What happens to be on its way differs by a few; a leak of one for each call is hundreds.
    await until(lambda: files() <= before.files + 5)
    await until(lambda: len(asyncio.all_tasks()) <= before.tasks + 5)
    grown = held().resident_bytes - before.resident_bytes
    assert grown < MOST_GROWTH_BYTES, grown


class Playing(NamedTuple):
    """A gateway whose models give back what they are given, and a client that shares memory.

    Attributes:
        cases: Yields the numbers up to one, each with its chances; then asserts that nothing of
            any case is left.
    """

    gateway: Gateway
    client: Client
    region: Region
    register: Callable[[], Awaitable[Any]]
    cases: Callable[[int], AsyncIterator[tuple[int, random.Random]]]


@asynccontextmanager
async def playing() -> AsyncIterator[Playing]:
    settings = {"shared_memory": True, "max_body_bytes": MOST_BODY_BYTES, "limit_s": None}
    models = Forgetful(), Forgetful("several")
    with nothing_left(), shared() as (region, key):
        async with served(*models, **settings) as (gateway, client):
            message = region_message(key, REGION_BYTES)
            register = partial(client, "SystemSharedMemoryRegister", message)

            async def cases(most: int) -> AsyncIterator[tuple[int, random.Random]]:
                before = held()
                for number in range(most):
                    before = held() if number == WARM else before
                    yield number, random.Random(f"{SEED}:{number}")
                await at_rest(gateway, before)

            await register()
            yield Playing(gateway, client, region, register, cases)


# --- gRPC ----------------------------------------------------------------------------------------


def check_failure(found: Failed, codes: tuple[str, ...], told: str) -> None:
    """Asserts that a call that was refused says what to change, and is not the server's fault."""
    assert found.code in CLIENTS_FAULT, f"{told}: {found}"
    assert found.stable in CODES, f"{told}: {found}"
    assert codes == ANYTHING or found.stable in codes, f"{told}: {found}, not {codes}"
    assert 5 < len(found.details) < 1000, f"{told}: {found}"
    assert found.details.isprintable(), f"{told}: {found}"


def check_echo(answer: Any, asked: Draft, told: str) -> None:
    """Asserts that what was given has come back, as far as it was wanted."""
    wanted = [name for name, _ in asked.outputs] or list(DATATYPES)
    given = {each.name: each for each in asked.inputs}
    names = [each.name for each in answer.outputs]
    assert names == [each for each in wanted if each in given], told
    for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        found = (output.datatype, list(output.shape), raw)
        assert found == (output.name, given[output.name].shape, given[output.name].raw), told


@pytest.mark.soak
async def test_a_status_for_each_call_over_grpc(soak: bool) -> None:
    async with playing() as on:
        async for number, rng in on.cases(CASES if soak else EVERY_DAY):
            case = call(rng, on.region)
            await play(on.client, case, odd_headers(rng), f"case {number} ({case.kind})")
            if case.kind == "method":
                # It may have been this one's to be known no more.
                await on.register()
        assert set((await on.client("SystemSharedMemoryStatus")).regions) == {REGION}


async def play(client: Client, case: Call, headers: tuple[tuple[str, str], ...], told: str) -> None:
    answer = await client(case.method, case.data, metadata=headers, timeout=LIMIT_S)
    codes = ANYTHING if headers else case.codes
    if isinstance(answer, Failed):
        check_failure(answer, codes, told)
    elif codes != ANYTHING:
        assert not codes, f"{told}: answered, not {codes}"
        assert case.draft is not None
        check_echo(answer, case.draft, told)


@pytest.mark.soak
async def test_of_a_stream_each_request_has_its_answer(soak: bool) -> None:
    """And what is none ends the stream, behind the answers to those before."""
    async with playing() as on:
        async for number, rng in on.cases((CASES if soak else EVERY_DAY) // 5):
            cases = [infer(rng, on.region) for _ in range(rng.randrange(6))]
            await play_stream(on.client, cases, rng, f"case {number}")


async def play_stream(client: Client, cases: list[Call], rng: random.Random, told: str) -> None:
    stream = client.stream(timeout=LIMIT_S)
    bad = next((place for place, each in enumerate(cases) if not _is_message(each.data)), None)
    readable = cases[:bad]
    await stream.send(*(each.data for each in cases[: len(readable) + 1]))
    if rng.random() < 0.2:
        stream.call.cancel()
        return
    answers = await stream.read_all(ends=bad is None)
    failed = [each for each in answers if isinstance(each, Failed)]
    for each in failed:
        check_failure(each, ("malformed",), told)
    assert len(failed) == (bad is not None), f"{told}: {answers}"
    parts = answers[: len(answers) - len(failed)]
    assert len(parts) == len(readable), f"{told}: {answers}"
    for part, case in zip(parts, readable, strict=True):
        code = part.infer_response.parameters["nano-inference-code"].string_param
        assert bool(part.error_message) == bool(code), told
        # Of what is shared the last draft has written over the others.
        shares = case.draft is not None and any(each.how == "shared" for each in case.draft.inputs)
        if case.codes != ANYTHING and not shares:
            assert code in (case.codes or ("",)), f"{told}: {code} for {case.kind}"


def _is_message(data: bytes) -> bool:
    try:
        ModelInferRequest.FromString(data)
    except Exception:  # noqa: BLE001  # whatever protobuf says of it
        return False
    return True


# --- HTTP ----------------------------------------------------------------------------------------


def check_http(answer: HttpAnswer, case: Call, told: str) -> None:
    """Asserts that a call was answered, or refused in the words of Triton's clients."""
    codes = case.codes
    told = f"{told} ({case.kind}): {answer.status} {answer.body[:300]!r}"
    if answer.status == 200:
        assert codes in ((), ANYTHING), f"{told}, not {codes}"
        return
    if answer.status == 307:
        # From a path to that with a slash behind it.
        assert codes == ANYTHING, told
        return
    assert 400 <= answer.status < 500, told
    if case.data.startswith(b"HEAD"):
        return
    found = json.loads(answer.body)
    assert set(found) == {"error"}, told
    assert found["error"].isprintable(), told
    assert 5 < len(found["error"]) < 2001, told
    code = answer.headers["x-error-code"]
    assert code in CODES, f"{told} {code}"
    assert codes == ANYTHING or code in codes, f"{told} {code}, not {codes}"


@pytest.mark.soak
async def test_a_status_for_each_call_over_http(soak: bool) -> None:
    async with playing() as on:
        async for number, rng in on.cases(CASES if soak else EVERY_DAY):
            case = http_call(rng, on.region)
            async with asyncio.timeout(LIMIT_S):
                answer = await ask(on.gateway.port, case.data)
            check_http(answer, case, f"case {number}")
            if not case.codes and case.draft is not None:
                check_http_echo(answer, case.draft, f"case {number}")
            await on.register()


async def ask(port: int, raw: bytes) -> HttpAnswer:
    """The answer to a call, on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(raw)
        return await read_answer(reader, bodiless=raw.startswith(b"HEAD"))
    finally:
        writer.transport.abort()


def check_http_echo(answer: HttpAnswer, asked: Draft, told: str) -> None:
    """As `check_echo`."""
    length = int(answer.headers.get("inference-header-content-length", len(answer.body)))
    body, behind = json.loads(answer.body[:length]), answer.body[length:]
    message = ModelInferResponse()
    for output in body["outputs"]:
        size = output["parameters"]["binary_data_size"]
        message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        message.raw_output_contents.append(behind[:size])
        behind = behind[size:]
    assert not behind, told
    check_echo(message, asked, told)


# --- a server that is killed ---------------------------------------------------------------------


def mapped_by(pid: int) -> set[str]:
    """The shared memory objects that a process has mapped, by their paths."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}


def contents(key: str) -> bytes:
    """Of a shared memory object, as whoever opens it by its name finds them."""
    return Path(f"/dev/shm{key}").read_bytes()


@pytest.mark.slow
@pytest.mark.soak
async def test_a_server_that_is_killed_leaves_its_clients_memory_as_it_is(
    soak: bool, tmp_path: Path
) -> None:
    """With calls under way, behind crooked ones to the models of a lane; and there is nothing of
    its own that could be left."""
    port = free_port()
    options = ("--grpc-port", str(port), "--set", "gateway.shared_memory=true")
    with shared() as (region, key), serving(tmp_path, *options) as (server, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            client = Client(channel)
            await client("SystemSharedMemoryRegister", region_message(key, REGION_BYTES))
            for number in range(CASES // 5 if soak else EVERY_DAY // 3):
                rng = random.Random(f"{SEED}:{number}")
                case = of_a_lane(rng)
                await play(client, case, odd_headers(rng), f"case {number} ({case.kind})")
            assert mapped_by(server.pid) == {f"/dev/shm{key}"}
            region[:] = bytes(range(256)) * (REGION_BYTES // 256)
            asked = long_answer().data
            under_way = [client.begin("ModelInfer", asked, timeout=LIMIT_S) for _ in range(20)]
            server.kill()
            for each in under_way:
                found = await client.end("ModelInfer", each)
                assert isinstance(found, Failed)
                assert found.code in {"UNAVAILABLE", *CLIENTS_FAULT}
        assert contents(key) == bytes(range(256)) * (REGION_BYTES // 256)
