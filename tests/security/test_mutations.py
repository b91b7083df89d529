"""Ten thousand random and mutated requests: each has its own answer, and nobody else notices.

A case that fails is named with its seed and its number, which make it again, and with its bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import structlog

from nano_inference.bus.channel import RequestEntry
from nano_inference.bus.control import LaneCapacity
from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config, RequestError, load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.server import HttpServer
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.tokenizer import load_tokenizer

from ..gateway.fake import FakeEngine, completion, refused, sample
from .mutations.bodies import usual
from .mutations.cases import HEAD_TIMEOUT_S, MAX_BODY_BYTES, case
from .mutations.interfaces import CHAT, COMPLETIONS, INTERFACES, MESSAGES
from .mutations.wire import Answer, Case, Wanted, asked, check, post, read_answer

SEED = 17
CASES = 10_000
EVERY_DAY = 240
AT_ONCE = 8
LIMIT_S = 60
CAPACITY = LaneCapacity(
    num_blocks=1 << 12, block_size=16, max_model_len=2048, vocab_size=768, device="none"
)

SETTINGS: dict[str, object] = {
    "gateway.max_body_bytes": MAX_BODY_BYTES,
    "gateway.head_timeout_s": HEAD_TIMEOUT_S,
    "gateway.keep_alive_s": 3600,
    # An answer is the same to the last bit, whoever else is in the batch.
    "engine.dtype": "float32",
    "engine.deterministic": True,
}


class JudgingEngine(FakeEngine):
    """Refuses what admission refuses; what it says of anything else tells what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        config = Config()
        self._admission = AdmissionCore(
            config, load_tokenizer(config.engine.model_folder), frozenset()
        )
        self._admission.set_capacity(CAPACITY)
        self.outputs = self._judged

    def _judged(self, request: GenerateRequest) -> list[Output]:
        entry = RequestEntry("1-1", request)
        try:
            admitted = self._admission.admit(entry, 0, 0)
        except RequestError as error:
            return refused(error.code, error.message)(request)
        sampling = msgspec.structs.asdict(request.sampling)
        sampling["logit_bias"] = sorted(request.sampling.logit_bias.items())
        sampling["stop_token_ids"] = sorted(request.sampling.stop_token_ids)
        told = (admitted.token_ids, sampling, request.n, request.priority, request.cache_salt)
        digest = hashlib.sha256(msgspec.json.encode(told)).digest()[:8]
        text, token_ids = f"asked:{digest.hex()}", tuple(digest)
        samples = [sample(token_ids, sample_index=index, text=text) for index in range(request.n)]
        return [completion(request, *samples)]


class Server:
    """The gateway's, and what its connections have received."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.port = port
        self._server = server
        self._met: set[int] = set()

    def has_taken(self, port: int, number: int) -> bool:
        """Whether so many bytes of a client were taken, or no more of it will be."""
        for connection in self._server.connections._all:
            if connection.client is not None and connection.client[1] == port:
                self._met.add(port)
                return connection._left or connection._received_bytes >= number
        return port in self._met

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self._server.connections.sweep(1.0)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)

    def is_at_rest(self) -> bool:
        """Whether nothing of any request is left."""
        connections = self._server.connections
        under_way = {each.phase for each in connections._all} - {"idle"}
        return not under_way and not connections._limits.held_bytes


@asynccontextmanager
async def served(engine: FakeEngine) -> AsyncIterator[Server]:
    config = load_config(env={}, overrides=SETTINGS)
    server = HttpServer(make_app(engine, config), config.gateway)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        yield Server(server, listener.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


async def play(server: Server, case: Case, usuals: dict[str, str]) -> None:
    """Does what a case says, and looks at the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    port, sent = writer.get_extra_info("sockname")[1], 0

    try:
        for place, piece in enumerate(case.pieces):
            writer.write(piece)
            sent += len(piece)
            if case.pass_s or place + 1 < len(case.pieces):
                await server.until(lambda sent=sent: server.has_taken(port, sent))  # type: ignore[misc]
        if case.ends:
            writer.write_eof()
        server.pass_s(case.pass_s)
        for wanted in case.wanted:
            answer = await read_answer(reader, bodiless=wanted.bodiless)
            check(answer, wanted, usuals.get(case.path, ""))
        if case.closed:
            try:
                assert await reader.read() == b""
            except ConnectionResetError:
                assert case.ends
    finally:
        writer.transport.abort()


class Bystander:
    """Somebody who asks for the same all the time, on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.answered = 0

    async def ask(self, usuals: dict[str, str]) -> None:
        """Asserts that the answer is what it always is."""
        interface = (COMPLETIONS, CHAT, MESSAGES)[self.answered % 3]
        answer = await self.get(post(interface.path, usual(interface)))
        check(answer, Wanted(same=True), usuals[interface.path])
        self.answered += 1

    async def get(self, raw: bytes) -> Answer:
        self._writer.write(raw)
        return await read_answer(self._reader)


async def play_named(server: Server, seed: int, number: int, usuals: dict[str, str]) -> None:
    """As `play`, of the case with this number; a failure says which it is."""
    found = case(seed, number)
    try:
        async with asyncio.timeout(LIMIT_S):
            await play(server, found, usuals)
    # Whatever it is, it says nothing of the case.
    except Exception as error:
        raw = b" | ".join(found.pieces)
        raise AssertionError(
            f"seed {seed}, case {number} ({found.kind}, {found.path}): {error!r}\n"
            f"wanted {found.wanted}\nsent {len(raw)} bytes: {raw[:3000]!r}"
        ) from error


async def play_all(server: Server, number: int, *, compared: bool) -> None:
    """Plays so many cases, some at a time, while somebody else asks his own.

    Args:
        compared: Whether what was asked of the engine is looked at, which not every engine tells.
    """
    connection = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 22)
    bystander = Bystander(*connection)
    usuals = {
        each.path: asked(await bystander.get(post(each.path, usual(each)))) for each in INTERFACES
    }
    known = usuals if compared else {}
    for first in range(0, number, AT_ONCE):
        numbers = range(first, min(number, first + AT_ONCE))
        # Those for whom time passes would have it pass for others.
        alone = [each for each in numbers if case(SEED, each).pass_s]
        async with asyncio.TaskGroup() as group:
            group.create_task(bystander.ask(usuals))
            for each in numbers:
                if each not in alone:
                    group.create_task(play_named(server, SEED, each, known))
        for each in alone:
            await play_named(server, SEED, each, known)
    assert bystander.answered == -(-number // AT_ONCE)
    async with asyncio.timeout(LIMIT_S):
        await server.until(server.is_at_rest)


@pytest.mark.soak
async def test_each_request_has_its_answer_and_nobody_else_notices(
    soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with structlog.testing.capture_logs() as lines:
        async with served(JudgingEngine()) as server:
            await play_all(server, CASES if soak else EVERY_DAY, compared=True)
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.soak
async def test_a_pipeline_behind_it_has_nothing_left_of_them(
    soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(env={}, overrides=SETTINGS)
    with structlog.testing.capture_logs() as lines:
        async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
            before = {report.stage: report.epoch for report in pipeline.stages()}
            server = Server(gateway._server, gateway.port)
            await play_all(server, CASES if soak else EVERY_DAY // 3, compared=False)

            def at_rest() -> bool:
                loads = {report.stage: report.load for report in pipeline.stages()}
                batching = loads["batching"]
                free = batching["kv_free"] == batching["kv_total"]
                return free and not (batching["running"] or loads["admission"]["in_flight"])

            async with asyncio.timeout(LIMIT_S):
                await server.until(at_rest)
            assert {report.stage: report.epoch for report in pipeline.stages()} == before
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]
    assert not caplog.records


def test_a_case_is_made_of_its_numbers_alone() -> None:
    assert [case(1, number) for number in range(60)] == [case(1, number) for number in range(60)]
    assert case(1, 5) != case(2, 5)
