"""JSON Schema allows integers of any size, which no interface may stumble over."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from nano_inference.config import Config, load_config

from .fake import FakeEngine

LARGE = 10**30
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": LARGE}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
NESTED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
OUTPUTS = {"structured_outputs": {"json": SCHEMA}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
STRICT = FUNCTION | {"strict": True}


@pytest.fixture
def config() -> Config:
    return load_config(env={})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "response_format": NESTED}),
        ("/v1/completions", {"prompt": "a", "guided_json": SCHEMA}),
        ("/v1/chat/completions", TALK | {"tools": [{"type": "function", "function": STRICT}]}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function"} | FUNCTION]}),
        ("/v1/responses", {"input": "a", "text": {"format": FORMAT}}),
        ("/v1/messages", TALK | {"tools": [{"name": "f", "input_schema": SCHEMA}]}),
        ("/v1/messages", TALK | {"output_config": {"format": FORMAT}}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": OUTPUTS}),
        ("/v2/models/tiny/generate", {"text_input": "a", "sampling_parameters": OUTPUTS}),
    ],
)
async def test_a_schema_may_hold_an_integer_beyond_64_bits(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    # With a key, the call is stored.
    answer = await http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    # Tools that are not strict constrain nothing.
    if (constraint := request.sampling.constraint) is not None:
        assert str(LARGE) in msgspec.json.encode(constraint).decode()
