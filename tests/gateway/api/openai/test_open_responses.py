"""Open Responses: a response and its events have all required fields, for each of its seven kinds.

The kinds and the fields are those of its specification (https://www.openresponses.org).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import Config, load_config
from nano_inference.gateway.api.openai.responses.requests import ID_PREFIX

from ....text.processors import FAMILIES, save_model
from ...fake import Client, FakeEngine, app_of, chunk, completion, data_of, http_of, sample
from ...saying import Model
from ...test_images import DATA_URI, TEMPLATE
from .streamed import response_events
from .test_responses_tools import WEATHER, call

PATH = "/v1/responses"

FIELDS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": (int, type(None)),
    "status": str,
    "incomplete_details": (dict, type(None)),
    "model": str,
    "previous_response_id": (str, type(None)),
    "instructions": (str, type(None)),
    "output": list,
    "error": (dict, type(None)),
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": int,
    "temperature": (int, float),
    "reasoning": (dict, type(None)),
    "user": (str, type(None)),
    "usage": (dict, type(None)),
    "max_output_tokens": (int, type(None)),
    "max_tool_calls": (int, type(None)),
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": (str, type(None)),
    "prompt_cache_key": (str, type(None)),
}
TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}
ITEM_FIELDS = {
    "message": {"type", "id", "status", "role", "content"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
}
PART_FIELDS = {"type", "text", "annotations", "logprobs"}
USAGE_FIELDS = {
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "input_tokens_details",
    "output_tokens_details",
}
PLACE = {"item_id", "output_index", "content_index"}
EVENT_FIELDS = {
    "response.created": {"response"},
    "response.in_progress": {"response"},
    "response.completed": {"response"},
    "response.output_item.added": {"output_index", "item"},
    "response.output_item.done": {"output_index", "item"},
    "response.content_part.added": PLACE | {"part"},
    "response.content_part.done": PLACE | {"part"},
    "response.output_text.delta": PLACE | {"delta", "logprobs"},
    "response.output_text.done": PLACE | {"text", "logprobs"},
    "response.function_call_arguments.delta": {"item_id", "output_index", "delta"},
    "response.function_call_arguments.done": {"item_id", "output_index", "arguments"},
}


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


TOOL = {name: value for name, value in WEATHER.items() if name != "strict"}
IMAGE = [
    {"type": "input_text", "text": "What is it?"},
    {"type": "input_image", "image_url": DATA_URI},
]
KINDS: dict[str, dict[str, Any]] = {
    "basic": {"input": [user("Say hello.")]},
    "streaming": {"input": [user("Count to five.")], "stream": True},
    "system prompt": {
        "input": [{"type": "message", "role": "system", "content": "A pirate."}, user("Hello.")]
    },
    "tool calling": {"input": [user("How is it in Oslo?")], "tools": [TOOL]},
    "tool calling, streamed": {"input": [user("And now?")], "tools": [TOOL], "stream": True},
    "image input": {"input": [user(IMAGE)]},
    "several turns": {
        "input": [
            user("I am Alice."),
            {"type": "message", "role": "assistant", "content": "Hello!"},
            user("Who am I?"),
        ]
    },
}


def check(response: dict[str, Any]) -> None:
    for name, kind in FIELDS.items():
        assert isinstance(response[name], kind), name
    assert response["object"] == "response"
    assert all(tool.keys() >= TOOL_FIELDS for tool in response["tools"])
    for item in response["output"]:
        assert item.keys() >= ITEM_FIELDS[item["type"]]
        assert all(part.keys() >= PART_FIELDS for part in item.get("content", ()))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings with a model that takes images."""
    folder: Path = tmp_path_factory.mktemp("seeing")
    save_model(FAMILIES["qwen2_vl"], folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"engine.model_path": str(folder), "gateway.message_format": "off"}
    return load_config(env={}, overrides=settings)


@pytest.fixture
def config(request: pytest.FixtureRequest, calling: Config, seeing: Config) -> Config:
    return seeing if "image input" in request.node.name else calling


@pytest.mark.parametrize("kind", KINDS)
async def test_a_response_of_each_kind_has_all_fields(
    http: Client, model: Model, kind: str
) -> None:
    body = KINDS[kind]
    if kind == "image input":
        stopped = sample(finish_reason="stop")
        http.engine.outputs = lambda request: [completion(request, stopped)]
    else:
        model.says(call("weather", city="Oslo") if "tools" in body else "Hello.")
    answer = await http.post(PATH, json=body)
    if not body.get("stream"):
        response = answer.json()
    else:
        events = response_events(answer)
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        for each in events:
            assert each.keys() >= EVENT_FIELDS[each["type"]]
            if "response" in each:
                check(each["response"])
        response = events[-1]["response"]
    check(response)
    assert response["status"] == "completed"
    assert response["id"].startswith(ID_PREFIX)
    assert response["usage"].keys() >= USAGE_FIELDS
    wanted = "function_call" if "tools" in body else "message"
    assert [item["type"] for item in response["output"]] == [wanted]


async def test_an_error_within_a_stream_has_its_fields(engine: FakeEngine, calling: Config) -> None:
    engine.outputs = lambda request: [chunk(request), chunk(request, token_offset=1)]
    engine.away = True
    async with http_of(app_of(engine, calling), engine) as http:
        body = {"input": "a", "stream": True, "store": True}
        last = data_of(await http.post(PATH, json=body))[-1]
    assert last["type"] == "error"
    assert last["error"].keys() == {"message", "type", "param", "code"}
