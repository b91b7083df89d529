"""The lanes' state: readiness, draining, context length; each is read once for all readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import BusError, Config, EngineConfig
from nano_inference.gateway.server.calls import ObservedCalls
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.serving import lane_state
from nano_inference.gateway.serving.lane_state import ModelLength, Readiness, Recent, ServedModels
from nano_inference.store.board import StageReport
from nano_inference.store.loaded_adapter import LoadedAdapter
from nano_inference.telemetry import TraceContext

from ..errors import error_of
from ..fake import Client, FakeEngine, app_of, http_of, report
from ..interfaces import STREAMED

SETTING = Config().engine.max_model_len
OWN = 2048
"""The length in the bundled model's files."""
HELLO = [{"role": "user", "content": "a"}]


class Waiting(FakeEngine):
    """Answers while it `goes_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def submit(
        self, request: GenerateRequest, trace: TraceContext | None = None
    ) -> AsyncGenerator[Output, None]:
        outputs = super().submit(request, trace)
        async for output in outputs:
            await self.goes_on.wait()
            yield output


@pytest.fixture
def engine() -> Waiting:
    return Waiting()


@pytest.fixture
def readiness(engine: FakeEngine) -> Readiness:
    return Readiness(engine.deployment)  # type: ignore[arg-type]


@pytest.fixture
def calls(engine: FakeEngine, config: Config, readiness: Readiness) -> ObservedCalls:
    app = app_of(engine, config, readiness=readiness)
    return ObservedCalls(app, Measures(), STREAMED)


@pytest.fixture
async def http(calls: ObservedCalls, engine: FakeEngine) -> AsyncIterator[Client]:
    async with http_of(calls, engine) as client:
        yield client


# --- draining ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
async def test_a_draining_gateway_is_not_ready(
    http: Client, readiness: Readiness, path: str
) -> None:
    assert (await http.get(path)).status_code == 200
    readiness.draining = True
    assert error_of(await http.get(path), 503) == "not_ready"
    assert len(http.engine.requests) <= 1, "no token is asked for"


async def test_calls_in_flight_end_while_draining(
    http: Client, readiness: Readiness, calls: ObservedCalls
) -> None:
    http.engine.goes_on.clear()
    call = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a", "n": 2}))
    await http.engine.until(lambda: len(http.engine.requests) == 1)
    readiness.draining = True
    drained = asyncio.create_task(calls.idle())
    # A probe meanwhile changes nothing.
    assert (await http.get("/health")).status_code == 503
    assert not drained.done()
    http.engine.goes_on.set()
    assert (await call).status_code == 200
    await drained


async def test_draining_without_calls_returns_at_once(calls: ObservedCalls) -> None:
    await calls.idle()


# --- the context length ---------------------------------------------------------------------------


def executor(lane: str, stage: str = "executor", **load: int) -> StageReport:
    return report(lane=lane, stage=stage, load=dict(load))


def ids_tensor(name: str, ids: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [len(ids)], "data": ids}


async def reported_lengths(http: Client) -> set[int]:
    """The lengths of all endpoints."""
    ids = (await http.post("/tokenize", json={"prompt": "a"})).json()
    return {
        (await http.get("/v1/models")).json()["data"][0]["max_model_len"],
        (await http.get("/v1/models/tiny")).json()["max_model_len"],
        (await http.get("/tokenizer_info")).json()["model_max_length"],
        (await http.get("/server_info")).json()["context_length"],
        ids["max_model_len"],
    }


@pytest.mark.parametrize(
    ("reports", "length"),
    [
        ([], OWN),
        ([executor("0")], OWN),
        ([executor("0", max_model_len=4096)], 4096),
        ([executor("0", max_model_len=SETTING + 1)], SETTING),
        (
            [
                executor("0", max_model_len=2048),
                executor("0", "executor.1", max_model_len=2048),
                executor("1", max_model_len=1024),
            ],
            1024,
        ),
    ],
)
async def test_all_endpoints_report_the_least_length(
    http: Client, reports: list[StageReport], length: int
) -> None:
    http.engine.stage_reports = reports
    assert await reported_lengths(http) == {length}


@pytest.mark.parametrize(
    ("engine", "length"),
    [({}, OWN), ({"max_model_len": 100}, 100), ({"model_path": "/nowhere"}, SETTING)],
)
async def test_the_length_of_an_unloaded_model_is_from_its_files(
    engine: dict[str, Any], length: int
) -> None:
    class Away(FakeEngine):
        async def reports(self) -> list[StageReport]:
            raise BusError("away")

    config = Config(engine=EngineConfig(**engine))
    assert await ModelLength(Away(), config).get() == length  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_the_default_length_is_the_model_s(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    http.engine.stage_reports = [executor("0", max_model_len=2048)]
    assert (await http.post(path, json=body)).status_code == 200
    assert http.engine.requests[0].sampling.max_tokens == 2048


IDS = [5] * 3000
ENDLESS = "a" * 200_000
LONG = [{"role": "user", "content": "98 + 25 = " * 1500}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": IDS}),
        ("/v1/completions", {"prompt": ENDLESS, "echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": LONG, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": ENDLESS}]}),
        ("/inference/v1/generate", {"token_ids": IDS}),
        ("/v1/embeddings", {"input": IDS}),
        ("/generate", {"input_ids": IDS}),
        ("/tokenize", {"prompt": ENDLESS}),
        ("/v2/models/tiny.tokens/infer", {"inputs": [ids_tensor("input_ids", IDS)]}),
        ("/v2/models/tiny.best_of/infer", {"inputs": [ids_tensor("input_ids", IDS)]}),
        (
            "/v2/models/tiny.score/infer",
            {"inputs": [ids_tensor("prompt_ids", IDS), ids_tensor("completion_ids", [5])]},
        ),
    ],
)
async def test_too_long_a_prompt_is_refused_in_openai_s_words(
    engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.stage_reports = [executor("0", max_model_len=2048)]
    async with http_of(app_of(engine)) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    # LiteLLM and others find out by these words that another model may take it.
    assert "This model's maximum context length is 2048 tokens; " in answer.text
    assert str(SETTING) not in answer.text
    assert not engine.requests


# --- cached results -------------------------------------------------------------------------------


class Question:
    """Answers with the number of calls so far, once its gate is open."""

    def __init__(self) -> None:
        self.asked = 0
        self.gate = asyncio.Event()
        self.error: BusError | None = None

    async def ask(self) -> int:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.asked


@pytest.fixture
async def question() -> Question:
    return Question()


async def test_concurrent_readers_share_one_call(question: Question) -> None:
    recent = Recent(question.ask, 3600.0)
    asking = [asyncio.create_task(recent.get()) for _ in range(5)]
    while not question.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    question.gate.set()
    assert await asyncio.gather(*asking) == [1] * 5
    assert await recent.get() == 1


async def test_an_expired_result_is_not_returned(question: Question) -> None:
    recent = Recent(question.ask, 0.0)
    question.gate.set()
    assert [await recent.get() for _ in range(3)] == [1, 2, 3]


async def test_an_error_is_cached(question: Question) -> None:
    recent = Recent(question.ask, 3600.0)
    question.error = BusError("Redis is away")
    question.gate.set()
    for _ in range(3):
        with pytest.raises(BusError, match="Redis is away"):
            await recent.get()
    assert question.asked == 1


async def test_a_cancelled_call_is_repeated_for_the_next_reader(question: Question) -> None:
    recent = Recent(question.ask, 3600.0)
    first, second = (asyncio.create_task(recent.get()) for _ in range(2))
    while not question.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.cancel()
    question.gate.set()
    assert await second == 2


# --- adapters ---------------------------------------------------------------------------------


async def test_adapters_stay_known_while_admission_is_started_anew(
    engine: FakeEngine, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor has none until the executors have told it; requests wait meanwhile."""
    monkeypatch.setattr(lane_state, "ASKED_EVERY_S", 0.0)
    served = ServedModels(engine, config)  # type: ignore[arg-type]

    async def known(*reports: StageReport) -> list[str]:
        engine.stage_reports = list(reports)
        return [each.id for each in await served.adapters()]

    loaded = report(adapters=(LoadedAdapter("lora", 1),))
    assert await known(report(state="waiting")) == []
    assert await known(loaded) == ["lora"]
    assert await known(report(state="waiting")) == ["lora"]
    assert await known() == ["lora"]
    assert await known(report()) == [], "it was unloaded"
    other = report(state="starting", lane="b")
    assert await known(loaded, other) == ["lora"], "lanes that are not ready don't count"
