"""Calls of functions and reasoning in `/v1/responses`: asked for, told, kept, and handed back."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from httpx import AsyncClient

from nano_inference.bus.public import CompletionSample, GenerateRequest
from nano_inference.config import Config, Constraint, load_config
from nano_inference.gateway.api.openai.records import decode_record
from nano_inference.gateway.api.openai.responses.requests import ResponseRecord
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving import words as words_module
from nano_inference.gateway.serving.measures import Measures
from nano_inference.gateway.serving.message_parts import MessageParts, NewParts
from nano_inference.gateway.serving.words import Words

from ...fake import FakeEngine, http_of, poster
from ...made import TEXTS, whole
from ...saying import says
from .streamed import response_events
from .test_refusals import refusal

PATH = "/v1/responses"
LIMIT_S = 20
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
MESSAGES = [
    BOTH,
    OSLO,
    f"{OSLO}\n{TIME}",
    f"<think>\n{THOUGHT}\n</think>\n\nIt is cold.",
    f"Before. {OSLO} Behind.",
    "<tool_call>\n{no call}\n</tool_call> and on",
    f"<think>\n{THOUGHT}",
    "a < b, and <tool is no mark",
    "",
]


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


@pytest.fixture
async def other(engine: FakeEngine, config: Config) -> AsyncIterator[AsyncClient]:
    """Another gateway on the same bus."""
    app = make_app(engine, config)
    async with http_of(app) as client:
        yield client


posted = poster(PATH, ASKED)


def prompt_of(request: GenerateRequest, words: Words) -> str:
    assert request.prompt_token_ids is not None
    return words.text(request.prompt_token_ids, skip_special=False)


# --- what is told -----------------------------------------------------------------------------


async def test_reasoning_text_and_calls_are_items_in_order(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(BOTH, words)
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
    assert answer["tools"] == ASKED["tools"]
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)
    assert answer["reasoning"] == {"effort": None, "summary": None}


async def test_a_stream_s_events_are_openai_s(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(BOTH, words)
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
    response = found[-1]["response"]
    for place, item in enumerate(response["output"]):
        own = [each for each in found if each.get("output_index") == place]
        first, *within, last = own
        assert last["item"] == item
        assert first["item"]["status"] == "in_progress"
        assert {first["item"]["id"], *(each["item_id"] for each in within)} == {item["id"]}
        deltas = "".join(each.get("delta", "") for each in own)
        told = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert deltas == told
    assert (await http.get(f"{PATH}/{response['id']}")).json() == response


@pytest.mark.parametrize("text", MESSAGES)
@pytest.mark.parametrize("more", [{}, LOGPROBS])
async def test_streamed_and_whole_it_is_the_same(
    http: AsyncClient, engine: FakeEngine, words: Words, text: str, more: dict[str, Any]
) -> None:
    """However the bus cuts it: but for what is told of the response, and its ids."""
    engine.outputs = says(text, words)
    whole = await posted(http, **more)
    for cut in (1, 2, 5, 1000):
        engine.outputs = says(text, words, cut)
        found = response_events(await http.post(PATH, json=ASKED | more | {"stream": True}))
        response = found[-1]["response"]
        name, other = (each["id"].removeprefix("resp_") for each in (whole, response))
        assert unnamed(response["output"], other) == unnamed(whole["output"], name)
        assert response["usage"] == whole["usage"]
        assert (await http.get(f"{PATH}/{response['id']}")).json() == response


def unnamed(output: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Items without what is made of the response's id."""
    cleared = [each | {"call_id": bool(each.get("call_id"))} for each in output]
    found: list[dict[str, Any]] = json.loads(json.dumps(cleared).replace(name, ""))
    return found


@pytest.mark.parametrize("more", [{}, LOGPROBS])
async def test_ids_are_the_same_in_every_event_and_at_the_end_at_any_gateway(
    http: AsyncClient,
    other: AsyncClient,
    engine: FakeEngine,
    words: Words,
    more: dict[str, Any],
) -> None:
    """vLLM made others for its stream than for its end (56285), and clients match calls by them."""
    engine.outputs = says(BOTH, words)
    events = response_events(await http.post(PATH, json=ASKED | more | {"stream": True}))
    response = events[-1]["response"]
    by_place = {place: {item["id"]} for place, item in enumerate(response["output"])}
    for event in events:
        if "output_index" in event:
            item = event.get("item", {})
            by_place[event["output_index"]] |= {event.get("item_id") or item["id"]}
            if item.get("type") == "function_call":
                wanted = response["output"][event["output_index"]]["call_id"]
                assert item["call_id"] == wanted
    assert all(len(ids) == 1 for ids in by_place.values())
    where = f"{PATH}/{response['id']}"
    assert (await other.get(where)).json() == response
    for number in range(-1, len(events)):
        after = f"&starting_after={number}" if number >= 0 else ""
        rest = await other.get(f"{where}?stream=true{after}")
        assert response_events(rest, number + 1) == events[number + 1 :]
        last = {"Last-Event-ID": f"{response['id']}.{number}"} if number >= 0 else {}
        again = await other.get(f"{where}?stream=true", headers=last)
        assert response_events(again, number + 1) == events[number + 1 :]


async def test_a_long_output_is_read_beside_the_others(
    http: AsyncClient,
    engine: FakeEngine,
    words: Words,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.outputs = says(BOTH, words)
    short = await posted(http)
    threads: list[threading.Thread] = []
    end = MessageParts.end

    def ended(parts: MessageParts, sample: CompletionSample) -> NewParts:
        threads.append(threading.current_thread())
        return end(parts, sample)

    monkeypatch.setattr(MessageParts, "end", ended)
    monkeypatch.setattr(words_module, "_SHORT_ANSWER", 3)
    made = await posted(http)
    name, other = (each["id"].removeprefix("resp_") for each in (short, made))
    assert unnamed(made["output"], other) == unnamed(short["output"], name)
    where = f"{PATH}/{made['id']}"
    assert (await http.get(where)).json() == made
    assert response_events(await http.get(f"{where}?stream=true"))[-1]["response"] == made
    assert len(threads) == 3
    assert threading.current_thread() not in threads


async def test_an_invalid_call_is_text(http: AsyncClient, engine: FakeEngine, words: Words) -> None:
    text = "<tool_call>\n{no call}\n</tool_call>"
    engine.outputs = says(text, words)
    (item,) = (await posted(http))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", text)


async def test_a_cut_output_is_incomplete(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(f"<think>\n{THOUGHT}", words, reason="length")
    answer = await posted(http)
    (item,) = answer["output"]
    assert (answer["status"], item["type"], item["status"]) == (
        "incomplete",
        "reasoning",
        "incomplete",
    )
    engine.outputs = says(f"{OSLO}\n<tool_call>\n{{", words, reason="length")
    answer = await posted(http)
    items = [(each["type"], each["status"]) for each in answer["output"]]
    assert items == [("function_call", "completed"), ("message", "incomplete")]


async def test_logprobs_are_those_of_the_text(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    """Neither of the reasoning nor of calls; the last one is the stop token's."""
    engine.outputs = says(f"<think>\n{THOUGHT}\n</think>\n\nIt is cold.", words)
    _, message = (await posted(http, **LOGPROBS))["output"]
    (part,) = message["content"]
    text = "".join(each["token"] for each in part["logprobs"])
    assert text == f"{part['text']}{words.token(min(words.stop_token_ids))}"


async def test_without_tools_nothing_is_a_call(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(OSLO, words)
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        (item,) = (await posted(http, **fields))["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", OSLO)
        assert "weather" not in prompt_of(engine.requests[-1], words)


async def test_the_effort_is_the_template_s_switch(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    """And where the template opens the reasoning, its mark is not in the output."""
    opened = "<|im_start|>assistant\n<think>\n"
    for effort in ("none", "low"):
        engine.outputs = says("yes" if effort == "none" else f"{THOUGHT}\n</think>\n\nyes", words)
        answer = await posted(http, reasoning={"effort": effort, "summary": "auto"})
        kinds = ["message"] if effort == "none" else ["reasoning", "message"]
        assert [each["type"] for each in answer["output"]] == kinds
        assert answer["reasoning"] == {"effort": effort, "summary": "auto"}
        assert prompt_of(engine.requests[-1], words).endswith(opened) == (effort == "low")
    body = ASKED | {
        "reasoning": {"effort": "low"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    refused = refusal(await http.post(PATH, json=body))
    assert refused == ("invalid_request", "chat_template_kwargs.enable_thinking")


class Counted(Measures):
    """What metrics are told of messages."""

    def __init__(self) -> None:
        self.begin()
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.read: list[tuple[int, int, int]] = []
        self.told = anyio.Event()

    def message_read(self, calls: int, malformed: int, reasoning_tokens: int) -> None:
        self.read.append((calls, malformed, reasoning_tokens))
        self.told.set()


async def test_calls_are_counted_once_however_often_they_are_read(
    engine: FakeEngine, calling: Config, words: Words
) -> None:
    counted = Counted()
    transport = httpx.ASGITransport(make_app(engine, calling, counted))
    engine.outputs = says(f"{OSLO}\n<tool_call>\n{{no call}}\n</tool_call>", words)
    async with AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for fields in ({}, {"stream": True}, {"background": True}):
            answer = await http.post(PATH, json=ASKED | fields)
            (request,) = engine.requests
            with anyio.fail_after(LIMIT_S):
                await counted.told.wait()
            assert (answer.status_code, counted.read) == (200, [(1, 1, 0)])
            for _ in range(2):
                where = f"{PATH}/{request.request_id}"
                assert (await http.get(where)).json()["status"] == "completed"
                response_events(await http.get(f"{where}?stream=true"))
            assert len(counted.read) == 1
            counted.begin()
            engine.requests.clear()


# --- what is handed back ----------------------------------------------------------------------


async def test_items_handed_back_are_turns(
    http: AsyncClient, other: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    """As they came, or by the response's id: the prompt is the same, and is what a chat's is."""
    engine.outputs = says(BOTH, words)
    first = await posted(http)
    outputs = [
        {"type": "function_call_output", "call_id": each["call_id"], "output": output}
        for each, output in zip(
            first["output"][2:], ["cold", [{"type": "input_text", "text": "late"}]], strict=True
        )
    ]
    engine.outputs = says("It is cold, and late.", words)
    second = await posted(other, input=outputs, previous_response_id=first["id"])
    question = {"role": "user", "content": ASKED["input"]}
    await posted(http, input=[question, *first["output"], *outputs])
    chained, by_hand = (prompt_of(each, words) for each in engine.requests[1:])
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


async def test_each_answer_is_a_turn_of_its_own(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says("hello", words)
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
    said = prompt_of(engine.requests[-1], words)
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
    http: AsyncClient,
    other: AsyncClient,
    engine: FakeEngine,
    words: Words,
    fields: dict[str, Any],
) -> None:
    """Also where the request is published by another gateway, from what is kept."""
    engine.outputs = says(OSLO, words)
    answer = await posted(http, **fields)
    constraint = engine.requests[-1].sampling.constraint
    assert constraint is not None
    assert constraint.lark
    assert [each["type"] for each in answer["output"]] == ["function_call"]
    await posted(http, background=True, **fields)
    kept = await engine.bus.store.calls.read(engine.requests[-1].request_id)
    record = decode_record(kept.record, ResponseRecord) if kept else None
    assert record is not None
    assert record.request(load_config(env={})).sampling == engine.requests[-1].sampling


async def test_an_unconstrained_output_has_no_grammar(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says(OSLO, words)
    few = {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK]}
    for fields in ({}, {"tool_choice": "none"}, {"tool_choice": few}, {"max_tool_calls": 3}):
        await posted(http, **fields)
        assert engine.requests[-1].sampling.constraint is None
    told = [prompt_of(each, words).count("weather") for each in engine.requests]
    assert told == [1, 0, 0, 1]


async def test_an_unknown_message_format_refuses_tools(engine: FakeEngine, calling: Config) -> None:
    gateway = msgspec.structs.replace(calling.gateway, message_format="off")
    app = make_app(engine, msgspec.structs.replace(calling, gateway=gateway))
    async with http_of(app) as http:
        assert refusal(await http.post(PATH, json=ASKED)) == ("unsupported", "tools")
        budget = {"input": "a", "thinking_token_budget": 5}
        assert refusal(await http.post(PATH, json=budget))[0] == "unsupported"
        engine.outputs = whole
        (item,) = (await posted(http, tools=[]))["output"]
        assert item["content"][0]["text"] == "".join(TEXTS)
    assert len(engine.requests) == 1


async def test_a_format_allows_reasoning_only_on_request(
    http: AsyncClient, engine: FakeEngine, words: Words
) -> None:
    engine.outputs = says("{}", words)
    wanted = {"tools": [], "text": {"format": {"type": "json_object"}}}
    await posted(http, **wanted)
    assert engine.requests[-1].sampling.constraint == Constraint(json_object=True)
    await posted(http, **wanted, reasoning={"effort": "low"})
    assert "think" in str(engine.requests[-1].sampling.constraint)
