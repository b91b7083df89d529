"""Tools and reasoning of chats: what is asked of the engine, and what is told of its answer."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from httpx import AsyncClient
from msgspec.structs import replace

from nano_inference.config import Config
from nano_inference.gateway.serving import prepared
from nano_inference.telemetry.instruments import TOOL_CALLS
from nano_inference.text.messages import constraint_of

from ...errors import invalid
from ...fake import Client, FakeEngine, app_of, http_of, refused
from ...recorded import Recorded
from ...saying import Model
from .test_refusals import refusal

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "How is it in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASKED: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER]}
KEY = {"Idempotency-Key": "a", "X-Tenant": "t"}
TOLD = '{"type": "function", "function": {"name": "weather"'


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NOTE: dict[str, Any] = {"type": "custom", "custom": {"name": "note", "description": "Keeps it."}}


def noted(grammar: dict[str, Any]) -> dict[str, Any]:
    return NOTE | {"custom": NOTE["custom"] | {"format": {"type": "grammar", "grammar": grammar}}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


async def posted(http: AsyncClient, **fields: Any) -> dict[str, Any]:
    """The only choice of an answer."""
    answer = await http.post(PATH, json={"messages": HELLO} | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def grammar_of(model: Model) -> str:
    """The constraint of the last message; empty for none."""
    found = model.constraint
    return "" if found is None else found.lark or json.dumps(found.json_schema)


# --- what a model is told of, and kept to --------------------------------------------------------


async def test_auto_shows_tools_without_a_constraint(http: Client, model: Model) -> None:
    model.says(CALL)
    choice = await posted(http, tools=[WEATHER, TIME])
    assert TOLD in model.prompt()
    assert grammar_of(model) == ""
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_none_are_shown_and_no_calls_parsed(
    http: Client, model: Model, fields: dict[str, Any]
) -> None:
    model.says(CALL)
    choice = await posted(http, **fields)
    assert TOLD not in model.prompt()
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize(
    ("fields", "has", "lacks"),
    [
        ({"tool_choice": "required"}, ("weather", "time"), ()),
        ({"tool_choice": named("time")}, ("time",), ("weather",)),
        ({"tool_choice": allowed("required", "weather")}, ("weather",), ("time",)),
        ({"parallel_tool_calls": False}, ("weather", "time"), ()),
        ({"response_format": {"type": "json_object"}}, ("weather", "time"), ()),
        ({"tool_choice": "none", "response_format": {"type": "json_object"}}, (), ("weather",)),
    ],
)
async def test_choices_and_formats_are_grammars(
    http: Client, model: Model, fields: dict[str, Any], has: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    model.says(CALL)
    await posted(http, tools=[WEATHER, TIME], **fields)
    constraint = model.constraint
    assert constraint is not None
    grammar = grammar_of(model)
    assert all(name in grammar for name in has)
    assert not any(name in grammar for name in lacks)


async def test_strict_arguments_are_a_grammar(http: Client, model: Model) -> None:
    model.says(CALL)
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    await posted(http, tools=[strict])
    assert "city" in grammar_of(model)


async def test_the_prompt_has_only_allowed_tools(http: Client, model: Model) -> None:
    model.says(CALL)
    await posted(http, tools=[WEATHER, TIME], tool_choice=allowed("auto", "weather"))
    prompt = model.prompt()
    assert TOLD in prompt
    assert '"time"' not in prompt


TOOL_REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    invalid("tools[0].type", tools=[{}]),
    invalid("tools[1].type", "unsupported", tools=[WEATHER, {"type": "shell"}]),
    invalid("tools[0]", tools=[{"type": "custom"}]),
    invalid(
        "tools[0].custom.format.grammar.definition",
        "invalid_constraint",
        tools=[noted({"syntax": "regex", "definition": "("})],
    ),
    invalid("tools[0]", tools=[{"type": "function"}]),
    invalid("tools[0].function", tools=[{"type": "function", "function": {}}]),
    invalid("tools[0].function.name", tools=[named("a b")]),
    invalid("tools[0].function.name", tools=[named("")]),
    invalid("tools[0].function.name", tools=[named("n" * 129)]),
    invalid("tools[2].function.name", tools=[TIME, WEATHER, TIME]),
    invalid(
        "tools[0].function.parameters.type",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
    ),
    invalid("tools[0].function.parameters", tools=[deep(300)]),
    invalid("tool_choice", tools=[TIME], tool_choice="any"),
    invalid("tool_choice", tools=[TIME], tool_choice={"type": "mcp"}),
    invalid("tool_choice.function.name", tools=[TIME], tool_choice=named("weather")),
    invalid(
        "tool_choice.allowed_tools.tools[1].function.name",
        tools=[TIME],
        tool_choice=allowed("auto", "time", "weather"),
    ),
    invalid("tool_choice", tools=[TIME], tool_choice=allowed("required")),
    invalid("tool_choice", tool_choice="required"),
    invalid("parallel_tool_calls", parallel_tool_calls="no"),
    invalid(
        "ignore_eos", "invalid_constraint", tools=[TIME], tool_choice="required", ignore_eos=True
    ),
    invalid(
        "min_tokens", "invalid_constraint", tools=[TIME], tool_choice=named("time"), min_tokens=3
    ),
    invalid(
        "chat_template_kwargs.enable_thinking",
        reasoning_effort="none",
        chat_template_kwargs={"enable_thinking": True},
    ),
]


async def test_invalid_tools_are_refused_by_field(http: Client) -> None:
    for fields, code, param in TOOL_REFUSALS:
        answer = await http.post(PATH, json={"messages": HELLO} | fields)
        assert refusal(answer) == (code, param), fields
    assert not http.engine.requests


async def test_a_refused_grammar_of_tools_names_tools(http: Client) -> None:
    http.engine.outputs = refused("invalid_constraint")
    body = {"messages": HELLO, "tools": [TIME], "tool_choice": "required"}
    assert refusal(await http.post(PATH, json=body)) == ("invalid_constraint", "tools")


async def test_a_grammar_is_made_beside_the_event_loop(
    http: Client, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of megabytes takes seconds, before it is known that it is too large."""
    threads: list[threading.Thread] = []

    def grammar(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread())
        return constraint_of(*given, **named)

    monkeypatch.setattr(prepared, "constraint_of", grammar)
    model.says(CALL)
    await posted(http, tools=[TIME, WEATHER], structured_outputs={"grammar": 'root ::= "a"'})
    assert threads
    assert threading.current_thread() not in threads


async def test_an_unknown_message_format_refuses_tools_and_turns_no_reasoning_on(
    engine: FakeEngine, calling: Config
) -> None:
    config = replace(calling, gateway=replace(calling.gateway, message_format="off"))
    async with http_of(app_of(engine, config)) as http:
        answer = await http.post(PATH, json={"messages": HELLO, "tools": [TIME]})
        assert refusal(answer) == ("unsupported", "tools")
        assert "gateway.message_format" in answer.json()["error"]["message"]
        answer = await http.post(PATH, json={"messages": HELLO, "reasoning_effort": "low"})
        assert (answer.status_code, answer.headers["X-Ignored-Fields"]) == (200, "reasoning_effort")
        prompts = {request.prompt_token_ids for request in engine.requests}
        await http.post(PATH, json={"messages": HELLO})
        assert prompts == {engine.requests[-1].prompt_token_ids}


# --- reasoning ------------------------------------------------------------------------------------

THOUGHT = "<think>\nIt is north.\n</think>\n\nCold."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, {"content": "Cold.", "reasoning_content": "It is north."}),
        ({"include_reasoning": False}, {"content": "Cold."}),
        ({"separate_reasoning": False}, {"content": THOUGHT, "reasoning_content": None}),
    ],
)
async def test_reasoning_is_separate_by_default(
    http: Client, model: Model, fields: dict[str, Any], message: dict[str, Any]
) -> None:
    model.says(THOUGHT)
    found = (await posted(http, **fields))["message"]
    assert found == {"role": "assistant", "refusal": None} | message


async def test_enable_thinking_false_leaves_no_reasoning_open(http: Client, model: Model) -> None:
    """The template closes it in the prompt; others wait for its end for ever (dynamo 8636)."""
    model.says("Cold." + CALL)
    off = {"chat_template_kwargs": {"enable_thinking": False}, "tools": [WEATHER]}
    message = (await posted(http, **off))["message"]
    assert model.prompt().endswith("</think>\n\n")
    assert message["reasoning_content"] is None
    assert (message["content"], len(message["tool_calls"])) == ("Cold.", 1)


@pytest.mark.parametrize(
    ("effort", "begins"), [("none", False), ("low", True), ("high", True), (None, False)]
)
async def test_effort_turns_the_template_s_switch(
    http: Client, model: Model, effort: str | None, begins: bool
) -> None:
    model.says("It is north.\n</think>\n\nCold." if begins else "Cold.")
    message = (await posted(http, reasoning_effort=effort))["message"]
    assert model.prompt().endswith("<think>\n") is begins
    assert message["content"] == "Cold."
    assert message["reasoning_content"] == ("It is north." if begins else None)


async def test_a_budget_is_a_grammar(http: Client, model: Model) -> None:
    model.says(THOUGHT)
    await posted(http, thinking_token_budget=7)
    assert "7" in grammar_of(model)
    await posted(http)
    assert grammar_of(model) == ""


async def test_the_field_of_reasoning_is_a_setting(calling: Config, model: Model) -> None:
    model.says(THOUGHT)
    config = replace(calling, gateway=replace(calling.gateway, reasoning_field="reasoning"))
    async with http_of(app_of(model.engine, config)) as http:
        message = (await posted(http))["message"]
    assert message["reasoning"] == "It is north."
    assert "reasoning_content" not in message


# --- messages that are handed back ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_a_message_handed_back_has_the_same_tokens(
    http: Client, model: Model, name: str
) -> None:
    """Its reasoning by either name; a rename lost it (vLLM 50624)."""
    function = {"name": "weather", "arguments": '{"city": "Oslo"}', "parsed_arguments": {"city": 1}}
    turn = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "parsed": {"a": 1},
        name: "I look.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function, "index": 0}],
    }
    told = [{"type": "text", "text": "cold"}, {"type": "text", "text": "wet"}]
    tool = {"role": "tool", "tool_call_id": "call_1", "content": told}
    await posted(http, messages=[*HELLO, turn, tool], tools=[WEATHER])
    written = (
        "<|im_start|>assistant\n<think>\nI look.\n</think>\n\n\n" + CALL + "<|im_end|>\n"
        "<|im_start|>tool\ncold\nwet<|im_end|>\n"
    )
    assert written in model.prompt()


async def test_a_turn_that_was_cut_off_in_its_reasoning_comes_back(
    http: Client, model: Model
) -> None:
    turn = {"role": "assistant", "content": None, "reasoning_content": "I"}
    await posted(http, messages=[*HELLO, turn, *HELLO])
    assert "<think>\nI\n</think>" in model.prompt()


async def test_tokenize_counts_a_prompt_s_tokens(http: Client, model: Model) -> None:
    model.says(CALL)
    fields = {"messages": HELLO, "tools": [WEATHER], "reasoning_effort": "low"}
    tokens = (await http.post("/tokenize", json=fields)).json()["tokens"]
    await posted(http, **fields)
    assert tuple(tokens) == model.requests[-1].prompt_token_ids
    answer = await http.post("/tokenize", json={"messages": HELLO, "tools": [TIME, TIME]})
    assert refusal(answer) == ("invalid_request", "tools[1].function.name")


# --- calls that survive ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_with_a_key_is_the_same_at_another_gateway(
    http: Client, other: Client, model: Model, stream: bool
) -> None:
    model.says(THOUGHT + CALL)
    body = ASKED | {"stream": stream}
    first, again = [await each.post(PATH, json=body, headers=KEY) for each in (http, other)]
    assert '"finish_reason":"tool_calls"' in first.text
    assert again.text == first.text
    assert len(model.requests) == 1


async def test_calls_are_counted(calling: Config, model: Model) -> None:
    recorded = Recorded()
    model.says(THOUGHT + CALL)
    async with http_of(app_of(model.engine, calling, recorded.measures)) as http:
        for number, stream in enumerate((False, True), 1):
            answer = await http.post(PATH, json=ASKED | {"stream": stream})
            assert answer.status_code == 200
            assert recorded.values(TOOL_CALLS) == {("made",): number, ("malformed",): 0}


async def test_a_custom_tool_of_a_chat_takes_a_text(http: Client, model: Model) -> None:
    body = {"messages": HELLO, "tools": [NOTE, WEATHER]}
    model.says('<tool_call>\n{"name": "note", "arguments": {"input": "a\\nb"}}\n</tool_call>')
    message = (await posted(http, **body))["message"]
    (call,) = message["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "custom",
        "custom": {"name": "note", "input": "a\nb"},
    }
    streamed = await http.post(PATH, json=body | {"stream": True})
    assert '"custom":{"name":"note","input":"a\\nb"}' in streamed.text
    # Handed back, it is a function's.
    result = {"role": "tool", "tool_call_id": call["id"], "content": "kept"}
    await posted(http, messages=[*HELLO, message, result], tools=[NOTE])
    assert '{"name": "note", "arguments": {"input": "a\\nb"}}' in model.prompt()


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "note"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "custom"} | NOTE]},
        },
    ],
)
async def test_a_custom_tool_can_be_chosen_and_its_grammars_are_enforced(
    http: Client, model: Model, choice: dict[str, Any]
) -> None:
    model.says("no")
    for grammar, mark in (
        ({"syntax": "lark", "definition": 'start: "x"'}, 'start: ("x")'),
        ({"syntax": "regex", "definition": "[0-9]+"}, "^(?:[0-9]+)$"),
    ):
        await posted(http, tools=[noted(grammar), WEATHER], tool_choice=choice)
        assert mark in grammar_of(model)
        assert "weather" not in grammar_of(model)


@pytest.mark.parametrize(
    ("fields", "opened"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER], "tool_choice": "required"}])
async def test_a_constraint_allows_reasoning_only_on_request(
    http: Client, model: Model, fields: dict[str, Any], opened: bool, tools: dict[str, Any]
) -> None:
    model.says("{}")
    wanted = tools or {"response_format": {"type": "json_object"}}
    await posted(http, **wanted, **fields)
    assert ("think" in grammar_of(model)) is opened
