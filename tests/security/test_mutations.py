"""Ten thousand random and mutated requests: each has its own answer, and nobody else notices.

So it is with TLS before HTTP, of a gateway that knows its callers, and of TLS itself.

A case that fails is named with its seed and its number, which make it again, and with its bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import structlog

from nano_inference.bus.entries import RequestEntry
from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config, RequestError, load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.text.tokenizer import load_tokenizer

from ..certificates import Authority
from ..gateway.fake import FakeEngine, completion, refused, sample
from ..gateway.recorded import Recorded
from .conftest import admission
from .mutations import tls
from .mutations.admin import ADMINISTRATION, DOCUMENT, GENERATE, bearer
from .mutations.bodies import MAX_BODY_BYTES
from .mutations.cases import EVERYBODY, Family, case
from .mutations.interfaces import CHAT, COMPLETIONS, INTERFACES, MESSAGES
from .mutations.messages import HEAD_TIMEOUT_S
from .mutations.playing import LIMIT_S, Bystander, Server, play, served, told
from .mutations.wire import Case

SEED = 17
CASES = 10_000
EVERY_DAY = 60
AT_ONCE = 8

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
        tokenizer = load_tokenizer(config.engine.model_folder)
        self._admission = admission(config, tokenizer, max_model_len=2048, vocab_size=768)
        self.outputs = self._judged

    def _judged(self, request: GenerateRequest) -> list[Output]:
        entry = RequestEntry("1-1", request)
        try:
            opened = self._admission.admit(entry, 0, 0).opened
        except RequestError as error:
            return refused(error.code, error.message)(request)
        sampling = msgspec.structs.asdict(request.sampling)
        sampling["logit_bias"] = sorted(request.sampling.logit_bias.items())
        sampling["stop_token_ids"] = sorted(request.sampling.stop_token_ids)
        told = (opened.prompt_token_ids, sampling, request.n, request.priority, request.cache_salt)
        digest = hashlib.sha256(msgspec.json.encode(told)).digest()[:8]
        text, token_ids = f"asked:{digest.hex()}", tuple(digest)
        samples = [sample(token_ids, sample_index=index, text=text) for index in range(request.n)]
        return [completion(request, *samples)]


async def play_named(
    server: Server, number: int, usuals: dict[str, str], family: Family = EVERYBODY
) -> Case:
    """As `play`, of the case with this number; a failure says which it is."""
    found = case(SEED, number, family)
    try:
        async with asyncio.timeout(LIMIT_S):
            await play(server, found, usuals)
    # Whatever it is, it says nothing of the case.
    except Exception as error:
        raise told(found, f"seed {SEED}, case {number}", error) from error
    return found


async def play_all(server: Server, number: int, *, compared: bool, at_once: int = AT_ONCE) -> None:
    """Plays so many cases, some at a time, while somebody else asks his own.

    Args:
        compared: Whether what was asked of the engine is looked at, which not every engine tells.
    """
    bystander = Bystander(*await server.connect(), (COMPLETIONS, CHAT, MESSAGES))
    usuals = await bystander.usuals(INTERFACES)
    known = usuals if compared else {}
    for first in range(0, number, at_once):
        numbers = range(first, min(number, first + at_once))
        # Those for whom time passes would have it pass for others.
        alone = [each for each in numbers if case(SEED, each).pass_s]
        async with asyncio.TaskGroup() as group:
            group.create_task(bystander.ask())
            for each in numbers:
                if each not in alone:
                    group.create_task(play_named(server, each, known))
        for each in alone:
            await play_named(server, each, known)
    assert bystander.answered == -(-number // at_once)
    async with asyncio.timeout(LIMIT_S):
        await server.until(server.is_at_rest)


@contextmanager
def nothing_told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asserts that no log has anything of an error."""
    with structlog.testing.capture_logs() as lines:
        yield
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]
    assert not caplog.records


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def with_tls(authority: Authority) -> Config:
    own = authority.issue("gateway")
    files = {"tls_certificate": str(own.certificate), "tls_key": str(own.key)}
    return load_config(
        env={}, overrides=SETTINGS | {f"gateway.{name}": file for name, file in files.items()}
    )


@pytest.mark.soak
async def test_each_request_has_its_answer_and_nobody_else_notices(
    soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(env={}, overrides=SETTINGS)
    with nothing_told(caplog):
        async with served(make_app(JudgingEngine(), config), config.gateway) as server:  # type: ignore[arg-type]
            await play_all(server, CASES if soak else EVERY_DAY, compared=True)


@pytest.mark.soak
async def test_so_it_is_with_tls(
    soak: bool, authority: Authority, with_tls: Config, caplog: pytest.LogCaptureFixture
) -> None:
    client = ssl.create_default_context(cafile=authority.file)
    app = make_app(JudgingEngine(), with_tls)  # type: ignore[arg-type]
    with nothing_told(caplog):
        async with served(app, with_tls.gateway, client) as server:
            # With TLS nobody can end one half of a connection, so some are there for seconds.
            await play_all(server, CASES if soak else EVERY_DAY // 3, compared=True, at_once=80)


@pytest.mark.soak
async def test_what_is_no_tls_ends_its_own_connection_and_no_other(
    soak: bool, authority: Authority, with_tls: Config, caplog: pytest.LogCaptureFixture
) -> None:
    measured = Recorded()
    app = make_app(JudgingEngine(), with_tls)  # type: ignore[arg-type]
    client = ssl.create_default_context(cafile=authority.file)
    with nothing_told(caplog):
        async with served(app, with_tls.gateway, client, measured.measures) as server:
            bystander = Bystander(*await server.connect(), (COMPLETIONS, CHAT, MESSAGES))
            broken = 0
            for number in range(CASES if soak else EVERY_DAY):
                async with asyncio.timeout(LIMIT_S):
                    broken += not await tls.play(server, SEED, number)
                    await bystander.ask()
                    await server.until(lambda: len(server.connections) == 1)
    assert measured.refused() == {"handshake_failed": broken}


@pytest.mark.soak
async def test_of_the_administration_what_is_refused_changes_nothing(
    soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(env={}, overrides=SETTINGS | {"policy.backend": "bus"})
    app = make_app(JudgingEngine(), config)  # type: ignore[arg-type]
    store = app.policy.store
    await store.change(lambda _: DOCUMENT)
    with nothing_told(caplog):
        async with served(app, config.gateway) as server:
            callers = [
                each._replace(headers=(bearer(GENERATE),)) for each in (COMPLETIONS, CHAT, MESSAGES)
            ]
            bystander = Bystander(*await server.connect(), tuple(callers))
            usuals: dict[str, str] = {}
            admin = Bystander(*await server.connect(), ADMINISTRATION.interfaces)
            for interface in ADMINISTRATION.interfaces:
                usuals |= await admin.usuals((interface,))
                await store.change(lambda _: DOCUMENT)
            for number in range(CASES if soak else EVERY_DAY):
                played = await play_named(server, number, usuals, ADMINISTRATION)
                if all(wanted.refusals and not wanted.either for wanted in played.wanted):
                    assert await store.document() == DOCUMENT, played
                await store.change(lambda _: DOCUMENT)
                await bystander.ask()
            async with asyncio.timeout(LIMIT_S):
                await server.until(server.is_at_rest)


@pytest.mark.slow
@pytest.mark.soak
async def test_a_pipeline_behind_it_has_nothing_left_of_them(
    soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(env={}, overrides=SETTINGS)
    with nothing_told(caplog):
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


def test_a_case_is_made_of_its_numbers_alone() -> None:
    assert [case(1, number) for number in range(60)] == [case(1, number) for number in range(60)]
    assert case(1, 5) != case(2, 5)
