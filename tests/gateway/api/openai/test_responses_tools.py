"""Calls of functions and reasoning in `/v1/responses`: asked for, told, kept, and handed back."""

from __future__ import annotations

import json
import threading
from typing import Any

import anyio
import pytest

from nano_inference.bus.public import CompletionSample
from nano_inference.config import Config, load_config
from nano_inference.gateway.api.openai.responses.requests import ResponseRecord
from nano_inference.gateway.serving import tokenizer
from nano_inference.gateway.serving.begun_calls import decode_record
from nano_inference.gateway.serving.message_parts import MessageParts, NewParts
from nano_inference.telemetry.instruments import TOOL_CALLS

from ...fake import Client, app_of, http_of, poster
from ...recorded import Recorded
from ...saying import Model
from .streamed import response_events
from .test_refusals import refusal

PATH = "/v1/responses"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "How it is there.",
    "parameters": CITY,
    "strict": False,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": None}
ASKED: dict[str, Any] = {"input": "How is it in Oslo?", "tools": [WEATHER, CLOCK]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


THOUGHT = "I look it up."
OSLO, TIME = call("weather", city="Oslo"), call("clock")
BOTH = f"<think>\n{THOUGHT}\n</think>\n\nLet me see.\n{OSLO}\n{TIME}"


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


posted = poster(PATH, ASKED)


# --- what is told -----------------------------------------------------------------------------


async def test_reasoning_text_and_calls_are_items_in_order(http: Client, model: Model) -> None:
    model.says(BOTH)
    answer = await posted(http, parallel_tool_calls=True, reasoning={"effort": None})
    reasoning, message, *calls = answer["output"]
    name = answer["id"].removeprefix("resp_")
    assert reasoning == {
        "id": f"rs_{name}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }
    assert (message["id"], message["content"][0]["text"]) == (f"msg_{name}", "Let me see.")
    assert [each["id"] for each in calls] == [f"fc_{name}", f"fc_{name}_1"]
    assert [(each["type"], each["name"], each["status"]) for each in calls] == [
        ("function_call", "weather", "completed"),
        ("function_call", "clock", "completed"),
    ]
    assert [json.loads(each["arguments"]) for each in calls] == [{"city": "Oslo"}, {}]
    ids = [each["call_id"] for each in calls]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert answer["tools"] == [WEATHER, CLOCK | {"description": None, "strict": False}]
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)
    assert answer["reasoning"] == {"effort": None, "summary": None}


async def test_a_stream_s_events_are_openai_s(http: Client, other: Client, model: Model) -> None:
    model.says(BOTH)
    found = response_events(await http.post(PATH, json=ASKED | {"stream": True}))
    names = [each["type"].removeprefix("response.") for each in found]
    # Those that repeat, once.
    assert [each for place, each in enumerate(names) if names[place - 1] != each] == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        )
        * 2,
        "completed",
    ]
    assert {each["response"]["status"] for each in found[:2]} == {"in_progress"}
    response = found[-1]["response"]
    for place, item in enumerate(response["output"]):
        own = [each for each in found if each.get("output_index") == place]
        first, *within, last = own
        assert last["item"] == item
        assert first["item"]["status"] == "in_progress"
        # Clients match calls by their ids; vLLM's differed at the end (56285).
        assert {first["item"]["id"], *(each["item_id"] for each in within)} == {item["id"]}
        assert first["item"].get("call_id") == item.get("call_id")
        deltas = "".join(each.get("delta", "") for each in own)
        told = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == told
    where = f"{PATH}/{response['id']}"
    assert (await other.get(where)).json() == response
    assert response_events(await other.get(f"{where}?stream=true")) == found


async def test_a_long_output_is_read_beside_the_others(
    http: Client, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    end = MessageParts.end

    def ended(parts: MessageParts, sample: CompletionSample) -> NewParts:
        threads.append(threading.current_thread())
        return end(parts, sample)

    monkeypatch.setattr(MessageParts, "end", ended)
    monkeypatch.setattr(tokenizer, "_SHORT", 3)
    model.says(BOTH)
    made = await posted(http)
    where = f"{PATH}/{made['id']}"
    assert (await http.get(where)).json() == made
    assert response_events(await http.get(f"{where}?stream=true"))[-1]["response"] == made
    assert len(threads) == 3
    assert threading.current_thread() not in threads


async def test_a_cut_output_is_incomplete(http: Client, model: Model) -> None:
    model.says(f"<think>\n{THOUGHT}", reason="length")
    answer = await posted(http)
    (item,) = answer["output"]
    assert (answer["status"], item["type"], item["status"]) == (
        "incomplete",
        "reasoning",
        "incomplete",
    )
    model.says(f"{OSLO}\n<tool_call>\n{{", reason="length")
    answer = await posted(http)
    items = [(each["type"], each["status"]) for each in answer["output"]]
    assert items == [("function_call", "completed"), ("message", "incomplete")]


async def test_logprobs_are_those_of_the_text(http: Client, model: Model) -> None:
    """Neither of the reasoning nor of calls; the last one is the stop token's."""
    model.says(f"<think>\n{THOUGHT}\n</think>\n\nIt is cold.")
    _, message = (await posted(http, **LOGPROBS))["output"]
    (part,) = message["content"]
    text = "".join(each["token"] for each in part["logprobs"])
    assert text == f"{part['text']}{model.tokenizer.token(min(model.tokenizer.stop_token_ids))}"


async def test_the_effort_is_the_template_s_switch(http: Client, model: Model) -> None:
    """And where the template opens the reasoning, its mark is not in the output."""
    opened = "<|im_start|>assistant\n<think>\n"
    for effort in ("none", "low"):
        model.says("yes" if effort == "none" else f"{THOUGHT}\n</think>\n\nyes")
        answer = await posted(http, reasoning={"effort": effort, "summary": "auto"})
        kinds = ["message"] if effort == "none" else ["reasoning", "message"]
        assert [each["type"] for each in answer["output"]] == kinds
        assert answer["reasoning"] == {"effort": effort, "summary": "auto"}
        assert model.prompt().endswith(opened) == (effort == "low")
    body = ASKED | {
        "reasoning": {"effort": "low"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    refused = refusal(await http.post(PATH, json=body))
    assert refused == ("invalid_request", "chat_template_kwargs.enable_thinking")


async def test_calls_are_counted_once_however_often_they_are_read(
    calling: Config, model: Model
) -> None:
    recorded = Recorded()
    model.says(f"{OSLO}\n<tool_call>\n{{no call}}\n</tool_call>")
    async with http_of(app_of(model.engine, calling, recorded.measures)) as http:
        for number, fields in enumerate(({}, {"stream": True}, {"background": True}), 1):
            assert (await http.post(PATH, json=ASKED | fields)).status_code == 200
            wanted = {("made",): number, ("malformed",): number}
            while recorded.values(TOOL_CALLS) != wanted:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            where = f"{PATH}/{model.requests[-1].request_id}"
            for _ in range(2):
                assert (await http.get(where)).json()["status"] == "completed"
                response_events(await http.get(f"{where}?stream=true"))
            assert recorded.values(TOOL_CALLS) == wanted


# --- what is handed back ----------------------------------------------------------------------


async def test_items_handed_back_are_turns(http: Client, other: Client, model: Model) -> None:
    """With the items or with the response's id the prompt is the same as a chat's."""
    model.says(BOTH)
    first = await posted(http)
    outputs = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": output}
        for each, output in zip(
            first["output"][2:], ["cold", [{"type": "input_text", "text": "late"}]], strict=True
        )
    ]
    model.says("It is cold, and late.")
    second = await posted(other, input=outputs, previous_response_id=first["id"])
    question = {"role": "user", "content": ASKED["input"]}
    await posted(http, input=[question, *first["output"], *outputs])
    chained, by_hand = (model.prompt(place) for place in (1, 2))
    assert chained == by_hand
    assert chained.endswith(
        f"<|im_start|>user\n{ASKED['input']}<|im_end|>\n"
        f"<|im_start|>assistant\n{BOTH}<|im_end|>\n"
        "<|im_start|>tool\ncold(weather)<|im_end|>\n"
        "<|im_start|>tool\nlate(clock)<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    listed = (await other.get(f"{PATH}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [each["type"] for each in listed] == [
        "message",
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
    ]
    assert [each["id"] for each in listed[1:5]] == [each["id"] for each in first["output"]]


async def test_each_answer_is_a_turn_of_its_own(http: Client, model: Model) -> None:
    model.says("hello")
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}], "summary": []},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"type": "reasoning", "encrypted_content": "sealed", "summary": []},
        {"role": "user", "content": "e"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "f"}]},
    ]
    await posted(http, input=items, tools=[])
    said = model.prompt()
    assert said == (
        "<|im_start|>assistant\n<think>\na\n</think>\n\n\n"
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>assistant\n<think>\nb\n</think>\n\nc<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n"
        "<|im_start|>user\ne<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nf\n</think>\n\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# --- what is enforced -------------------------------------------------------------------------

ENFORCED: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "name": "weather"}},
    {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [WEATHER]}},
    {"tools": [WEATHER | {"strict": True}]},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": CITY}}},
    {"parallel_tool_calls": False},
    {"thinking_token_budget": 5},
]


@pytest.mark.parametrize("fields", ENFORCED)
async def test_tools_and_format_are_one_grammar(
    http: Client, other: Client, model: Model, fields: dict[str, Any]
) -> None:
    """Also where the request is published by another gateway, from what is kept."""
    model.says(OSLO)
    answer = await posted(http, **fields)
    constraint = model.constraint
    assert constraint.lark
    assert [each["type"] for each in answer["output"]] == ["function_call"]
    await posted(http, background=True, **fields)
    kept = await model.engine.bus.store.calls.read(model.requests[-1].request_id)
    record = decode_record(kept.record, ResponseRecord) if kept else None
    assert record.request(load_config(env={})).sampling == model.requests[-1].sampling


async def test_an_unconstrained_output_has_no_grammar(http: Client, model: Model) -> None:
    model.says(OSLO)
    few = {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK]}
    for fields in ({}, {"tool_choice": "none"}, {"tool_choice": few}, {"max_tool_calls": 3}):
        await posted(http, **fields)
        assert model.constraint is None
    told = [model.prompt(place).count("weather") for place in range(4)]
    assert told == [1, 0, 0, 1]
