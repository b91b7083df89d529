"""Chat templates that come with their calls, where the gateway takes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from nano_inference.config import Config

from ...fake import Client, poster
from ...saying import TEMPLATE, Model, calling_model
from .test_chat_tools import CALL, HELLO, WEATHER

PATH = "/v1/chat/completions"
TEXT = "{% generation %}{{ mood }} {{ messages[0].content }}{% endgeneration %}"
CALLED = {"name": "weather", "arguments": '{"city": "Oslo"}'}
chat, render, tokenize = (poster(path, {}) for path in (PATH, f"{PATH}/render", "/tokenize"))


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A model whose format follows from its template alone."""
    config = calling_model(tmp_path_factory.mktemp("model") / "tiny")
    path = config.engine.model_folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("response_template", None)
    path.write_text(json.dumps(settings))
    gateway = replace(config.gateway, message_format="auto", chat_template_in_requests=True)
    return replace(config, gateway=gateway)


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


async def test_a_call_s_own_template_writes_its_prompt(http: Client, model: Model) -> None:
    model.says("<think>yes</think>")
    body: dict[str, Any] = {"messages": HELLO, "chat_template": TEXT}
    body["chat_template_kwargs"] = {"mood": "glad"}
    text = f"glad {HELLO[0]['content']}"
    answer = await chat(http, **body)
    # Its messages are text, since it shows neither calls nor reasoning.
    assert answer["choices"][0]["message"]["content"] == "<think>yes</think>"
    assert model.prompt() == text
    rendered = await render(http, **body)
    tokenized = await tokenize(http, **body)
    assert tokenized["tokens"] == rendered["token_ids"]
    assert model.tokenizer.text(tokenized["tokens"], skip_special=False) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_are_read_as_a_call_s_own_template_writes_them(
    http: Client, model: Model, stream: bool
) -> None:
    """Recognised anew; a stream that is taken up again is read in the same way."""
    model.says(CALL)
    body: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER], "chat_template": TEMPLATE + "!"}
    if stream:
        answer = await http.post(PATH, json=body | {"stream": True})
        again = await http.get(f"/v1/streams/{http.engine.requests[0].request_id}")
        assert again.text == answer.text
        assert again.text.count('"name":"weather"') == 1
    else:
        (call,) = (await chat(http, **body))["choices"][0]["message"]["tool_calls"]
        assert call["function"] == CALLED
    assert model.prompt().endswith("!")


async def test_tools_are_refused_with_a_template_whose_calls_are_unknown(http: Client) -> None:
    body = {"messages": HELLO, "tools": [WEATHER], "chat_template": "{{ tools }}"}
    error = (await http.post(PATH, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", "tools")


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{{ messages[0].content * 2**20 }}", "chat_template_failed"),
        ("{{ 7 / 0 }}", "invalid_messages"),
        ("a" * 65_537, "invalid_request"),
    ],
)
async def test_a_template_that_fails_is_named_as_the_call_s(
    http: Client, template: str, code: str
) -> None:
    answer = await http.post(PATH, json={"messages": HELLO, "chat_template": template})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert "the call's chat template" in error["message"] or error["param"] == "chat_template"
