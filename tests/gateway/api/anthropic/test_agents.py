"""Fields and blocks that agents send: taken, and named where they have no effect."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nano_inference.config import Config
from nano_inference.gateway.api.anthropic.bodies import CountBody, ThinkingBlock
from nano_inference.gateway.api.anthropic.signatures import signature_of, thinking_of
from nano_inference.gateway.serving.sealed import seal

from ...fake import Client, FakeEngine, app_of, http_of
from ...saying import calling_model, words_of
from .calling import TIME, WEATHER, says
from .test_messages import refusal

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
COUNTED = CountBody.__struct_fields__
USER: dict[str, Any] = {"role": "user", "content": "Hm?"}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return calling_model(tmp_path / "tiny")


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def said(role: str, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks), **more}


NO_REASONING = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


class Asking:
    """Posts messages, and reads the prompt."""

    def __init__(self, http: Client, config: Config) -> None:
        self._http, self._words = http, words_of(config)
        self.ignored: list[str] = []
        http.engine.outputs = says(*["Fine."] * 9)

    async def prompt(self, *messages: dict[str, Any], **fields: Any) -> str:
        body = {"max_tokens": 90, "messages": list(messages or (USER,))} | fields
        answer = await self._http.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        self.ignored = answer.headers.get("X-Ignored-Fields", "").split(", ")
        token_ids = self._http.engine.requests[-1].prompt_token_ids or ()
        counts = {name: each for name, each in body.items() if name in COUNTED}
        counted = await self._http.post(COUNT, json=counts)
        assert counted.json()["input_tokens"] == len(token_ids)
        return self._words.text(token_ids, skip_special=False)

    async def refused(self, *messages: dict[str, Any], **fields: Any) -> tuple[str, str | None]:
        body = {"max_tokens": 90, "messages": list(messages or (USER,))} | fields
        return refusal(await self._http.post(PATH, json=body))[1:]


@pytest.fixture
async def asking(http: Client, config: Config) -> Asking:
    return Asking(http, config)


async def test_fields_without_effect_are_named(asking: Asking) -> None:
    plain = await asking.prompt()
    fields: dict[str, Any] = {
        "betas": ["a"],
        "container": "c",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "fallbacks": [{"model": "x"}],
        "mcp_servers": [{"type": "url", "url": "http://example.org", "name": "x"}],
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "high"},
        "speed": "fast",
        "tools": [SEARCH, {"type": "mcp_toolset", "mcp_server_name": "x"}],
    }
    same = {"service_tier": "auto", "inference_geo": "global", "diagnostics": None}
    assert await asking.prompt(**fields, **same) == plain
    named = {each.partition(".")[0].partition("[")[0] for each in asking.ignored}
    assert named == set(fields)


async def test_the_answer_says_what_was_edited(http: Client) -> None:
    http.engine.outputs = says(*["Fine."] * 3)
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    thought = said("assistant", {"type": "thinking", "thinking": "Hm, so."}, text("So."))
    messages = [USER, thought, USER, thought, USER]
    body = {"messages": messages, "context_management": edits, "diagnostics": {"a": "b"}}
    answer = (await http.post(PATH, json=body | {"max_tokens": 9})).json()
    (applied,) = answer["context_management"]["applied_edits"]
    assert applied["cleared_thinking_turns"] == 1
    assert answer["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}
    del body["diagnostics"]
    counted = (await http.post(COUNT, json=body)).json()
    before = counted["context_management"]["original_input_tokens"]
    assert before - counted["input_tokens"] == applied["cleared_input_tokens"] > 0
    streamed = await http.post(PATH, json=body | {"max_tokens": 9, "stream": True})
    assert json.dumps(applied, separators=(",", ":")) in streamed.text


async def test_thinking_is_neutral_for_a_model_that_can_not_reason(config: Config) -> None:
    (config.engine.model_folder / "chat_template.jinja").write_text(NO_REASONING)
    gateway = msgspec.structs.replace(config.gateway, message_format="llama")
    engine = FakeEngine()
    app = app_of(engine, msgspec.structs.replace(config, gateway=gateway))
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}, "messages": [USER]}
    async with http_of(app) as http:
        for path, more in ((PATH, {"max_tokens": 9}), (COUNT, {})):
            answer = await http.post(path, json=thinking | more)
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Ignored-Fields"].startswith("thinking")
    assert engine.requests[0].sampling.constraint is None


# --- tools ----------------------------------------------------------------------------------------


def offered(prompt: str) -> list[str]:
    """The names of the tools in a prompt, in order."""
    first = [part.partition("<|im_end|>")[0] for part in prompt.split("<|im_start|>system\n")[1:]]
    return [json.loads(each)["function"]["name"] for each in first if each.startswith('{"type"')]


async def test_a_deferred_tool_is_offered_once_it_is_found(asking: Asking) -> None:
    deferred = WEATHER | {"defer_loading": True}
    search = TIME | {"name": "search"}
    tools = {"tools": [deferred, search]}
    assert offered(await asking.prompt(**tools)) == ["search"]
    found = {"type": "tool_reference", "tool_name": "weather"}
    gone = {"type": "tool_reference", "tool_name": "gone"}
    messages = [
        USER,
        said("assistant", {"type": "tool_use", "id": "a", "name": "search", "input": {}}),
        said("user", {"type": "tool_result", "tool_use_id": "a", "content": [found, gone]}),
    ]
    prompt = await asking.prompt(*messages, **tools)
    assert offered(prompt) == ["search", "weather"]
    assert "The tool weather can be called" in prompt
    assert asking.ignored == ["messages[].content[].content[]"]
    # Anthropic's own search is left out, so nothing would find it.
    own = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert offered(await asking.prompt(tools=[deferred, own])) == ["weather"]
    choice = {"type": "tool", "name": "weather"}
    assert "weather" in offered(await asking.prompt(**tools, tool_choice=choice))


async def test_tools_change_within_the_conversation(asking: Asking) -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return said("system", {"type": f"tool_{kind}", "tool": tool})

    new = {"type": "tool_definition", "definition": TIME | {"name": "new"}}
    by_name = {"type": "tool_reference"}
    tools = [TIME, WEATHER | {"defer_loading": True}]
    messages = [
        USER,
        change("addition", **by_name, name="weather"),
        change("addition", **new),
        change("removal", **by_name, name="time"),
    ]
    assert offered(await asking.prompt(*messages, tools=tools)) == ["weather", "new"]
    unknown = change("addition", **by_name, name="x")
    error = await asking.refused(USER, unknown, tools=tools)
    assert error == ("invalid_request", "messages[1].content[0].tool.name")


@pytest.mark.parametrize(
    ("tool", "wanted"),
    [
        ({"type": "bash_20250124", "name": "bash"}, "restart"),
        (
            {
                "type": "text_editor_20250728",
                "name": "str_replace_based_edit_tool",
                "max_characters": 9,
            },
            "insert_text",
        ),
        ({"type": "text_editor_20241022", "name": "str_replace_editor"}, "undo_edit"),
        ({"type": "memory_20250818", "name": "memory"}, "/memories"),
        (
            {
                "type": "computer_20251124",
                "name": "computer",
                "display_width_px": 1024,
                "display_height_px": 768,
                "enable_zoom": True,
            },
            "1024 x 768",
        ),
    ],
)
async def test_a_tool_that_the_client_executes_is_a_function(
    asking: Asking, tool: dict[str, Any], wanted: str
) -> None:
    prompt = await asking.prompt(tools=[tool], tool_choice={"type": "any"})
    assert offered(prompt) == [tool["name"]]
    assert wanted in prompt


async def test_examples_of_an_input_are_described(asking: Asking) -> None:
    prompt = await asking.prompt(tools=[WEATHER | {"input_examples": [{"city": "Bern"}]}])
    assert 'Examples of its input:\\n{\\"city\\": \\"Bern\\"}' in prompt


# --- content --------------------------------------------------------------------------------------

PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "It is cold."},
        {"type": "content", "content": "It is cold."},
        {"type": "content", "content": [text("It is cold.")]},
        {
            "type": "base64",
            "media_type": "text/plain",
            "data": base64.b64encode(b"It is cold.").decode(),
        },
    ],
)
async def test_a_document_of_text_is_read(asking: Asking, source: dict[str, Any]) -> None:
    block = document(source, title="Bern", context="today", citations={"enabled": False})
    prompt = await asking.prompt(said("user", block, text("How is it?")))
    lines = ["<document>", "<title>Bern</title>", "<context>today</context>", "It is cold."]
    assert "\n".join([*lines, "</document>", "How is it?"]) in prompt


async def test_a_search_result_is_read_in_a_message_and_in_a_result(asking: Asking) -> None:
    block = {"type": "search_result", "source": "s", "title": "t", "content": [text("cold")]}
    wanted = "<search_result>\n<source>s</source>\n<title>t</title>\ncold\n</search_result>"
    assert wanted in await asking.prompt(said("user", block))
    use = said("assistant", {"type": "tool_use", "id": "a", "name": "time", "input": {}})
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    assert wanted in await asking.prompt(USER, use, said("user", result), tools=[TIME])


@pytest.mark.parametrize(
    ("block", "param"),
    [
        (document(PDF), "source.media_type"),
        (document({"type": "url", "url": "http://example.org/a.pdf"}), "source.type"),
        (document({"type": "file", "file_id": "f"}), "source.type"),
        (document(PDF | {"media_type": "text/plain", "data": "/w=="}), "source.data"),
        (
            document({"type": "content", "content": "a"}, citations={"enabled": True}),
            "citations.enabled",
        ),
        ({"type": "container_upload", "file_id": "f"}, ""),
    ],
)
async def test_a_document_that_can_not_be_read_is_refused(
    asking: Asking, block: dict[str, Any], param: str
) -> None:
    _, found = await asking.refused(said("user", block))
    assert found == "messages[0].content[0]" + (f".{param}" if param else "")


async def test_calls_of_anthropic_s_own_tools_are_left_out(asking: Asking) -> None:
    own = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "mcp_tool_use", "id": "m", "name": "x", "server_name": "y", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": []},
        {"type": "redacted_thinking", "data": "x"},
    ]
    plain = await asking.prompt(USER, said("assistant", text("So.")), USER)
    assert await asking.prompt(USER, said("assistant", *own, text("So.")), USER) == plain
    assert asking.ignored == ["messages[].content[]"]
    only = await asking.prompt(USER, said("assistant", *own[:2]), USER)
    assert only == await asking.prompt(USER, USER)


async def test_a_summary_stands_for_all_before_it(asking: Asking) -> None:
    summary = {"type": "compaction", "content": "They said hm."}
    messages = [USER, said("assistant", text("Old."), summary, text("New.")), USER]
    same = [{"role": "user", "content": "They said hm."}, said("assistant", text("New.")), USER]
    assert await asking.prompt(*messages) == await asking.prompt(*same)
    failed = said("assistant", {"type": "compaction", "content": None}, text("So."))
    assert await asking.prompt(USER, failed, USER) == await asking.prompt(
        USER, said("assistant", text("So.")), USER
    )


async def test_a_system_message_is_shown_as_long_as_it_says(asking: Asking) -> None:
    once = said("system", text("Be quick."), clear_at="next_user_message")
    answer = said("assistant", text("So."))
    assert "Be quick." in await asking.prompt(USER, once)
    assert "Be quick." not in await asking.prompt(USER, once, answer, USER)
    always = said("system", text("Be quick."), output_config={"effort": "low"})
    assert "Be quick." in await asking.prompt(USER, always, answer, USER)


async def test_omitted_thinking_comes_back_by_its_signature(asking: Asking, http: Client) -> None:
    http.engine.outputs = says(*["<think>\nBern, then.\n</think>\n\nFine."] * 2)
    body: dict[str, Any] = {"max_tokens": 90, "messages": [USER]}
    body |= {"thinking": {"type": "adaptive", "display": "omitted"}}
    message = (await http.post(PATH, json=body)).json()
    assert message["content"][0]["thinking"] == ""
    http.engine.outputs = says(*["Fine."] * 3)
    prompt = await asking.prompt(USER, {"role": "assistant", "content": message["content"]}, USER)
    assert "<think>\nBern, then." in prompt
    for signature in ("ni1.%", signature_of("Hm.", "b", omitted=True)):
        other = {"type": "thinking", "thinking": "", "signature": signature}
        told = await asking.prompt(USER, said("assistant", other, text("So.")), USER)
        assert "<think>" not in told


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("Hm, so.", "Hm, so."),
        ("Hm, so.Hm, so.", "Hm, so."),
        ("Hm, no.Hm, so.", "Hm, no.Hm, so."),
        ("Hm", "Hm"),
    ],
)
def test_thinking_that_a_client_doubles_is_read_once(sent: str, read: str) -> None:
    signature = signature_of("Hm, so.", "a", omitted=False)
    block = ThinkingBlock(type="thinking", thinking=sent, signature=signature)
    assert thinking_of(block, "a") == read
    assert thinking_of(block, "b") == sent
    for foreign in ("", "x", signature[:-2], seal("shown_thinking", "a", "x:y")):
        assert thinking_of(msgspec.structs.replace(block, signature=foreign), "a") == sent


BILLING = "x-anthropic-billing-header: cc_version=2.1.332; cch={};"


async def test_a_billing_line_does_not_change_the_prompt(asking: Asking) -> None:
    """So the prompt of the next turn, with another line, begins with that of this turn."""
    prompts = [
        await asking.prompt(system=[text(BILLING.format(number)), text("Be brief.")])
        for number in range(2)
    ]
    assert asking.ignored == ["x-anthropic-billing-header"]
    assert prompts == [await asking.prompt(system="Be brief.")] * 2
    assert await asking.prompt(system=BILLING) == await asking.prompt()
    assert "x-anthropic" in await asking.prompt(system=f"Be brief.\n{BILLING}")
