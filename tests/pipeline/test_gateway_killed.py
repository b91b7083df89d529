"""Answers of a gateway whose pipeline loses stages: reasoning, guardrails, durable responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from nano_inference import Pipeline
from nano_inference.bus.steps import NewSequence
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.policy.administration import Administration
from nano_inference.stages.batching.stage import BatchingStage
from nano_inference.stages.executor.core import ExecutorCore

from .builders import break_once
from .conftest import LIMIT_S, MakeConfig

SHORT_MODEL = True

SAMPLED = {"temperature": 0.8, "seed": 3}
USER = {"role": "user", "content": "98 + 25 ="}
BLOCKED = "q"
"""A letter that the answer would have, behind some tokens."""

Answer = dict[str, Any]
Ask = Callable[[httpx.AsyncClient], Awaitable[Answer]]


async def posted(http: httpx.AsyncClient, path: str, **body: Any) -> Answer:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: Answer = answer.json()
    return found


async def reasoning(http: httpx.AsyncClient) -> Answer:
    """A budget ends the reasoning, and then a schema holds."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    asked: Answer = {"messages": [USER], "max_tokens": 60, "response_format": form, **SAMPLED}
    asked |= {"reasoning_effort": "low", "thinking_token_budget": 20}
    (choice,) = (await posted(http, "/v1/chat/completions", **asked))["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["content"] in ('"yes"', '"no"')
    return choice["message"] | {"finish": choice["finish_reason"]}


async def guardrail(http: httpx.AsyncClient) -> Answer:
    """The answer ends before a text that may not occur."""
    asked = {"prompt": "98 + 25 =", "max_tokens": 60, "logprobs": 1, "ignore_eos": True}
    (choice,) = (await posted(http, "/v1/completions", **asked, **SAMPLED))["choices"]
    assert choice["finish_reason"] == "content_filter"
    assert BLOCKED not in choice["text"].lower()
    return choice


async def durable_response(http: httpx.AsyncClient) -> Answer:
    """One in the background, which its client reads later."""
    schema = {"type": "string", "minLength": 20, "maxLength": 24}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    asked: Answer = {"input": "98 + 25 =", "background": True, "text": {"format": form}}
    found = await posted(http, "/v1/responses", max_output_tokens=60, temperature=0, **asked)
    while found["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        found = (await http.get(f"/v1/responses/{found['id']}")).json()
    (message,) = found["output"]
    (content,) = message["content"]
    assert found["status"] == "completed"
    assert 20 <= len(json.loads(content["text"])) <= 24
    return content | {"tokens": found["usage"]["output_tokens"]}


ASKS: tuple[Ask, ...] = (reasoning, guardrail, durable_response)


@pytest.fixture
async def http(make_config: MakeConfig) -> AsyncIterator[httpx.AsyncClient]:
    config = make_config(
        engine__deterministic=True, pipeline__restart_backoff_s=0.01, policy__backend="bus"
    )
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        administration = Administration(gateway._app.policy.store)
        key = await administration.create_key({"name": "a", "scopes": ["admin", "generate"]})
        headers = {"Authorization": f"Bearer {key['key']}"}
        async with httpx.AsyncClient(
            base_url=gateway.url, timeout=LIMIT_S, headers=headers
        ) as client:
            yield client


async def test_answers_are_those_of_an_undisturbed_run_when_stages_fail(
    http: httpx.AsyncClient, resumed: list[NewSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executor and batching fail in the middle of answers of all kinds."""
    answer = await http.put("/admin/guardrails", json={"literals": [BLOCKED]})
    assert answer.status_code == 200, answer.text
    undisturbed = await asyncio.gather(*(ask(http) for ask in ASKS))
    assert not resumed
    break_once(monkeypatch, ExecutorCore, "execute", 9)
    break_once(monkeypatch, BatchingStage, "handle", 40)
    assert await asyncio.gather(*(ask(http) for ask in ASKS)) == undisturbed
    assert resumed, "sequences went on behind their tokens"
