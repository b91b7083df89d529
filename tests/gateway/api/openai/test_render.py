"""A call rendered to tokens, and its answer made of tokens, as the gateway makes both in one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ...errors import code_of
from ...fake import Client, poster
from ...saying import Model

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SAID = (
    "<think>\nIt is north.\n</think>\n\nLook."
    '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
render, chat, generate = (poster(path, {}) for path in (f"{CHAT}/render", CHAT, GENERATE))


@pytest.fixture
def config(calling: Any) -> Any:
    return calling


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 0.5, "seed": 3, "stop": ["x", "y"], "stop_token_ids": [9, 7]},
        {"logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 2.5}, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "priority": 2, "cache_salt": "s"},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"thinking_token_budget": 9, "truncate_prompt_tokens": 5},
    ],
)
async def test_what_is_rendered_makes_the_request_of_the_chat(
    http: Client, model: Model, fields: dict[str, Any]
) -> None:
    model.says("five")
    await chat(http, **HELLO, **fields)
    rendered = await render(http, **HELLO, **fields)
    await generate(http, **rendered)
    chatted, generated = http.engine.requests
    assert replace(generated, request_id=chatted.request_id, is_chat=True) == chatted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", HELLO | {"max_tokens": 9, "temperature": 0.5, "priority": 2}),
        (
            "/v1/messages",
            HELLO
            | {"max_tokens": 9, "stream": True, "tool_choice": {"type": "any"}}
            | {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]},
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9, "cache_salt": "s", "seed": 3}),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "function"} | WEATHER["function"]]}
            | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        ),
    ],
)
async def test_messages_and_responses_are_rendered_too(
    http: Client, model: Model, path: str, body: dict[str, Any]
) -> None:
    model.says("five")
    assert (await http.post(path, json=body)).status_code == 200
    rendered = await poster(f"{path}/render", body)(http)
    await http.post(GENERATE, json=rendered)
    called, generated = http.engine.requests
    assert replace(generated, request_id=called.request_id, is_chat=True) == called


@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("Cold.", {}),
        (SAID, {"tools": [WEATHER]}),
        (SAID, {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1}),
        (SAID, {"tools": [WEATHER], "return_token_ids": True, "include_reasoning": False}),
        ("one stop", {"stop": ["stop"]}),
    ],
)
async def test_the_answer_made_of_tokens_is_that_of_the_chat(
    http: Client, model: Model, said: str, fields: dict[str, Any]
) -> None:
    model.says(said)
    wanted = await chat(http, **HELLO, **fields)
    rendered = await render(http, **HELLO, **fields)
    made = await generate(http, **rendered)
    body = {
        "generate_response": made,
        "chat_request": HELLO | fields,
        "prompt_token_ids": rendered["token_ids"],
    }
    answer = (await http.post(f"{CHAT}/derender", json=body)).json()
    for each in (wanted, answer):
        for choice in each["choices"]:
            for call in choice["message"].get("tool_calls", ()):
                # Made of the answer's id.
                del call["id"]
    own = {"id": made["request_id"], "created": answer["created"], "usage": answer["usage"]}
    assert answer == wanted | own
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])


async def test_each_prompt_of_a_completion_is_rendered_and_made_again(http: Client) -> None:
    asked = {"prompt": ["98 +", "1 +"], "logprobs": 2, "max_tokens": 3}
    (whole,) = [(await http.post(COMPLETIONS, json=asked)).json()]
    bodies = (await http.post(f"{COMPLETIONS}/render", json=asked)).json()
    made = [await generate(http, **each) for each in bodies]
    assert [each["request_id"] for each in made] == [each["request_id"] for each in bodies]
    body = {"generate_responses": made, "completion_request": asked, "prompt_tokens": [4, 4]}
    told = await http.post(f"{COMPLETIONS}/derender", json=body)
    assert told.status_code == 200, told.text
    answer = told.json()
    assert [each["logprobs"] for each in answer["choices"]] == [
        each["logprobs"] for each in whole["choices"]
    ]
    assert answer["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("changed", "code", "param"),
    [
        ({"chat_request": None}, "invalid_request", "chat_request"),
        ({"stream": True}, "unsupported", "stream"),
        ({"generate_response": {}}, "invalid_request", "generate_response.choices"),
        (
            {"generate_response": {"choices": [{"token_ids": [10**6]}]}},
            "invalid_token_ids",
            "generate_response.choices[].token_ids",
        ),
        (
            {"generate_response": {"choices": [{"token_ids": [5] * 2049}]}},
            "invalid_request",
            "generate_response.choices[].token_ids",
        ),
        ({"prompt_token_ids": [-1]}, "invalid_token_ids", "prompt_token_ids"),
        (
            {"chat_request": HELLO | {"logprobs": True}},
            "invalid_request",
            "choices[0].logprobs",
        ),
        ({"model": "other"}, "model_not_found", "model"),
    ],
)
async def test_what_is_no_answer_of_tokens_is_refused(
    http: Client, changed: dict[str, Any], code: str, param: str
) -> None:
    body = {"generate_response": {"choices": [{"token_ids": [5]}]}, "chat_request": HELLO}
    answer = await http.post(f"{CHAT}/derender", json=body | changed)
    assert code_of(answer, 404 if code == "model_not_found" else 400) == code
    assert answer.json()["error"]["param"] == param
    assert not http.engine.requests
