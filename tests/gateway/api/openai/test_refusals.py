"""What can't be obeyed is refused with the field's name; nothing of it reaches the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from nano_inference.config import Config, SamplingParams, load_config

from ...fake import FakeEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "a"}]


def refusal(answer: httpx.Response, status: int = 400) -> tuple[str, str | None]:
    """(code, param)."""
    assert answer.status_code == status, answer.text[:1000]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 2000
    return error["code"], error["param"]


BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "gpt-4"}, "model_not_found", "model"),
    ({"model": 3}, "invalid_request", "model"),
    ({"n": "2"}, "invalid_request", "n"),
    ({"n": 0}, "invalid_n", "n"),
    ({"n": 10**9}, "too_many_prompts", "n"),
    ({"n": 2**63}, "invalid_request", "n"),
    ({"temperature": "hot"}, "invalid_request", "temperature"),
    ({"top_p": [1]}, "invalid_request", "top_p"),
    ({"seed": 2**63}, "invalid_request", "seed"),
    ({"stop": 5}, "invalid_request", "stop"),
    ({"stop": ["a", 5]}, "invalid_request", "stop[1]"),
    ({"stop_token_ids": ["a"]}, "invalid_request", "stop_token_ids[0]"),
    ({"logit_bias": {"a": 1}}, "invalid_request", "logit_bias"),
    ({"stream": "yes"}, "invalid_request", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "unsupported", "stream_options.x"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "invalid_request",
        "stream_options.continuous_usage_stats",
    ),
    ({"stream": True, "prompt_logprobs": 1}, "invalid_request", "prompt_logprobs"),
    ({"budget_ms": 1e300}, "invalid_budget", "budget_ms"),
    ({"response_format": {"type": "xml"}}, "invalid_request", "response_format.type"),
    (
        {"response_format": {"type": "json_schema"}},
        "invalid_request",
        "response_format.json_schema",
    ),
    ({"response_format": []}, "invalid_request", "response_format"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "invalid_request", "structured_outputs"),
    (
        {"structured_outputs": {"structural_tag": "a"}},
        "unsupported",
        "structured_outputs.structural_tag",
    ),
    ({"structured_outputs": {"choice": "a"}}, "invalid_request", "structured_outputs.choice"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "invalid_request",
        "response_format",
    ),
    ({"skip_special_tokens": False}, "unsupported", "skip_special_tokens"),
    ({"service_tier": "flex"}, "unsupported", "service_tier"),
    ({"temperatur": 1}, "unsupported", "temperatur"),
    ({"max_tokens": 1.5}, "invalid_request", "max_tokens"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "empty_prompt", "prompt"),
    ({"prompt": ""}, "empty_prompt", "prompt"),
    ({"prompt": []}, "empty_prompt", "prompt"),
    ({"prompt": {}}, "invalid_request", "prompt"),
    ({"prompt": [1.5]}, "invalid_request", "prompt[0]"),
    ({"prompt": [None]}, "invalid_request", "prompt[0]"),
    ({"prompt": [1, "a"]}, "invalid_request", "prompt[1]"),
    ({"prompt": ["a", 1]}, "invalid_request", "prompt[1]"),
    ({"prompt": [[1], [2**64]]}, "invalid_request", "prompt[1][0]"),
    ({"prompt": [7] * 9000}, "context_length_exceeded", "prompt"),
    ({"prompt": ["a"] * 5, "n": 2000}, "too_many_prompts", "n"),
    ({"logprobs": True}, "invalid_request", "logprobs"),
    ({"suffix": "x"}, "unsupported", "suffix"),
    ({"best_of": 2}, "unsupported", "best_of"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "invalid_request", "prompt_logprobs"),
    ({"messages": HELLO}, "unsupported", "messages"),
]
PART = {"type": "text", "text": "a"}
OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "invalid_request", "messages"),
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": "hello"}, "invalid_request", "messages"),
    ({"messages": [1]}, "invalid_request", "messages[0]"),
    ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
    ({"messages": [{"content": "a"}]}, "invalid_request", "messages[0]"),
    (
        {"messages": [{"role": "wizard", "content": "a"}]},
        "invalid_request",
        "messages[0].role",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_request", "messages[0].content"),
    (
        {"messages": [*HELLO, {"role": "user", "content": [PART, {"type": "image_url"}]}]},
        "unsupported",
        "messages[1].content[1]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "invalid_request",
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": {"a": 1}}]}]},
        "unsupported",
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]},
        "unsupported",
        "messages[0].audio",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]},
        "invalid_request",
        "messages[0].tool_calls[0].function",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ]
        },
        "invalid_request",
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported", "tools"),
    ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
    ({"functions": [{"name": "f"}]}, "unsupported", "functions"),
    ({"function_call": {"name": "f"}}, "unsupported", "function_call"),
    ({"stream_reasoning": False}, "unsupported", "stream_reasoning"),
    ({"reasoning_effort": "high"}, "unsupported", "reasoning_effort"),
    ({"reasoning_effort": "hgih"}, "invalid_request", "reasoning_effort"),
    ({"thinking_token_budget": -1}, "invalid_request", "thinking_token_budget"),
    ({"thinking_token_budget": 5}, "unsupported", "thinking_token_budget"),
    ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
    ({"logprobs": 2}, "invalid_request", "logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "invalid_request", "max_tokens"),
    ({"chat_template": "{{ 1 }}"}, "unsupported", "chat_template"),
    (
        {"chat_template_kwargs": {"thinking": False}},
        "unsupported",
        "chat_template_kwargs.thinking",
    ),
    (
        {"chat_template_kwargs": {"tokenize": True}},
        "unsupported",
        "chat_template_kwargs.tokenize",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_request",
        "continue_final_message",
    ),
    ({"modalities": ["text", "audio"]}, "unsupported", "modalities"),
]
CASES = [
    *((COMPLETIONS, {"prompt": "a"} | body, code, param) for body, code, param in BOTH),
    *((CHAT, {"messages": HELLO} | body, code, param) for body, code, param in BOTH),
    *((COMPLETIONS, {"prompt": "a"} | body, code, param) for body, code, param in OF_COMPLETIONS),
    *((CHAT, {"messages": HELLO} | body, code, param) for body, code, param in OF_CHATS),
]


@pytest.fixture
def config() -> Config:
    """Of a model of which nobody knows how it calls tools and reasons."""
    return load_config(env={}, overrides={"gateway.message_format": "off"})


@pytest.mark.parametrize(("path", "body", "code", "param"), CASES)
async def test_a_field_that_can_not_be_obeyed(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    code: str,
    param: str,
) -> None:
    answer = await http.post(path, json=body)
    status = 404 if code == "model_not_found" else 400
    assert refusal(answer, status) == (code, param)
    assert not engine.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"5",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": 1e999}',
        b'{"messages": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"messages": ' + b'{"a":' * 100_000,
    ],
)
async def test_what_is_no_json_is_malformed(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: bytes
) -> None:
    assert refusal(await http.post(path, content=body)) == ("malformed", None)
    assert not engine.requests


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_body_that_is_too_large(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json={"prompt": "a" * (17 << 20)})
    assert refusal(answer, 413) == ("request_too_large", None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_a_text_that_is_too_long_is_not_tokenised(
    http: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    text = "a" * ((4 << 20) + 1)
    messages = path == CHAT
    body = {"messages": [{"role": "user", "content": text}]} if messages else {"prompt": text}
    answer = await http.post(path, json=body | ({"echo": True} if path == COMPLETIONS else {}))
    code, param = refusal(answer, 413 if path == COMPLETIONS else 400)
    assert (code, param) in (
        ("context_length_exceeded", "messages" if messages else "prompt"),
        ("request_too_large", None),
    )
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
async def test_tokens_that_are_none(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(await http.post(path, json=body))[1] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"function_call": "auto", "functions": [], "stream_reasoning": True},
        {"reasoning_effort": "none", "include_reasoning": False, "separate_reasoning": False},
        {"response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"}},
        {"stop": None, "seed": None, "logprobs": None, "stream_options": None},
        {"skip_special_tokens": True, "length_penalty": 1.0, "service_tier": "auto"},
        {"stop": "", "top_k": -1, "logit_bias": {}, "best_of": None, "whatever": None},
    ],
)
async def test_what_asks_for_nothing_is_taken(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    answer = await http.post(CHAT, json={"messages": HELLO} | fields)
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].sampling == SamplingParams(max_tokens=2048)
