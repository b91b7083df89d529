"""The bundled model's chat template, and the response template that reads its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundled_models.tokenizer import CHAT_TEMPLATE, MARKS, RESPONSE_TEMPLATE, build_tokenizer
from tokenizers.decoders import DecodeStream

from nano_inference.text.tokenizer import load_tokenizer

# What the template was before it knew tools and thoughts.
PLAIN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city", "parameters": SCHEMA}
TIME = {"name": "get_time", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
SYSTEM_TURN = (
    "<|im_start|>system\n{}Tools:\n"
    '{{"name": "get_weather", "description": "The weather in a city", "parameters": {{"type": '
    '"object", "properties": {{"city": {{"type": "string"}}}}, "required": ["city"]}}}}\n'
    '{{"name": "get_time", "parameters": {{"type": "object", "properties": {{"city": {{"type": '
    '"string"}}}}, "required": ["city"]}}}}<|im_end|>\n'
)

USER = {"role": "user", "content": "How is it in Oslo and Köln?"}
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
)


def call(city: str, *, as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {"city": city}
    if as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CALLED = {"role": "assistant", "content": None, "tool_calls": [call("Oslo"), call("Köln")]}
BROUGHT = [{"role": "tool", "content": "sunny"}, {"role": "tool", "content": '{"sky": "grey"}'}]


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **variables: Any) -> str:
    variables = {"add_generation_prompt": True} | variables
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "Be brief."}, USER],
        [{"role": "system", "content": ""}, USER, {"role": "assistant", "content": "Fine."}, USER],
        [{"role": "user", "content": ""}, {"role": "other", "content": "<think>\n"}],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("more", [{}, {"tools": []}, {"enable_thinking": False}])
def test_a_plain_chat_renders_as_before(
    messages: list[dict[str, Any]],
    add_generation_prompt: bool,
    more: dict[str, Any],
    tokenizer: Any,
) -> None:
    variables = {"add_generation_prompt": add_generation_prompt}
    before = rendered(tokenizer, messages, chat_template=PLAIN_TEMPLATE, **variables)
    assert rendered(tokenizer, messages, **variables, **more) == before


def test_tools_stand_in_the_system_turn(tokenizer: Any) -> None:
    user = "<|im_start|>user\nHow is it in Oslo and Köln?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(tokenizer, [USER], tools=TOOLS) == SYSTEM_TURN.format("") + user
    system = {"role": "system", "content": "Be brief."}
    text = rendered(tokenizer, [system, USER], tools=TOOLS)
    assert text == SYSTEM_TURN.format("Be brief.\n\n") + user
    system["content"] = ""
    assert rendered(tokenizer, [system, USER], tools=TOOLS) == SYSTEM_TURN.format("") + user


def test_tools_render_in_one_field_order(tokenizer: Any) -> None:
    shuffled = {"strict": True, **dict(reversed(WEATHER.items()))}
    tools = [{"type": "function", "function": shuffled}, TIME]
    assert rendered(tokenizer, [USER], tools=tools) == rendered(tokenizer, [USER], tools=TOOLS)
    bare = [{"type": "function", "function": {"name": "now", "description": None}}]
    assert "Tools:\n" + '{"name": "now"}<|im_end|>' in rendered(tokenizer, [USER], tools=bare)


def test_calls_and_results_render(tokenizer: Any) -> None:
    text = rendered(tokenizer, [USER, CALLED, *BROUGHT], tools=TOOLS)
    assert text == (
        rendered(tokenizer, [USER], tools=TOOLS)
        + CALLS
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n"
        '<tool_response>\n{"sky": "grey"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
    )
    as_text = [call("Oslo", as_text=True), call("Köln", as_text=True)]
    without_content = {"role": "assistant", "tool_calls": as_text}
    assert rendered(tokenizer, [USER, without_content, *BROUGHT], tools=TOOLS) == text
    with_content = rendered(tokenizer, [USER, CALLED | {"content": "Well."}], tools=TOOLS)
    assert f"assistant\nWell.\n{CALLS}<|im_end|>" in with_content
    # Those of separate turns do not flow together.
    twice = rendered(tokenizer, [BROUGHT[0], CALLED, BROUGHT[1]])
    assert twice.count("<|im_start|>user\n<tool_response>") == 2


def test_the_template_opens_the_thought(tokenizer: Any) -> None:
    without = rendered(tokenizer, [USER])
    assert rendered(tokenizer, [USER], enable_thinking=True) == f"{without}<think>\n"
    turns = [USER, {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm."}, USER]
    assert "Hm." not in rendered(tokenizer, turns, enable_thinking=True)
    assert "<think>" not in rendered(tokenizer, turns, add_generation_prompt=False)


def test_the_marks_are_tokens_and_not_special(tokenizer: Any) -> None:
    assert len(tokenizer) == 768
    for mark in MARKS:
        (token,) = tokenizer.encode(mark, add_special_tokens=False)
        assert tokenizer.decode([token], skip_special_tokens=True) == mark


def test_the_folder_matches_the_script(tokenizer: Any, folder: Path) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.response_template == RESPONSE_TEMPLATE
    made = build_tokenizer(768, 1)
    kept = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    assert json.loads(made.backend_tokenizer.to_str()) == kept


def test_the_response_template_outlives_saving(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).response_template == RESPONSE_TEMPLATE  # type: ignore[attr-defined]


FIRST_CALL = CALLS[: CALLS.index("\n<tool_call>")]
ANSWERS: list[tuple[bool, str, dict[str, Any]]] = [
    (False, "15<|im_end|>", {"content": "15"}),
    (False, "", {}),
    (False, f"{CALLS}<|im_end|>", {"tool_calls": CALLED["tool_calls"]}),
    (False, f"Well.\n{FIRST_CALL}", {"content": "Well.", "tool_calls": [call("Oslo")]}),
    (
        True,
        "Add 7 and 8: 7 + 8 = 15.\n</think>\n\n15<|im_end|>",
        {"reasoning_content": "Add 7 and 8: 7 + 8 = 15.", "content": "15"},
    ),
    (
        True,
        f"Use get_weather twice.\n</think>\n\n{CALLS}<|im_end|>",
        {"reasoning_content": "Use get_weather twice.", "tool_calls": CALLED["tool_calls"]},
    ),
    (True, "Add 7 and", {"reasoning_content": "Add 7 and"}),
    (True, "Hm.<|im_end|>", {"reasoning_content": "Hm."}),
]
"""Whether the template opened a thought, what was written, and the message that this is."""


def in_tokens(tokenizer: Any, text: str) -> Iterator[str]:
    """The text in the pieces that a stream of its tokens comes in."""
    stream = DecodeStream(skip_special_tokens=False)
    for token in tokenizer.encode(text, add_special_tokens=False):
        yield stream.step(tokenizer.backend_tokenizer, token) or ""


@pytest.mark.parametrize(("thinking", "answer", "message"), ANSWERS)
@pytest.mark.parametrize("cut", ["whole", "tokens", "characters"])
def test_answers_are_taken_apart(
    thinking: bool, answer: str, message: dict[str, Any], cut: str, tokenizer: Any
) -> None:
    prompt = rendered(tokenizer, [USER], tools=TOOLS, enable_thinking=thinking)
    parser = tokenizer.get_response_parser(prefix=prompt)
    cuts = {"whole": [answer], "tokens": in_tokens(tokenizer, answer), "characters": answer}
    events = [event for piece in cuts[cut] for event in parser.feed(piece)]
    parsed, last = parser.finalize()
    assert parsed == {"role": "assistant"} | message
    closed = [event for event in [*events, *last] if event["type"] == "region_close"]
    calls = [event["value"] for event in closed if event["field"] == "tool_calls"]
    assert calls == message.get("tool_calls", [])
    assert tokenizer.parse_response(answer, prefix=prompt) == parsed
