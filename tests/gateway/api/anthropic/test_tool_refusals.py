"""Unsupported settings of tools and thinking are refused with their position in the body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nano_inference.config import Config

from ...errors import invalid
from ...fake import Client, refused
from ...saying import calling_model
from .calling import TIME, WEATHER
from .test_messages import BAD, refusal

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: dict[str, Any] = {"role": "user", "content": "Hm?"}
ASKED: dict[str, Any] = {"max_tokens": 90, "messages": [USER], "tools": [WEATHER, TIME]}
USE: dict[str, Any] = {"type": "tool_use", "id": "a", "name": "time", "input": {}}
CALLED: dict[str, Any] = {"role": "assistant", "content": [USE]}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a"}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    found = calling_model(tmp_path)
    gateway = msgspec.structs.replace(found.gateway, message_format="auto")
    return msgspec.structs.replace(found, gateway=gateway)


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool(**changed: Any) -> dict[str, Any]:
    return {"tools": [TIME, WEATHER | changed]}


def thinking(**fields: Any) -> dict[str, Any]:
    return {"thinking": fields}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.org/a.png"}}
NO_SCHEMA = {"name": "f"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    invalid("tools[0]", tools=[NO_SCHEMA]),
    invalid("tools[2].name", tools=[WEATHER, TIME, WEATHER]),
    invalid("tools[1].name", **tool(name="")),
    invalid("tools[1].name", **tool(name="a b")),
    invalid("tools[1].name", **tool(name="a" * 129)),
    invalid("tools[1].input_schema.type", **tool(input_schema={"type": "string"})),
    invalid("tools[1]", "unsupported", **tool(type="browser_toolset_20260801")),
    invalid("tool_choice", tools=[SEARCH], tool_choice={"type": "any"}),
    invalid(
        "tool_choice.name",
        "unsupported",
        tools=[TIME, SEARCH],
        tool_choice={"type": "tool", "name": "web_search"},
    ),
    invalid(
        "tools[1].allowed_callers",
        "unsupported",
        **tool(allowed_callers=["code_execution_20250825"]),
    ),
    invalid("tool_choice.type", tool_choice={"type": "some"}),
    invalid("tool_choice.name", tool_choice={"type": "tool"}),
    invalid("tool_choice.name", tool_choice={"type": "tool", "name": "moon"}),
    invalid("tool_choice", tool_choice={"type": "any"}, tools=[]),
    invalid("thinking.type", **thinking(type="between_tools")),
    invalid("thinking.budget_tokens", **thinking(type="enabled")),
    invalid("thinking.budget_tokens", **thinking(type="enabled", budget_tokens=0)),
    invalid("thinking.budget_tokens", **thinking(type="adaptive", budget_tokens=9)),
    invalid(
        "chat_template_kwargs.enable_thinking",
        **thinking(type="adaptive"),
        chat_template_kwargs={"enable_thinking": False},
    ),
    invalid(
        "thinking",
        **thinking(type="enabled", budget_tokens=9),
        messages=[USER, {"role": "assistant", "content": "So"}],
    ),
    invalid("output_config.effort", output_config={"effort": "some"}),
    invalid("output_config.x", "unsupported", output_config={"task_budget": {}, "x": 1}),
    invalid(
        "output_config.task_budget", "unsupported", output_config={"task_budget": {"total": 1}}
    ),
    invalid("messages[1].content[0]", messages=[USER, CALLED]),
    invalid("messages[1].content[0]", messages=[USER, CALLED, USER]),
    invalid("messages[1].content[1].id", messages=[USER, assistant(USE, USE), user(RESULT)]),
    invalid("messages[0].content[0].tool_use_id", messages=[user(RESULT)]),
    invalid(
        "messages[3].content[0].tool_use_id", messages=[USER, CALLED, user(RESULT), user(RESULT)]
    ),
    invalid(
        "messages[2].content[0].content[0].source.url",
        "images_not_supported",
        messages=[USER, CALLED, user(RESULT | {"content": [IMAGE]})],
    ),
    invalid("messages[0].content[0]", messages=[user(USE)]),
    invalid("messages[1].content[0].input", messages=[USER, assistant(USE | {"input": "x"})]),
]


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_refusals_name_the_path(http: Client, path: str) -> None:
    for fields, code, param in REFUSED:
        body = ASKED | fields
        if path == COUNT:
            del body["max_tokens"]
        assert refusal(await http.post(path, json=body)) == (BAD, code, param), fields
    assert not http.engine.requests


async def test_a_budget_is_less_than_all_tokens(http: Client) -> None:
    fields = thinking(type="enabled", budget_tokens=90)
    answer = await http.post(PATH, json=ASKED | fields)
    assert answer.json()["error"]["param"] == "thinking.budget_tokens"
    assert (await http.post(PATH, json=ASKED | fields | {"max_tokens": 91})).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        tool(cache_control={"type": "ephemeral"}, eager_input_streaming=True, type="custom"),
        tool(allowed_callers=["direct"], defer_loading=False, input_examples=None),
        {"tool_choice": {"type": "auto"}, "tools": []},
        {"tool_choice": {"type": "none"}, "tools": []},
        thinking(type="disabled") | {"chat_template_kwargs": {"enable_thinking": False}},
        # Results may come in several messages.
        {"messages": [USER, CALLED, user(RESULT), USER]},
        {
            "messages": [
                USER,
                assistant(USE | {"caller": {"type": "direct"}}),
                user(RESULT),
                assistant(
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "So"},
                ),
            ]
        },
    ],
)
async def test_known_fields_are_accepted(http: Client, fields: dict[str, Any]) -> None:
    answer = await http.post(PATH, json=ASKED | fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("tools", "param"), [([TIME], "tools"), ([], None)])
async def test_a_constraint_that_can_not_be_kept_is_of_tools_where_there_are_any(
    http: Client, tools: list[Any], param: str | None, stream: bool
) -> None:
    http.engine.outputs = refused("invalid_constraint")
    answer = await http.post(PATH, json=ASKED | {"tools": tools, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_constraint", param)


async def test_an_unknown_message_format_refuses_tools_and_thinking(
    http: Client, config: Config
) -> None:
    template = "{{ messages[0].content }}{{ tools }}{{ enable_thinking }}"
    folder = config.engine.model_folder
    (folder / "chat_template.jinja").write_text(template)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("response_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    plain = {"max_tokens": 90, "messages": [USER]}
    enabled = thinking(type="enabled", budget_tokens=9)
    for fields, param in ((ASKED, "tools"), (enabled, "thinking")):
        error = (await http.post(PATH, json=plain | fields)).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported", param)
        assert "gateway.message_format" in error["message"]
    for fields in (ASKED | {"tool_choice": {"type": "none"}}, thinking(type="disabled")):
        assert (await http.post(PATH, json=plain | fields)).status_code == 200
    adaptive = await http.post(PATH, json=plain | thinking(type="adaptive"))
    assert (adaptive.status_code, adaptive.headers["X-Ignored-Fields"]) == (200, "thinking")


async def test_the_input_of_a_call_may_be_null(http: Client) -> None:
    for use in (USE | {"input": None}, {name: USE[name] for name in USE if name != "input"}):
        called = {"role": "assistant", "content": [use]}
        messages = [USER, called, {"role": "user", "content": [RESULT]}]
        answer = await http.post(COUNT, json={"messages": messages, "tools": [WEATHER, TIME]})
        assert answer.status_code == 200, answer.text
