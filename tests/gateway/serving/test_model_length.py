"""The context length, as reported by the executors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from nano_inference.config import BusError, Config, EngineConfig, load_config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving.lane_state import ModelLength
from nano_inference.store.board import StageReport

from ..fake import FakeEngine, http_of, report

SETTING = Config().engine.max_model_len
OWN = 2048
"""The length in the bundled model's files."""
HELLO = [{"role": "user", "content": "a"}]


def executor(lane: str, stage: str = "executor", **load: int) -> StageReport:
    return report(lane=lane, stage=stage, load=dict(load))


def ids_tensor(name: str, ids: list[int]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [len(ids)], "data": ids}


async def reported_lengths(http: httpx.AsyncClient) -> set[int]:
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
    http: httpx.AsyncClient, engine: FakeEngine, reports: list[StageReport], length: int
) -> None:
    engine.stage_reports = reports
    assert await reported_lengths(http) == {length}


@pytest.mark.parametrize(
    ("engine", "length"),
    [
        ({}, OWN),
        ({"max_model_len": 100}, 100),
        ({"model_path": "/nowhere"}, SETTING),
    ],
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
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.stage_reports = [executor("0", max_model_len=2048)]
    assert (await http.post(path, json=body)).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 2048


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
    async with http_of(make_app(engine, load_config(env={}))) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400
    # LiteLLM and others find out by these words that another model may take it.
    assert "This model's maximum context length is 2048 tokens; " in answer.text
    assert str(SETTING) not in answer.text
    assert not engine.requests
