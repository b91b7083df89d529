"""Conversations in Python: to prompts, and from tokens back to messages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nano_inference import (
    ChatRenderer,
    Constraint,
    EngineConfig,
    InferenceEngine,
    RequestError,
    SamplingParams,
    load_config,
)
from nano_inference.bus.public import GenerateRequest
from nano_inference.stages.admission.prompts import PromptReader
from nano_inference.text.tokenizer import load_tokenizer

from ..gateway.fake import FakeEngine, app_of, http_of
from . import reference
from .builders import raises

# As Qwen's, with reasoning that the template opens itself.
TEMPLATE = """\
{%- if tools %}{{ 'Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{ 'as <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined %}
    {{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
USER = {"role": "user", "content": "Is it raining in Oslo?"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The bundled model under the name of a model that writes so."""
    made = tmp_path / "model"
    shutil.copytree(reference.FOLDER, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config.pop("response_template", None)
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture
def chat(folder: Path) -> ChatRenderer:
    return ChatRenderer(str(folder))


def tokens(folder: Path, text: str) -> list[int]:
    return load_tokenizer(folder).encode(text, add_special_tokens=False)


def test_a_call_and_its_result_stand_in_the_next_prompt(folder: Path, chat: ChatRenderer) -> None:
    prompt = chat.render([USER], tools=[WEATHER])
    message = chat.read(prompt, tokens(folder, f"Let me see.\n{CALL}<|im_end|>"))
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "Let me see."}
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is."}
    history = [USER, message | {"tool_calls": [call]}, result]
    again = load_tokenizer(folder).decode(chat.render(history, tools=[WEATHER]).token_ids)
    assert CALL in again
    assert "It is." in again


def test_messages_of_openai_s_library_render(folder: Path, chat: ChatRenderer) -> None:
    """Missing fields are None; a text may be in parts."""
    function = WEATHER["function"] | {"strict": None, "description": None}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "a"}] * 2, "name": None}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    said = {"role": "assistant", "content": "b", "tool_calls": None}
    prompt = chat.render([asked, answer, said], tools=[WEATHER | {"function": function}])
    text = load_tokenizer(folder).decode(prompt.token_ids)
    assert "user\na\na<|im_end|>" in text
    assert 'assistant\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' in text
    assert "None" not in text


@pytest.mark.parametrize(
    "message",
    [
        None,
        "text",
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": "\ud800"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": None}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ],
)
def test_invalid_messages_are_refused(chat: ChatRenderer, message: Any) -> None:
    with raises("invalid_messages"):
        chat.render([message])


def test_a_text_in_place_of_messages_is_refused(chat: ChatRenderer) -> None:
    with raises("invalid_messages", "messages is 'hi' and no list; pass"):
        chat.render("hi")  # type: ignore[arg-type]


def test_the_template_may_open_the_reasoning(folder: Path, chat: ChatRenderer) -> None:
    prompt = chat.render([USER], enable_thinking=True)
    message = chat.read(prompt, tokens(folder, "Norway?\n</think>\n\nYes.<|im_end|>"))
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Norway?"}
    # Cut off within it.
    message = chat.read(prompt, tokens(folder, "Norway"), "length")
    assert message == {"role": "assistant", "content": "", "reasoning_content": "Norway"}


# --- the same prompts as the gateway's, and those of the bus -------------------------------------

ROLES = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
    {%- if message.role == 'tool' and message.tool_call_id | length != 9 %}
        {{- raise_exception('ids of 9 letters and digits') }}
    {%- endif %}
    {{- '[' + message.role + ' ' + (message.name or '') + (message.tool_call_id or '') + ']' }}
    {{- message.content }}
    {%- if message.thinking %}{{- '(' + message.thinking + ')' }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.id + call.function.name + call.function.arguments | tojson }}
    {%- endfor %}
{%- endfor %}
{{- '[assistant]' }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{#- <|im_start|> <tool_call> <think> #}
"""
TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
PLAIN: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": TEXTS},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And é?"},
]


def called(call_id: str, arguments: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


CALLED: list[dict[str, Any]] = [
    {"role": "user", "name": "Eva", "content": "?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "tool_calls": [called("call_0123456789abcdef", '{"city": "Oslo"}'), called("b-2", "null")],
    },
    {"role": "tool", "tool_call_id": "b-2", "content": TEXTS},
    {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "Rain."},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": [], "refusal": None},
]


@pytest.mark.parametrize("messages", [PLAIN, CALLED], ids=["plain", "called"])
@pytest.mark.parametrize("template", [ROLES, TEMPLATE], ids=["roles", "qwen"])
async def test_the_prompt_is_the_same_in_any_way(
    folder: Path, template: str, messages: list[dict[str, Any]]
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    bare = WEATHER | {"function": {"name": "get_weather", "parameters": {}, "description": None}}
    config = load_config(env={}, overrides={"engine.model_path": str(folder)})
    async with http_of(app_of(FakeEngine(), config)) as http:
        for tools in ([], [WEATHER], [bare]):
            answer = await http.post("/tokenize", json={"messages": messages, "tools": tools})
            assert answer.status_code == 200, answer.text
            # No format reads the calls of the first template.
            renderer = ChatRenderer(str(folder), message_format="qwen")
            prompt = renderer.render(messages, tools=tools)
            assert list(prompt.token_ids) == answer.json()["tokens"]
            if messages is PLAIN and not tools:
                request = msgspec.convert(
                    {"type": "generate", "messages": messages}, GenerateRequest
                )
                reader = PromptReader(request, load_tokenizer(folder), 256, 1000, 100_000)
                assert reader.prompt().token_ids == prompt.token_ids


async def test_what_the_template_can_not_be_given_is_refused_in_any_form(
    folder: Path,
) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("tools", "functions"))
    config = load_config(env={}, overrides={"engine.model_path": str(folder)})
    result = {"role": "tool", "content": "T", "tool_call_id": "c"}
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"tools": [WEATHER]}, "unsupported", "tools"),
        ({"variables": {"tokenize": 1}}, "unsupported", "tokenize"),
        ({"messages": [USER, result]}, "invalid_messages", "messages[1].tool_call_id"),
    ]
    async with http_of(app_of(FakeEngine(), config)) as http:
        for asked, code, param in refused:
            messages, tools = asked.get("messages", [USER]), asked.get("tools", [])
            variables = asked.get("variables", {})
            body = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
            error = (await http.post("/tokenize", json=body)).json()["error"]
            with raises(code) as found:
                ChatRenderer(str(folder)).render(messages, tools=tools, **variables)
            assert (error["code"], error["param"].split("kwargs.")[-1]) == (code, param)
            assert error["message"].endswith(found.value.message)


async def test_variables_that_the_template_does_not_read_are_neutral_over_http(
    folder: Path,
) -> None:
    """Programs send them to every model; in Python the caller has the template before it."""
    with raises("unsupported"):
        ChatRenderer(str(folder)).render([USER], mood=1)
    config = load_config(env={}, overrides={"engine.model_path": str(folder)})
    async with http_of(app_of(FakeEngine(), config)) as http:
        body = {"messages": [USER], "chat_template_kwargs": {"mood": 1}}
        answer = await http.post("/tokenize", json=body)
    assert answer.headers["x-ignored-fields"] == "chat_template_kwargs.mood"


def test_without_tools_a_call_is_text(folder: Path, chat: ChatRenderer) -> None:
    for prompt in (chat.render([USER]), chat.render([USER], tools=[WEATHER], tool_choice="none")):
        assert chat.read(prompt, tokens(folder, CALL)) == {"role": "assistant", "content": CALL}


def test_a_call_can_be_required(folder: Path, chat: ChatRenderer) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with InferenceEngine(EngineConfig(model_path=str(folder))) as engine:
        for asked in ("required", choice):
            prompt = chat.render(
                [USER],
                tools=[WEATHER],
                tool_choice=asked,
                parallel_tool_calls=False,
                enable_thinking=False,
            )
            params = chat.sampling(prompt, SamplingParams(seed=3, max_tokens=400))
            samples = engine.generate([prompt.token_ids], params, num_samples_per_prompt=4)
            for sample in samples:
                message = chat.read(prompt, sample.completion_tokens, sample.finish_reason)
                assert sample.finish_reason == "stop"
                for call in message["tool_calls"]:
                    assert call["function"]["name"] == "get_weather"
                    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Oslo")
                assert message["content"] == ""


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": [WEATHER, WEATHER]},
        {"tools": [WEATHER], "tool_choice": "perhaps"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "function", "function": {"name": 7}}]},
    ],
)
def test_invalid_tools_are_refused(chat: ChatRenderer, asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        chat.render([USER], **asked)


def test_the_bundled_model_answers_without_any(folder: Path) -> None:
    chat = ChatRenderer()
    prompt = chat.render([{"role": "user", "content": "What is 3 + 4?"}])
    with InferenceEngine() as engine:
        (sample,) = engine.generate([prompt.token_ids], SamplingParams(temperature=0))
    message = chat.read(prompt, sample.completion_tokens, sample.finish_reason)
    assert message == {"role": "assistant", "content": "7"}


def test_a_constraint_allows_reasoning_only_on_request() -> None:
    """The bundled model's template opens reasoning when asked, and never closes it."""
    chat, answer = ChatRenderer(), Constraint(regex="[0-9]+")
    params = SamplingParams(constraint=answer)
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        prompt = chat.render([USER], **variables)
        constraint = chat.sampling(prompt, params).constraint
        assert (constraint == answer) is (variables != {"enable_thinking": True})
    assert chat.sampling(chat.render([USER]), params, reasoning_budget=3).constraint != answer
