"""`/v1/responses`: what is answered, told in a stream, kept, and refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ...errors import invalid
from ...fake import Client, completion, poster
from ...made import TEXTS, told
from .test_refusals import refusal

PATH = "/v1/responses"
TEXT = "".join(TEXTS)


# The engine makes up texts, of which its tokens know nothing.
SETTINGS = {"gateway.message_format": "off"}

posted = poster(PATH, {"input": "hello"})


async def test_an_answer_has_openai_s_fields(http: Client) -> None:
    answer = await posted(http, instructions="Be brief.", metadata={"a": "b"})
    (request,) = http.engine.requests
    assert answer["id"] == request.request_id
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 4 + 3
    assert (answer["instructions"], answer["metadata"]) == ("Be brief.", {"a": "b"})


async def test_the_prompt_equals_a_chat_s(http: Client) -> None:
    answer = (await posted(http))["output"]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "developer", "content": "c"},
        {"type": "message", "role": "user", "content": parts},
        *answer,
        {"role": "user", "content": "d"},
    ]
    await posted(http, instructions="Be brief.", input=items)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "c"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "d"},
    ]
    await http.post("/v1/chat/completions", json={"messages": messages})
    assert http.engine.requests[1].prompt_token_ids == http.engine.requests[2].prompt_token_ids


async def test_the_finish_reason_sets_the_status(http: Client) -> None:
    http.engine.outputs = lambda request: [completion(request)]
    answer = await posted(http)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    http.engine.outputs = lambda request: [
        completion(request, told(request, 0, "abort"), status="cancelled")
    ]
    assert (await posted(http))["status"] == "cancelled"


IMAGE = {"type": "input_image", "image_url": "http://example.org/a.png"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}
FUNCTION = {"type": "function", "name": "f"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    invalid("input", input=None),
    invalid("input", input=[]),
    invalid("input", input=5),
    invalid("input[0]", "unsupported", input=[{"type": "item_reference", "id": "a"}]),
    invalid("input[0]", "unsupported", input=[{"type": "web_search_call", "id": "a"}]),
    invalid("input[0]", input=[{"type": "function_call", "name": "f"}]),
    invalid("input[0].arguments", input=[CALL | {"arguments": "{"}]),
    invalid("input[0].arguments", input=[CALL | {"arguments": "[]"}]),
    invalid("input[0].namespace", "unsupported", input=[CALL | {"namespace": "a"}]),
    invalid("input[0].call_id", input=[OUTPUT, CALL]),
    invalid("input[0].output", input=[OUTPUT | {"output": 5}]),
    invalid("input[0].output[0]", "unsupported", input=[OUTPUT | {"output": [IMAGE]}]),
    invalid("input[0].content", input=[{"type": "reasoning", "content": "a"}]),
    invalid("input[0].content[0]", "unsupported", input=[{"role": "user", "content": [IMAGE]}]),
    invalid("input[0].role", input=[{"role": "wizard", "content": "a"}]),
    invalid("input[0].x", "unsupported", input=[{"role": "user", "content": "a", "x": 1}]),
    invalid("instructions", instructions=5),
    invalid("include[0]", "unsupported", include=["file_search_call.results"]),
    invalid("top_logprobs", top_logprobs=3),
    invalid("metadata[...]", metadata={"a": 1}),
    invalid("metadata", metadata={str(key): "" for key in range(17)}),
    invalid("background", background=True, store=False),
    invalid("background_options", "unsupported", background_options={"completion_window": "2h"}),
    invalid("previous_response_id", "previous_response_not_found", previous_response_id="resp_1"),
    invalid("conversation", "unsupported", conversation="conv_1"),
    invalid("prompt", "unsupported", prompt={"id": "a"}),
    invalid("tools[0]", "unsupported", tools=[{"type": "web_search"}]),
    invalid("tools[0]", tools=[{"type": "function"}]),
    invalid("tools[0].name", tools=[{"type": "function", "name": "a b"}]),
    invalid("tools[1].name", tools=[FUNCTION, FUNCTION]),
    invalid("tools[0].parameters", tools=[FUNCTION | {"parameters": []}]),
    invalid("tool_choice", tool_choice="sometimes"),
    invalid("tool_choice", tool_choice="required"),
    invalid("tool_choice", "unsupported", tool_choice={"type": "web_search"}),
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
    invalid("text.verbosity", "unsupported", text={"verbosity": "low"}),
    invalid("reasoning.effort", "unsupported", reasoning={"effort": "low"}),
    invalid("reasoning.effort", reasoning={"effort": "a little"}),
    invalid("reasoning.mode", "unsupported", reasoning={"mode": "pro"}),
    invalid("truncation", "unsupported", truncation="auto"),
    invalid("messages", "unsupported", messages=[{"role": "user", "content": "a"}]),
    invalid("max_tokens", "unsupported", max_tokens=5),
    invalid("n", "unsupported", n=2),
    invalid("input", "context_length_exceeded", input="a " * 9000),
]


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED)
async def test_unsupported_fields_are_refused_by_name(
    http: Client, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = await http.post(PATH, json={"input": "a"} | fields)
    assert refusal(answer) == (code, param)
    assert not http.engine.requests


async def test_fields_that_ask_for_nothing_are_accepted(http: Client) -> None:
    await posted(
        http,
        tools=[],
        tool_choice="auto",
        text={"format": {"type": "text"}},
        truncation="disabled",
        include=["reasoning.encrypted_content"],
        background=False,
        parallel_tool_calls=True,
        service_tier="auto",
        user="u",
        reasoning=None,
    )
    assert http.engine.requests[0].sampling.max_tokens == 2048
