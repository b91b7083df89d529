"""What a model takes is told as its executors know it, and no call asks for more."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from nano_inference.bus import StageReport
from nano_inference.config import BusError, Config
from nano_inference.gateway.model_length import ModelLength

from .fake import FakeEngine

SETTING = Config().engine.max_model_len
HELLO = [{"role": "user", "content": "a"}]


def executor(lane: str, stage: str = "executor", **load: int) -> StageReport:
    return StageReport(
        lane=lane,
        stage=stage,
        incarnation="a",
        host="h",
        pid=1,
        epoch=1,
        state="ready",
        load=dict(load),
    )


async def told(http: httpx.AsyncClient) -> set[int]:
    """What the endpoints say."""
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
        ([], SETTING),
        ([executor("0")], SETTING),
        ([executor("0", max_model_len=2048)], 2048),
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
async def test_all_endpoints_tell_the_length_that_any_lane_takes(
    http: httpx.AsyncClient, engine: FakeEngine, reports: list[StageReport], length: int
) -> None:
    engine.told = reports
    assert await told(http) == {length}


async def test_while_nobody_can_be_asked_it_is_the_setting() -> None:
    class Away(FakeEngine):
        async def reports(self) -> list[StageReport]:
            raise BusError("away")

    length = ModelLength(Away(), Config())  # type: ignore[arg-type]
    assert await length.get() == SETTING


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/inference/v1/generate", {"token_ids": [1]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_who_names_no_length_asks_for_no_more_than_the_model_takes(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    engine.told = [executor("0", max_model_len=2048)]
    assert (await http.post(path, json=body)).status_code == 200
    assert engine.requests[0].sampling.max_tokens == 2048
