"""Unsupported values are refused with the field's name; none reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Response

from ...errors import invalid
from ...fake import Client, refused

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
HELLO = [{"role": "user", "content": "a"}]


def refusal(answer: Response, status: int = 400) -> tuple[str, str | None]:
    """(code, param)."""
    assert answer.status_code == status, answer.text[:1000]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 2000
    return error["code"], error["param"]


BOTH: list[tuple[dict[str, Any], str, str]] = [
    invalid("model", "model_not_found", model="gpt-4"),
    invalid("model", model=3),
    invalid("n", n="2"),
    invalid("n", "invalid_n", n=0),
    invalid("n", "too_many_prompts", n=10**9),
    invalid("n", n=2**63),
    invalid("temperature", temperature="hot"),
    invalid("top_p", top_p=[1]),
    invalid("seed", seed=2**63),
    invalid("stop", stop=5),
    invalid("stop[1]", stop=["a", 5]),
    invalid("stop_token_ids[0]", stop_token_ids=["a"]),
    invalid("logit_bias", logit_bias={"a": 1}),
    invalid("stream", stream="yes"),
    invalid("stream_options.x", "unsupported", stream=True, stream_options={"x": 1}),
    invalid(
        "stream_options.continuous_usage_stats",
        stream=True,
        stream_options={"continuous_usage_stats": True},
    ),
    invalid("prompt_logprobs", stream=True, prompt_logprobs=1),
    invalid("budget_ms", "invalid_budget", budget_ms=1e300),
    invalid("response_format.type", response_format={"type": "xml"}),
    invalid("response_format.json_schema", response_format={"type": "json_schema"}),
    invalid("response_format", response_format=[]),
    invalid("structured_outputs", structured_outputs={"json": {}, "regex": "a"}),
    invalid(
        "structured_outputs.structural_tag",
        "unsupported",
        structured_outputs={"structural_tag": "a"},
    ),
    invalid("structured_outputs.choice", structured_outputs={"choice": "a"}),
    invalid("response_format", guided_regex="a", response_format={"type": "json_object"}),
    invalid("skip_special_tokens", "unsupported", skip_special_tokens=False),
    invalid("extra_body", "unsupported", extra_body={"top_k": 5}),
    invalid("temperatur", "unsupported", temperatur=1),
    invalid("max_tokens", max_tokens=1.5),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    invalid("prompt", "empty_prompt", prompt=None),
    invalid("prompt", "empty_prompt", prompt=""),
    invalid("prompt", "empty_prompt", prompt=[]),
    invalid("prompt", prompt={}),
    invalid("prompt[0]", prompt=[1.5]),
    invalid("prompt[0]", prompt=[None]),
    invalid("prompt[1]", prompt=[1, "a"]),
    invalid("prompt[1]", prompt=["a", 1]),
    invalid("prompt[1][0]", prompt=[[1], [2**64]]),
    invalid("prompt", "context_length_exceeded", prompt=[7] * 9000),
    invalid("n", "too_many_prompts", prompt=["a"] * 5, n=2000),
    invalid("logprobs", logprobs="2"),
    invalid("suffix", "unsupported", suffix="x"),
    invalid("best_of", "unsupported", best_of=2),
    invalid("prompt_logprobs", echo=True, logprobs=1, prompt_logprobs=2),
    invalid("messages", "unsupported", messages=HELLO),
]
PART = {"type": "text", "text": "a"}
IMAGE = {"type": "image_url", "image_url": "http://example.org/a.png"}
NOT_SUPPORTED = "images_not_supported"


def said(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} | more]


def called(function: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{"function": function}]}]


OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
    invalid("messages", messages=None),
    invalid("messages", messages=[]),
    invalid("messages", messages="hello"),
    invalid("messages[0]", messages=[1]),
    invalid("messages[0].content", messages=[{"role": "user"}]),
    invalid("messages[0]", messages=[{"content": "a"}]),
    invalid("messages[0].role", messages=[{"role": "wizard", "content": "a"}]),
    invalid("messages[0].content", messages=said(5)),
    invalid(
        "messages[1].content[1].image_url", NOT_SUPPORTED, messages=HELLO + said([PART, IMAGE])
    ),
    invalid("messages[1].content[0]", messages=HELLO + said([{"type": "image_url"}])),
    invalid("messages[0].content[0].text", messages=said([PART | {"text": 5}])),
    invalid("messages[0].content[0]", "unsupported", messages=said([{"type": {"a": 1}}])),
    invalid("messages[0].audio", "unsupported", messages=said("a", audio={"id": "x"})),
    invalid("messages[0].tool_calls[0].function", messages=called(5)),
    invalid(
        "messages[0].tool_calls[0].function.arguments",
        messages=called({"name": "f", "arguments": "{"}),
    ),
    invalid("tools", "unsupported", tools=[{"type": "function", "function": {"name": "f"}}]),
    invalid("tool_choice", tool_choice="required"),
    invalid("functions", "unsupported", functions=[{"name": "f"}]),
    invalid("function_call", "unsupported", function_call={"name": "f"}),
    invalid("stream_reasoning", "unsupported", stream_reasoning=False),
    invalid("reasoning_effort", reasoning_effort="hgih"),
    invalid("thinking_token_budget", thinking_token_budget=-1),
    invalid("thinking_token_budget", "unsupported", thinking_token_budget=5),
    invalid("top_logprobs", top_logprobs=2),
    invalid("logprobs", logprobs=2),
    invalid("chat_template", "unsupported", chat_template="{{ 1 }}"),
    invalid(
        "chat_template_kwargs.tokenize", "unsupported", chat_template_kwargs={"tokenize": True}
    ),
    invalid("continue_final_message", continue_final_message=True, add_generation_prompt=True),
    invalid("modalities", "unsupported", modalities=["text", "audio"]),
]
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "a"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "http://example.org/a.png"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}
FUNCTION = {"type": "function", "name": "f"}
CUSTOM = {"type": "custom", "name": "f"}
SPACE = {"type": "namespace", "name": "space", "tools": [CUSTOM]}
SEARCH = {"type": "web_search", "external_web_access": False}


def filed(data: str, **fields: Any) -> list[dict[str, Any]]:
    part = {"type": "input_file", "file_data": data} | fields
    return [{"role": "user", "content": [part]}]


OF_RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    invalid("input", input=None),
    invalid("input", input=[]),
    invalid("input", input=5),
    invalid("input[0]", "unsupported", input=[{"type": "sound_call", "id": "a"}]),
    invalid("input", input=[{"type": "web_search_call", "id": "a"}]),
    invalid("input[0]", input=[{"type": "custom_tool_call", "call_id": "a", "name": "f"}]),
    invalid("input[0].call_id", input=[OUTPUT | {"type": "custom_tool_call_output"}]),
    invalid(
        "input[0].encrypted_content",
        "unsupported",
        input=[{"type": "compaction", "encrypted_content": "gAAAA"}],
    ),
    invalid("input[0]", input=[{"type": "function_call", "name": "f"}]),
    invalid("input[0].arguments", input=[CALL | {"arguments": "{"}]),
    invalid("input[0].arguments", input=[CALL | {"arguments": "[]"}]),
    invalid("input[0].namespace", input=[CALL | {"namespace": 5}]),
    invalid("input[0].call_id", input=[OUTPUT, CALL]),
    invalid("input[0].output", input=[OUTPUT | {"output": 5}]),
    invalid("input[0].output[0]", "unsupported", input=[OUTPUT | {"output": [INPUT_AUDIO]}]),
    invalid("input[0].content", input=[{"type": "reasoning", "content": "a"}]),
    invalid(
        "input[0].content[0]", "unsupported", input=[{"role": "user", "content": [INPUT_AUDIO]}]
    ),
    invalid(
        "input.content[0].image_url",
        NOT_SUPPORTED,
        input=[{"role": "user", "content": [INPUT_IMAGE]}],
    ),
    invalid("input[0].role", input=[{"role": "wizard", "content": "a"}]),
    invalid("input[0].content[0].file_data", "unsupported", input=filed("JVBERi0xLjQK")),
    invalid("input[0].content[0].file_data", "unsupported", input=filed("data:a/pdf;base64,YQ==")),
    invalid("input[0].content[0].file_data", input=filed("data:text/plain,a")),
    invalid("input[0].content[0].file_data", input=filed("/w==")),
    invalid("input[0].content[0].file_id", "unsupported", input=filed("YQ==", file_id="a")),
    invalid(
        "context_management",
        "unsupported",
        context_management=[{"type": "compaction", "compact_threshold": 1}],
    ),
    invalid("context_management[0].type", context_management=[{"type": "clearing"}]),
    invalid("instructions", instructions=5),
    invalid("include[0]", "unsupported", include=["message.output_text.tokens"]),
    invalid("top_logprobs", top_logprobs=3),
    invalid("metadata", metadata={"a": 1}),
    invalid("metadata", metadata={str(key): "" for key in range(17)}),
    invalid("background", background=True, store=False),
    invalid("background_options", "unsupported", background_options={"completion_window": "2h"}),
    invalid("previous_response_id", "previous_response_not_found", previous_response_id="resp_1"),
    invalid("conversation", conversation=5),
    invalid("previous_response_id", conversation="a", previous_response_id="b"),
    invalid("prompt", "unsupported", prompt={"id": "a"}),
    invalid("tools[0]", "unsupported", tools=[{"type": "telepathy"}]),
    invalid("tools[0]", tools=[{"type": "function"}]),
    invalid("tools[0].format.type", tools=[CUSTOM | {"format": {"type": "xml"}}]),
    invalid(
        "tools[0].format.definition",
        "invalid_constraint",
        tools=[CUSTOM | {"format": {"type": "grammar", "syntax": "regex", "definition": "("}}],
    ),
    invalid("tools[0].tools[0]", "unsupported", tools=[SPACE | {"tools": [{"type": "mcp"}]}]),
    invalid("tools[0].tools[0]", tools=[SPACE | {"tools": [SPACE]}]),
    invalid("tools[0].tools[0]", tools=[SPACE | {"tools": ["run"]}]),
    invalid("tools[0].tools[0].name", tools=[SPACE | {"name": "a b", "tools": [CUSTOM]}]),
    invalid("tools[0].name", tools=[{"type": "function", "name": "a b"}]),
    invalid("tools[1].name", tools=[FUNCTION, FUNCTION]),
    invalid("tools[0].parameters", tools=[FUNCTION | {"parameters": []}]),
    invalid("tool_choice", tool_choice="sometimes"),
    invalid("tool_choice", tool_choice="required"),
    invalid("tool_choice", "unsupported", tool_choice={"type": "web_search"}),
    invalid("tool_choice", "unsupported", tools=[SEARCH], tool_choice="required"),
    invalid("tool_choice", "unsupported", tools=[SEARCH], tool_choice={"type": "web_search"}),
    invalid(
        "tool_choice",
        tools=[SEARCH],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [SEARCH]},
    ),
    invalid("tool_choice.name", tools=[FUNCTION], tool_choice={"type": "function", "name": "g"}),
    invalid(
        "tool_choice.tools[1].name",
        tools=[FUNCTION],
        tool_choice={
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [FUNCTION, {"type": "function", "name": "g"}],
        },
    ),
    invalid("text.format.type", text={"format": {"type": "xml"}}),
    invalid("reasoning.effort", reasoning={"effort": "a little"}),
    invalid("reasoning.mode", "unsupported", reasoning={"mode": "pro"}),
    invalid("truncation", truncation="sometimes"),
    invalid("messages", "unsupported", messages=[{"role": "user", "content": "a"}]),
    invalid("max_tokens", "unsupported", max_tokens=5),
    invalid("n", "unsupported", n=2),
    invalid("input", "context_length_exceeded", input="a " * 9000),
]
OF_GENERATE: list[tuple[dict[str, Any], str, str]] = [
    invalid("token_ids", "empty_prompt", token_ids=None),
    invalid("token_ids", "empty_prompt", token_ids=[]),
    invalid("request_id", request_id="r" * 257),
    invalid("request_id", request_id=7),
    invalid("token_ids[1]", token_ids=[1, "a"]),
    invalid("token_ids", token_ids="a"),
    invalid("token_ids", "context_length_exceeded", token_ids=[7] * 9000),
    invalid("sampling_params", sampling_params=[]),
    invalid("sampling_params.n", "invalid_n", sampling_params={"n": 0}),
    invalid("sampling_params.n", "too_many_prompts", sampling_params={"n": 10**6}),
    invalid("sampling_params.top_p", sampling_params={"top_p": "1"}),
    invalid("sampling_params.topp", "unsupported", sampling_params={"topp": 1}),
    invalid("sampling_params.bad_words", "unsupported", sampling_params={"bad_words": ["x"]}),
    invalid(
        "sampling_params.structured_outputs.json",
        sampling_params={"structured_outputs": {"json": 3}},
    ),
    invalid("sampling_params.prompt_logprobs", sampling_params={"prompt_logprobs": 1}, stream=True),
    invalid("features", "unsupported", features={"mm_hashes": {"audio": ["a"]}}),
    invalid("features", features={"mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}),
    invalid(
        "features.kwargs_data.image[0]",
        "unsupported",
        features={
            "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
            "kwargs_data": {"image": ["gqRmaWVsZA=="]},
        },
    ),
    invalid(
        "content_parts[0]", "unsupported", content_parts=[{"type": "audio_url", "url": "data:,"}]
    ),
    invalid("output_mode", "unsupported", output_mode="text"),
    invalid("kv_transfer_params", "unsupported", kv_transfer_params={"a": 1}),
    invalid("temperature", "unsupported", temperature=0.5),
    invalid("model", "model_not_found", model="other"),
]
CASES = {
    COMPLETIONS: ({"prompt": "a"}, BOTH + OF_COMPLETIONS),
    CHAT: ({"messages": HELLO}, BOTH + OF_CHATS),
    "/v1/responses": ({"input": "a"}, OF_RESPONSES),
    GENERATE: ({"token_ids": [5]}, OF_GENERATE),
}


# How the model calls tools and reasons is unknown.
SETTINGS = {"gateway.message_format": "off"}


@pytest.mark.parametrize("path", CASES)
async def test_a_field_that_can_not_be_obeyed(http: Client, path: str) -> None:
    body, cases = CASES[path]
    for fields, code, param in cases:
        answer = await http.post(path, json=body | fields)
        status = 404 if code == "model_not_found" else 400
        assert refusal(answer, status) == (code, param), fields
    assert not http.engine.requests


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
    http: Client, path: str, body: dict[str, Any], param: str
) -> None:
    assert refusal(await http.post(path, json=body))[1] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/responses", {"input": "a"}, "invalid_max_tokens", "max_output_tokens"),
        ("/v1/responses", {"input": "a"}, "invalid_logprobs", "top_logprobs"),
        (GENERATE, {"token_ids": [5]}, "invalid_top_p", "sampling_params.top_p"),
        (GENERATE, {"token_ids": [5]}, "invalid_cache_salt", "cache_salt"),
        (GENERATE, {"token_ids": [5]}, "invalid_token_ids", "token_ids"),
    ],
)
async def test_engine_errors_name_the_field_as_sent(
    http: Client, path: str, body: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    http.engine.outputs = refused(code)
    answer = await http.post(path, json=body | {"stream": stream})
    assert refusal(answer) == (code, param)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"prompt": "a"}, "prompt is of /v1/completions; give messages, or call that"),
        (COMPLETIONS, {"messages": HELLO}, "messages is of /v1/chat/completions; call that"),
        (CHAT, {"messages": HELLO, "tools": [{"name": "x"}]}, "tools[0].type is missing; write {"),
        ("/v1", {}, "GET /v1/models lists"),
        ("/v1/moderations", {"input": "a"}, "not offered here; docs/openai.md lists what is"),
        ("/v1/images/generations", {"prompt": "a"}, "not offered here"),
        ("/chat/completions", {}, "did you mean '/v1/chat/completions'?"),
        ("/v1/chat/completion", {}, "did you mean '/v1/chat/completions'?"),
    ],
)
async def test_a_call_in_another_form_or_place_names_the_right_one(
    http: Client, path: str, body: dict[str, Any], said: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"].replace("`", "")


async def test_no_far_path_is_suggested(http: Client) -> None:
    answer = await http.post("/v1/something/else", json={})
    assert answer.json()["error"]["message"] == "there is nothing at '/v1/something/else'"
