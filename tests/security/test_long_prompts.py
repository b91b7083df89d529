"""Prompts that are long, or too long: nobody waits behind them."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference import Completion, Config, GenerateRequest, Pipeline, load_config
from nano_inference.bus import RequestEntry
from nano_inference.bus.public import ChatMessage, CompletionChunk
from nano_inference.stages.admission import long_prompts
from nano_inference.stages.admission.arrivals import Tokens
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.admission.long_prompts import AT_A_TIME
from nano_inference.stages.admission.requests import Incoming
from nano_inference.stages.admission.stage import AdmissionStage

from ..byte_tokenizers import byte_tokenizer
from ..errors import raises
from ..pipeline.builders import until
from .conftest import admission

LIMIT_S = 60
SMALL = {"prompt": "1 + 1 =", "sampling": {"temperature": 0, "max_tokens": 4}}
LONG = {"prompt": "1 + 1 = 2. " * 20, "sampling": {"temperature": 0, "max_tokens": 4}}
# Each message is rendered with 50 characters more.
WORDY = """{% for message in messages %}{{ 'x' * 50 }}{{ message.content }}{% endfor %}"""


# --- too long -------------------------------------------------------------------------------------


@pytest.fixture
def never_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the text was tokenised")

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", refuse)


@pytest.fixture(scope="session")
def core() -> AdmissionCore:
    return admission(Config(), byte_tokenizer(WORDY), max_model_len=100)


def turn(content: str) -> ChatMessage:
    return ChatMessage(role="user", content=content)


@pytest.mark.usefixtures("never_tokenised")
@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "x" * 4_000_000},
        {"messages": (turn("x" * 3_000_000), turn("y" * 900_000))},
        {"messages": (turn(""),) * 100_000},
        {"messages": (turn("x"),) * 50},  # short until it is rendered
    ],
)
def test_a_prompt_that_can_never_fit_is_refused_without_being_tokenised(
    core: AdmissionCore, prompt: dict[str, Any]
) -> None:
    entry = RequestEntry("1-1", GenerateRequest(**prompt))
    with raises("prompt_too_long"):
        core.admit(entry, 0, 0)


def test_a_prompt_that_just_fits_is_accepted(core: AdmissionCore) -> None:
    request = GenerateRequest(messages=(turn("x" * 49),))
    assert len(core.admit(RequestEntry("1-1", request), 0, 0).admitted.prompt.token_ids) == 99


# --- long -----------------------------------------------------------------------------------------


class Held:
    """Long prompts that are being tokenised, until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = self.most = self.begun = 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.begun += 1
            self.running += 1
            self.most = max(self.most, self.running)
        self.go.wait(LIMIT_S)
        with self._lock:
            self.running -= 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Makes whatever is longer than a few words a long prompt, which takes as long as is wanted."""
    holding = Held()
    original = AdmissionCore.tokenize

    def tokenize(self: AdmissionCore, request: GenerateRequest, images: Any = ()) -> Tokens:
        if request.prompt == LONG["prompt"]:
            holding.wait()
        return original(self, request, images)

    monkeypatch.setattr(long_prompts, "LONG_TEXT", 100)
    monkeypatch.setattr(AdmissionCore, "tokenize", tokenize)
    yield holding
    holding.go.set()


def config_of(url: str, **settings: object) -> Config:
    bus = {"bus.url": url, "bus.prefix": f"test-{uuid.uuid4().hex[:12]}", "bus.links": "redis"}
    own = {name.replace("__", "."): value for name, value in settings.items()}
    small = {"engine.dtype": "float32", "pipeline.restart_backoff_s": 0.01}
    return load_config(env={}, overrides={**(bus if url else {}), **small, **own})


@asynccontextmanager
async def pipeline_of(url: str, **settings: object) -> AsyncIterator[Pipeline]:
    async with asyncio.timeout(LIMIT_S), Pipeline(config_of(url, **settings)) as pipeline:
        yield pipeline


def incoming(pipeline: Pipeline) -> Incoming:
    stage = pipeline._actors["admission"]
    assert isinstance(stage, AdmissionStage)
    return stage.epochs.requests.incoming


def submit(pipeline: Pipeline, request: dict[str, Any], number: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(pipeline.complete(request)) for _ in range(number)]


async def holding(held: Held, number: int) -> None:
    await until(lambda: held.running == number)


async def ends(tasks: list[asyncio.Task[Completion]]) -> set[str]:
    done = await asyncio.gather(*tasks)
    return {each.error.code if each.error else each.status for each in done}


@asynccontextmanager
async def occupied(held: Held) -> AsyncIterator[Pipeline]:
    """A pipeline in which as many long prompts as may be are tokenised until the block ends."""
    async with pipeline_of("") as pipeline:
        long = submit(pipeline, LONG, AT_A_TIME)
        await holding(held, AT_A_TIME)
        yield pipeline
        assert held.running == held.begun == AT_A_TIME
        held.go.set()
        assert await ends(long) == {"done"}


@pytest.mark.parametrize("on_redis", [False, True])
async def test_small_ones_pass_long_ones_of_which_few_run_at_a_time(
    held: Held, redis_url: str, on_redis: bool
) -> None:
    async with pipeline_of(redis_url if on_redis else "") as pipeline:
        long = submit(pipeline, LONG, 8)
        await holding(held, AT_A_TIME)
        assert await ends(submit(pipeline, SMALL, 3)) == {"done"}
        assert not any(each.done() for each in long)
        held.go.set()
        assert await ends(long) == {"done"}
        assert (held.most, held.begun) == (AT_A_TIME, 8)


async def test_long_ones_hold_their_places(held: Held, redis_url: str) -> None:
    async with pipeline_of(redis_url, admission__max_in_flight=3) as pipeline:
        long = submit(pipeline, LONG, 3)
        await until(lambda: len(incoming(pipeline).apart) == 3)
        small = submit(pipeline, SMALL, 1)
        while (await pipeline.bus.requests.backlog()).waiting != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        held.go.set()
        assert await ends([*long, *small]) == {"done"}


async def test_one_that_is_cancelled_while_it_is_tokenised_never_runs(held: Held) -> None:
    async with pipeline_of("") as pipeline:
        (task,) = submit(pipeline, {**LONG, "request_id": "mine"}, 1)
        await holding(held, 1)
        await pipeline.client.cancel("mine")
        # Messages of one client come in order, so that the cancellation is there with this one.
        await asyncio.gather(*submit(pipeline, SMALL, 1))
        await until(lambda: len(incoming(pipeline)._cancelled) == 1)
        held.go.set()
        end = await task
        assert (end.status, end.usage.completion_tokens) == ("cancelled", 0)


async def test_one_whose_time_is_over_before_its_turn_expires(held: Held) -> None:
    async with occupied(held) as pipeline:
        assert await ends(submit(pipeline, {**LONG, "budget_ns": 50_000_000}, 1)) == {"expired"}


async def test_a_refused_one_is_refused_without_its_turn(held: Held) -> None:
    async with occupied(held) as pipeline:
        assert await ends(submit(pipeline, {**LONG, "n": 0}, 1)) == {"invalid_n"}


async def whole(pipeline: Pipeline, entry_id: str) -> tuple[int, ...]:
    """The tokens of a stream in which none is missing and none comes twice."""
    outputs = [each async for each in pipeline.bus.results.follow("", entry_id)]
    *chunks, end = outputs
    assert isinstance(end, Completion)
    assert end.status == "done"
    (sample,) = end.samples
    token_ids: list[int] = []
    for chunk in chunks:
        assert isinstance(chunk, CompletionChunk)
        assert chunk.token_offset == len(token_ids)
        token_ids += chunk.token_ids
    assert tuple(token_ids) == sample.token_ids
    return sample.token_ids
