"""Chats and prompts as Ollama's clients send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config

from ...errors import code_of
from ...fake import Client, FakeEngine, app_of, chunk, data_of, http_of, poster, refused
from ...saying import Model, calling_model, words_of

USER: dict[str, Any] = {"role": "user", "content": "What is it like in Bern?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
ANSWER = f"<think>\nBern, then.\n</think>\n\nLet me see.\n{CALL}"

chat = poster("/api/chat", {"messages": [USER], "stream": False})
generate = poster("/api/generate", {"prompt": "a", "stream": False})


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return calling_model(tmp_path / "tiny")


@pytest.fixture
def model(engine: FakeEngine, config: Config) -> Model:
    return Model(engine, words_of(config))


@pytest.fixture
async def plain() -> AsyncIterator[Client]:
    engine = FakeEngine()
    async with http_of(app_of(engine, {"gateway.message_format": "off"}), engine) as http:
        yield http


@pytest.mark.parametrize("cut", [1, 4])
async def test_a_stream_and_a_whole_answer_have_the_same_message(
    http: Client, model: Model, cut: int
) -> None:
    model.says(ANSWER, cut)
    whole = await chat(http, tools=[TOOL], logprobs=True, top_logprobs=1)
    lines = data_of(
        await http.post("/api/chat", json={"messages": [USER], "tools": [TOOL], "logprobs": True})
    )
    message = whole["message"]
    assert (message["content"], message["thinking"]) == ("Let me see.", "Bern, then.")
    (call,) = message["tool_calls"]
    function = {"index": 0, "name": "weather", "arguments": {"city": "Bern"}}
    assert call["function"] == function
    assert call["id"]
    for name in ("content", "thinking"):
        assert "".join(line["message"].get(name, "") for line in lines) == message[name]
    found = [each for line in lines for each in line["message"].get("tool_calls", ())]
    assert [each["function"] for each in found] == [function]
    tokens = [each["token"] for line in lines for each in line.get("logprobs", ())]
    assert tokens == [each["token"] for each in whole["logprobs"]]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for last in (whole, lines[-1]):
        assert (last["done_reason"], last["prompt_eval_count"]) == ("stop", 4)
        assert last["eval_count"] == len(tokens)
        assert min(last[f"{name}_duration"] for name in ("total", "prompt_eval", "eval")) > 0


async def test_results_are_matched_to_calls_by_the_tool_s_name(http: Client, model: Model) -> None:
    model.says("12")
    called = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    results = [{"role": "tool", "tool_name": name, "content": f"by {name}"} for name in ("g", "f")]
    await chat(http, messages=[USER, {"role": "assistant", "tool_calls": called}, *results])
    prompt = model.prompt()
    assert '{"name": "f", "arguments": {"a": 1}}' in prompt
    assert prompt.index("by g(g)") < prompt.index("by f(f)")
    stray = {"messages": [USER, results[0]]}
    assert code_of(await http.post("/api/chat", json=stray), 400) == "invalid_messages"


@pytest.mark.parametrize(
    ("think", "end"), [(True, "<think>\n"), (False, "<think>\n\n</think>\n\n"), (None, "")]
)
async def test_think_turns_reasoning_on_and_off(
    http: Client, model: Model, think: bool | None, end: str
) -> None:
    model.says("12")
    await chat(http, think=think)
    assert model.prompt().endswith(f"<|im_start|>assistant\n{end}")


async def test_an_assistant_s_text_at_the_end_is_continued(http: Client, model: Model) -> None:
    model.says("12")
    await chat(http, messages=[USER, {"role": "assistant", "content": "It is"}])
    assert model.prompt().endswith("assistant\nIt is")


async def test_a_format_constrains_the_text(http: Client, model: Model) -> None:
    model.says("{}")
    for form, wanted in ((SCHEMA, "json_schema"), ("json", "json_object")):
        await chat(http, format=form)
        assert model.constraint is not None
        assert getattr(model.constraint, wanted)
    assert code_of(await http.post("/api/chat", json={"messages": [USER], "format": "xml"}), 400)


async def test_a_context_is_continued(http: Client, model: Model) -> None:
    model.says("12")
    first = await generate(http, prompt="6 + 6", system="count", context=[])
    context = first["context"]
    await generate(http, prompt="and 1", context=[5, 6, *context])
    assert model.requests[-1].prompt_token_ids is not None
    assert model.requests[-1].prompt_token_ids[: len(context) + 2] == (5, 6, *context)
    assert model.prompt().endswith("<|im_start|>user\nand 1<|im_end|>\n<|im_start|>assistant\n")
    assert "count" in model.prompt(-2)


async def test_a_raw_prompt_is_taken_as_it_is(http: Client, model: Model) -> None:
    model.says("12")
    answer = await generate(http, prompt="6 + 6 =", raw=True)
    request = model.requests[-1]
    assert (request.prompt, request.add_special_tokens) == ("6 + 6 =", True)
    assert (answer["response"], "context" in answer) == ("12", False)
    for field in ({"system": "a"}, {"context": [5]}):
        body = {"prompt": "a", "raw": True} | field
        assert code_of(await http.post("/api/generate", json=body), 400) == "invalid_request"


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": None, "max_tokens": 2048}),
    ({"num_predict": -1, "seed": -1, "top_k": -1}, {"max_tokens": 2048, "seed": None, "top_k": 0}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
    ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
    ({"repeat_last_n": 64, "num_ctx": 10**6, "mirostat": 0}, {"repetition_penalty": 1.0}),
]


@pytest.mark.parametrize(("options", "wanted"), OPTIONS)
async def test_options_have_ollama_s_meaning(
    plain: Client, options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    await chat(plain, options=options)
    sampling = plain.engine.requests[0].sampling
    assert {name: getattr(sampling, name) for name in wanted} == wanted


async def test_what_has_no_effect_is_named_in_a_header(plain: Client) -> None:
    body = {"messages": [USER], "options": {"num_ctx": 9, "repeat_last_n": 5}, "keep_alive": "5m"}
    answer = await plain.post("/api/chat", json=body)
    named = "keep_alive, options.num_ctx, options.repeat_last_n"
    assert answer.headers["X-Ignored-Fields"] == named


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    ({"options": {"typical_p": 0.5}}, "options.typical_p"),
    ({"options": {"repeat_penalty": 2, "repeat_last_n": 64}}, "options.repeat_last_n"),
    ({"shift": True}, "shift"),
    ({"_debug_render_only": True}, "_debug_render_only"),
    ({"suffix": "a"}, "suffix"),
    ({"template": "a"}, "template"),
    ({"width": 5}, "width"),
    ({"height": 5}, "height"),
    ({"steps": 5}, "steps"),
]


@pytest.mark.parametrize(("fields", "name"), REFUSED)
async def test_what_can_not_be_obeyed_is_refused_by_its_name(
    plain: Client, fields: dict[str, Any], name: str
) -> None:
    answer = await plain.post("/api/generate", json={"prompt": "a"} | fields)
    assert code_of(answer, 400) == "unsupported"
    assert answer.json()["error"].startswith(f"{name} is ")
    assert not plain.engine.requests


async def test_an_error_within_a_stream_is_its_last_line(plain: Client) -> None:
    failed = refused("lane_failed", "it broke")

    def outputs(request: GenerateRequest) -> list[Output]:
        return [chunk(request), *failed(request)]

    plain.engine.outputs = outputs
    answer = await plain.post("/api/chat", json={"messages": [USER]})
    first, last = data_of(answer)
    assert (answer.status_code, first["message"]["content"]) == (200, "<7>")
    assert last == {"error": "it broke"}
    plain.engine.outputs = failed
    answer = await plain.post("/api/chat", json={"messages": [USER]})
    assert code_of(answer, 500) == "lane_failed"
    assert answer.json() == {"error": "it broke"}
