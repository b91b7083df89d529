"""Histories that programs send back: the model reads the same, in whichever form they come."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import Config

from ...fake import Client
from ...saying import Model

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HEADER = "X-Ignored-Fields"
USER = {"role": "user", "content": "How is it in Oslo?"}
FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": "call_1", "type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}
TEXT = {"type": "text", "text": "Let me see."}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "I have to look.",
    "tool_calls": [CALL],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


async def read(http: Client, model: Model, assistant: dict[str, Any], *more: Any) -> str:
    """Return the prompt of a conversation with a message of the assistant."""
    messages = [USER, assistant, *(more or (RESULT,)), USER]
    answer = await http.post(CHAT, json={"messages": messages, "tools": [TOOL]})
    assert answer.status_code == 200, answer.text
    return model.prompt()


def called(without: str = "", **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in CALLED.items() if name != without} | changed


def thinking(text: Any = "I have to look.", **more: Any) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text} | more


ADDED: dict[str, dict[str, Any]] = {
    "OpenAI's library": {"refusal": None, "annotations": [], "audio": None, "function_call": None},
    "LiteLLM": {"provider_specific_fields": {"refusal": None, "reasoning": "x"}, "images": []},
    "ids": {"id": "msg_1", "name": "", "tool_calls": [CALL | {"index": 0}]},
    "Gemini's": {"tool_calls": [CALL | {"extra_content": {"google": {"thought_signature": "x"}}}]},
    "a cache mark": {"content": [TEXT | {"cache_control": {"type": "ephemeral"}}]},
    "arguments as an object": {
        "tool_calls": [CALL | {"function": FUNCTION | {"arguments": {"city": "Oslo"}}}]
    },
}
REASONING: dict[str, dict[str, Any]] = {
    "vLLM": {"reasoning": "I have to look."},
    "Copilot": {"reasoning_text": "I have to look."},
    "Mistral's parts": {"content": [thinking([TEXT | {"text": "I have to look."}]), TEXT]},
    "Anthropic's parts": {"content": [thinking(signature="x"), TEXT]},
    "LangChain's parts": {"content": [{"type": "reasoning", "reasoning": "I have to look."}, TEXT]},
    "LiteLLM's blocks": {"thinking_blocks": [thinking(signature="x"), {"type": "x", "data": "y"}]},
    "OpenRouter's pieces": {
        "reasoning_details": [
            {"type": "reasoning.text", "text": "I have ", "index": 0, "format": "x"},
            {"type": "reasoning.text", "text": "to look.", "signature": "x"},
            {"type": "reasoning.encrypted", "data": "x"},
        ]
    },
    "several": {"reasoning": "I have to look.", "reasoning_details": [{"text": "another"}]},
}


@pytest.mark.parametrize("name", ADDED)
async def test_additions_to_a_message_do_not_change_the_prompt(
    http: Client, model: Model, name: str
) -> None:
    wanted = await read(http, model, CALLED)
    assert "I have to look." in wanted
    assert await read(http, model, called(**ADDED[name])) == wanted


@pytest.mark.parametrize("name", REASONING)
async def test_reasoning_in_any_form_is_the_template_s(
    http: Client, model: Model, name: str
) -> None:
    wanted = await read(http, model, CALLED)
    assert await read(http, model, called("reasoning_content", **REASONING[name])) == wanted


async def test_a_call_of_the_old_form_is_a_call(http: Client, model: Model) -> None:
    assistant = called("tool_calls", function_call=FUNCTION)
    result = {"role": "function", "name": "weather", "content": "Rain"}
    named = await read(http, model, CALLED, RESULT | {"name": "weather"})
    assert await read(http, model, assistant, result) == named


async def test_a_result_may_be_empty_and_without_an_id(http: Client, model: Model) -> None:
    wanted = await read(http, model, CALLED, RESULT | {"content": ""})
    for changed in ({"content": None}, {"content": [], "tool_call_id": "", "name": ""}):
        assert await read(http, model, CALLED, RESULT | changed) == wanted


async def test_a_response_s_message_may_have_thoughts(http: Client, model: Model) -> None:
    content = [thinking(), {"type": "output_text", "text": "It rains."}]
    given = [USER, {"role": "assistant", "content": content}, USER]
    answer = await http.post(RESPONSES, json={"input": given})
    assert answer.status_code == 200, answer.text
    assert "<think>\nI have to look.\n</think>\n\nIt rains." in model.prompt()


async def test_a_thought_of_a_user_is_refused(http: Client) -> None:
    answer = await http.post(CHAT, json={"messages": [USER | {"content": [thinking()]}]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content[0]")


# --- tools and options ----------------------------------------------------------------------------

FLAT = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


async def test_flat_tools_are_tools(http: Client, model: Model) -> None:
    for choice in ({"type": "function", "name": "weather"}, {"type": "required"}):
        prompts = []
        for tool in (TOOL, FLAT):
            body = {"messages": [USER], "tools": [tool], "tool_choice": choice}
            answer = await http.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            prompts.append(model.prompt())
            assert model.constraint is not None
        assert prompts[0] == prompts[1]


async def test_a_choice_in_an_object_is_that_of_its_type(http: Client, model: Model) -> None:
    prompts = {}
    for kind in ("auto", "none"):
        for choice in (kind, {"type": kind}):
            body = {"messages": [USER], "tools": [TOOL], "tool_choice": choice}
            assert (await http.post(CHAT, json=body)).status_code == 200
            prompts.setdefault(kind, set()).add(model.prompt())
    assert [len(each) for each in prompts.values()] == [1, 1]
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "auto", "x": 1}}
    assert (await http.post(CHAT, json=body)).json()["error"]["param"] == "tool_choice.x"


NEUTRAL: dict[str, Any] = {
    "client_metadata": {"a": "b"},
    "metadata": {"a": "b"},
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "x"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "service_tier": "priority",
    "store": True,
    "stream_options": {"include_usage": True},
    "user": "x",
    "verbosity": "low",
    "web_search_options": {"user_location": None, "search_context_size": "low"},
}
DEFAULTS: dict[str, Any] = {
    "audio": None,
    "function_call": "auto",
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "n": None,
    "parallel_tool_calls": True,
    "seed": None,
    "stop": [],
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
}


async def test_fields_that_change_nothing_are_taken_and_named(http: Client) -> None:
    answer = await http.post(CHAT, json={"messages": [USER]} | NEUTRAL | DEFAULTS)
    assert answer.status_code == 200, answer.text
    assert sorted(answer.headers[HEADER].split(", ")) == sorted(NEUTRAL)


async def test_fields_of_an_extra_body_are_not_lost(http: Client) -> None:
    answer = await http.post(CHAT, json={"messages": [USER], "extra_body": {"top_k": 5}})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", "extra_body")


async def test_both_limits_on_tokens_hold(http: Client, model: Model) -> None:
    for both in ((7, 5), (5, 7), (5, 5), (None, 5)):
        fields = dict(zip(("max_tokens", "max_completion_tokens"), both, strict=True))
        assert (await http.post(CHAT, json={"messages": [USER]} | fields)).status_code == 200
        assert model.requests[-1].sampling.max_tokens == 5


SWITCHES: list[tuple[dict[str, Any], str]] = [
    ({"enable_thinking": True}, "<think>\n"),
    ({"thinking": {"type": "enabled"}}, "<think>\n"),
    ({"reasoning": {"effort": "high"}}, "<think>\n"),
    ({"reasoning": {"enabled": True, "summary": "auto"}}, "<think>\n"),
    ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
    ({"reasoning": {"enabled": False}}, "<think>\n\n</think>\n\n"),
    ({"thinking": {"type": "auto"}}, "assistant\n"),
]


async def test_reasoning_is_switched_by_any_name(http: Client, model: Model) -> None:
    for fields, end in SWITCHES:
        answer = await http.post(CHAT, json={"messages": [USER]} | fields)
        assert answer.status_code == 200, answer.text
        assert model.prompt().endswith(end), fields


async def test_budgets_and_omission_have_several_names(http: Client, model: Model) -> None:
    model.says("<think>\nI have to look.\n</think>\n\nIt rains.")
    constraints = []
    for fields in (
        {"thinking_token_budget": 7},
        {"thinking": {"type": "auto", "budget_tokens": 7}},
        {"reasoning": {"max_tokens": 7, "exclude": True}},
    ):
        answer = await http.post(CHAT, json={"messages": [USER]} | fields)
        assert answer.status_code == 200, answer.text
        constraints.append(model.constraint)
    assert constraints[0] is not None
    assert constraints == constraints[:1] * 3
    assert "reasoning_content" not in answer.json()["choices"][0]["message"]


async def test_contradictory_requests_for_reasoning_are_refused(http: Client) -> None:
    fields = {"enable_thinking": True, "reasoning_effort": "none"}
    answer = await http.post(CHAT, json={"messages": [USER]} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "enable_thinking")
