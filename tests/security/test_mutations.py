"""Ten thousand random and mutated requests: each has its own answer, and nobody else notices.

A case that fails is named with its seed and its number, which make it again, and with its bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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

from ..gateway.fake import FakeEngine, completion, refused, sample
from .conftest import admission
from .mutations.bodies import MAX_BODY_BYTES
from .mutations.cases import case
from .mutations.interfaces import CHAT, COMPLETIONS, INTERFACES, MESSAGES
from .mutations.messages import HEAD_TIMEOUT_S
from .mutations.playing import LIMIT_S, Bystander, Server, play, served, told

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


async def play_named(server: Server, number: int, usuals: dict[str, str]) -> None:
    """Play the case with this number; a failure says which it is."""
    found = case(SEED, number)
    try:
        async with asyncio.timeout(LIMIT_S):
            await play(server, found, usuals)
    # Whatever it is, it says nothing of the case.
    except Exception as error:
        raise told(found, f"seed {SEED}, case {number}", error) from error


async def play_all(server: Server, number: int, *, compared: bool) -> None:
    """Plays so many cases, some at a time, while somebody else asks his own.

    Args:
        compared: Whether what was asked of the engine is looked at, which not every engine tells.
    """
    bystander = Bystander(*await server.connect(), (COMPLETIONS, CHAT, MESSAGES))
    usuals = await bystander.usuals(INTERFACES)
    known = usuals if compared else {}
    for first in range(0, number, AT_ONCE):
        numbers = range(first, min(number, first + AT_ONCE))
        # Those for whom time passes would have it pass for others.
        alone = [each for each in numbers if case(SEED, each).pass_s]
        async with asyncio.TaskGroup() as group:
            group.create_task(bystander.ask())
            for each in numbers:
                if each not in alone:
                    group.create_task(play_named(server, each, known))
        for each in alone:
            await play_named(server, each, known)
    assert bystander.answered == -(-number // AT_ONCE)
    async with asyncio.timeout(LIMIT_S):
        await server.until(server.is_at_rest)


@contextmanager
def nothing_told(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asserts that no log has anything of an error."""
    with structlog.testing.capture_logs() as lines:
        yield
    assert not [line for line in lines if line["log_level"] in ("error", "critical")]
    assert not caplog.records


@pytest.mark.soak
async def test_each_request_has_its_answer_and_affects_no_other(
    soak: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(env={}, overrides=SETTINGS)
    with nothing_told(caplog):
        async with served(make_app(JudgingEngine(), config), config.gateway) as server:  # type: ignore[arg-type]
            await play_all(server, CASES if soak else EVERY_DAY, compared=True)


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
