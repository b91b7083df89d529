"""Limits of priority, in every interface with its own sign."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from nano_inference.config import Config, load_config

from ..fake import FakeEngine

HELLO = [{"role": "user", "content": "a"}]
IDS = {"name": "input_ids", "datatype": "INT64", "shape": [1], "data": [5]}

LOWER_FIRST: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": "a", "stream": True}),
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/responses", {"input": "a", "background": True}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 3}),
    ("/inference/v1/generate", {"token_ids": [5]}),
    ("/v1/embeddings", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": "b"}),
    ("/rerank", {"query": "a", "documents": ["b"]}),
    ("/v2/models/tiny/generate", {"text_input": "a"}),
]
HIGHER_FIRST: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "a"}),
    ("/generate", {"text": ["a", "b"], "stream": True}),
    ("/encode", {"text": "a"}),
]
CALLS = [*((*each, -1) for each in LOWER_FIRST), *((*each, 1) for each in HIGHER_FIRST)]


@pytest.fixture
def config() -> Config:
    return load_config(env={}, overrides={"gateway.max_priority": 3})


@pytest.mark.parametrize(("path", "body", "sign"), CALLS)
async def test_a_priority_above_the_limit_is_refused(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], sign: int
) -> None:
    answer = await http.post(path, json=body | {"priority": 4 * sign})
    assert answer.status_code == 400, answer.text
    assert f"priority is {4 * sign}; it must be from " in answer.text
    assert "(gateway.max_priority)" in answer.text
    if "param" in answer.text:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_priority", "priority")
    answer = await http.post(path, json=body | {"priority": -1001 * sign})
    assert (answer.status_code, engine.requests) == (400, [])


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [each for each in CALLS if each[0] in ("/generate", "/v1/completions")],
)
async def test_a_priority_within_the_limit_reaches_the_engine(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], sign: int
) -> None:
    answer = await http.post(path, json=body | {"priority": 3 * sign})
    assert answer.status_code == 200, answer.text
    assert {request.priority for request in engine.requests} == {3}
