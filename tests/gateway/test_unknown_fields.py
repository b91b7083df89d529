"""A field that nothing here knows is named, at every depth of every interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .fake import Client

Path = tuple[str | int, ...]
Body = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
HELLO = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"mode": "auto", "tools": [NAMED]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TALK = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]
OLLAMA_CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
}
FLAT = {"type": "function", **FUNCTION}
FLAT_NAMED = {"type": "function", "name": "f"}
TEXT = [{"type": "text", "text": "x"}]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": TEXT},
]
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
BLOCKS = [
    {"role": "user", "content": TEXT},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXT}]},
]
INPUT = {"name": "f", "input_schema": SCHEMA}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"], "parameters": {}}
NESTED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}

OPEN = {"schema", "parameters", "input_schema", "input", "arguments", "caller"}
"""Fields whose objects may have any fields: schemas, arguments, and what is neutral as a whole."""

MAY_BE_OPEN = {"messages", "input", "tools", "tool_choice", "prediction", "system"}
"""Fields within which unknown fields may be neutral."""

BODIES: dict[str, list[Body]] = {
    "/v1/completions": [
        {
            "prompt": "a",
            "response_format": NESTED,
            "prediction": {"type": "content", "content": TEXT},
        },
        {"prompt": "a", "response_format": {"type": "text"}},
        {"prompt": "a", "structured_outputs": {"choice": ["a"]}},
        {"prompt": "a", "response_format": {"type": "grammar", "grammar": 'root ::= "a"'}},
    ],
    "/v1/chat/completions": [
        {"messages": HELLO, "response_format": {"type": "json_object", "schema": SCHEMA}},
        {"messages": TALK, "tools": [TOOL], "tool_choice": NAMED},
        {
            "messages": HELLO,
            "tools": [TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
        },
    ],
    "/v1/responses": [
        {"input": ITEMS, "tools": [FLAT], "reasoning": {"summary": "auto"}},
        {"input": "a", "tools": [FLAT], "tool_choice": FLAT_NAMED},
        {
            "input": "a",
            "tools": [FLAT],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT_NAMED]},
        },
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"input": "a", "text": {"format": {"type": "json_object"}}},
        {"input": "a", "stream_options": {"include_obfuscation": False}},
    ],
    "/v1/messages": [
        {
            "messages": BLOCKS,
            "system": TEXT,
            "max_tokens": 3,
            "tools": [INPUT],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
        },
        {
            "messages": HELLO,
            "max_tokens": 3,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ],
    "/v1/messages/count_tokens": [{"messages": HELLO, "tools": [INPUT]}],
    "/generate": [{"text": "a", "sampling_params": {"max_new_tokens": 3}}],
    "/continue_generation": [{"torch_empty_cache": True}],
    "/inference/v1/generate": [
        {"token_ids": [5], "sampling_params": {"structured_outputs": {"choice": ["a"]}}}
    ],
    "/api/chat": [
        {
            "messages": [HELLO[0], OLLAMA_CALL, {"role": "tool", "content": "x"}],
            "tools": [TOOL],
            "options": {"num_predict": 3},
        },
        {"messages": HELLO, "format": "json"},
    ],
    "/api/generate": [{"prompt": "a", "options": {"num_predict": 3}}],
    "/api/embed": [{"input": ["a"]}],
    "/tokenize": [{"messages": HELLO, "tools": [TOOL]}],
    "/v2/models/tiny/generate": [
        {"text_input": "a", "sampling_parameters": {"max_tokens": 3}},
        {"text_input": "a", "max_tokens": 3},
    ],
    "/v2/models/tiny/infer": [
        {"inputs": [TENSOR], "outputs": [{"name": "text_output"}], "id": "x"}
    ],
    "/v2/repository/index": [{"ready": True}],
}
CALLS = [(path, body) for path, bodies in BODIES.items() for body in bodies]


SETTINGS: Body = {}


def objects_of(value: Any, place: Path = ()) -> Iterator[Path]:
    """Yield the paths of the objects in a body that have fields of ours."""
    if isinstance(value, dict):
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in inner:
        # The parameters of a tensor are fields, and none is given here.
        is_open = isinstance(each, dict) and name in OPEN and each
        if isinstance(each, dict | list) and not is_open:
            yield from objects_of(each, (*place, name))


def with_field(body: Body, place: Path, value: Any) -> Body:
    """A body that has a field more in one of its objects."""
    # A deep copy would share an object that stands in several places.
    changed: Body = json.loads(json.dumps(body))
    inner: Any = changed
    for name in place:
        inner = inner[name]
    inner["bogus"] = value
    return changed


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_an_unknown_field_is_named_at_every_depth(
    http: Client, path: str, body: Body
) -> None:
    """It is refused, except within messages, their parts, items and tools, where it is neutral."""
    for place in objects_of(body):
        answer = await http.post(path, json=with_field(body, place, 1))
        refused = answer.status_code == 400
        assert refused or (answer.status_code == 200 and set(place) & MAY_BE_OPEN), answer.text
        assert "bogus" in (answer.text if refused else answer.headers["X-Ignored-Fields"]), place
        if refused:
            assert not http.engine.requests
        http.engine.requests.clear()


@pytest.mark.parametrize(
    ("path", "body"), [each for each in CALLS if not each[0].startswith(("/v2", "/generate"))]
)
async def test_an_unknown_field_with_a_default_value_is_accepted(
    http: Client, path: str, body: Body
) -> None:
    for place in objects_of(body):
        answer = await http.post(path, json=with_field(body, place, None))
        assert answer.status_code == 200, (place, answer.text)


MARK = {"cache_control": {"type": "ephemeral"}}
MADE_CALL = {
    "id": "c",
    "type": None,
    "index": 1,
    "extra_content": {"google": {"thought_signature": "x"}},
    "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
}
MADE_TEXT = {
    "type": "output_text",
    "text": "a",
    "annotations": [{"type": "url_citation"}],
    "logprobs": [{"token": "a"}],
    "id": "m",
    "index": 1,
}
MADE_ITEM = ITEMS[2] | {"id": "f", "status": "completed", "caller": {"type": "direct"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        # LiteLLM leaves these marks to servers other than OpenAI's.
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": [{"type": "text", "text": "a"} | MARK]},
                    {"role": "user", "content": "a"} | MARK,
                ],
                "tools": [TOOL | MARK | {"function": FUNCTION | MARK}],
            },
        ),
        # Calls as openai-python's parse(), streams put together and Vercel's ai hand them back.
        (
            "/v1/chat/completions",
            {
                "messages": [
                    HELLO[0],
                    {
                        "role": "assistant",
                        "content": None,
                        "parsed": {"a": 1},
                        "tool_calls": [MADE_CALL],
                    },
                    TALK[2],
                ]
            },
        ),
        # Answers as LangChain and the Agents SDK hand them back.
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "assistant", "phase": "final_answer", "content": [MADE_TEXT]},
                    MADE_ITEM,
                    ITEMS[3],
                ],
                "tools": [FLAT | {"allowed_callers": ["direct"], "defer_loading": False}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT]},
            },
        ),
    ],
)
async def test_fields_of_client_libraries_are_accepted(http: Client, path: str, body: Body) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
