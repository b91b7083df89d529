"""What agents send to `/v1/responses`: custom tools, namespaces, built-in tools, references."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nano_inference.config import Config
from nano_inference.gateway.serving.sealed import seal, unseal

from ...fake import Client, http_of, poster
from ...saying import Model
from .streamed import response_events
from .test_refusals import refusal
from .test_responses_tools import CLOCK, WEATHER, call

PATH = "/v1/responses"
NOTE: dict[str, Any] = {"type": "custom", "name": "note", "description": "Keeps a note."}
HOME: dict[str, Any] = {
    "type": "namespace",
    "name": "home",
    "description": "Of the house.",
    "tools": [WEATHER, NOTE],
}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False}
ASKED: dict[str, Any] = {"input": "Keep this.", "tools": [NOTE]}
IGNORED = "x-ignored-fields"
ENCRYPTED = {"include": ["reasoning.encrypted_content"], "store": False}

posted = poster(PATH, ASKED)


@pytest.fixture
def config(calling: Config) -> Config:
    return calling


def output_of(made: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": f"{made['type']}_output", "call_id": made["call_id"], "output": text}


# --- custom tools -----------------------------------------------------------------------------


async def test_a_custom_tool_is_a_function_of_a_text_and_its_call_has_the_text(
    http: Client, model: Model
) -> None:
    model.says(call("note", input='a "b"\n'))
    found = response_events(await http.post(PATH, json=ASKED | {"stream": True}))
    (item,) = found[-1]["response"]["output"]
    assert (
        item.items()
        >= {
            "type": "custom_tool_call",
            "status": "completed",
            "name": "note",
            "input": 'a "b"\n',
        }.items()
    )
    assert item["id"].startswith("ctc_")
    assert [(each["type"], each.get("delta"), each.get("input")) for each in found[3:5]] == [
        ("response.custom_tool_call_input.delta", 'a "b"\n', None),
        ("response.custom_tool_call_input.done", None, 'a "b"\n'),
    ]
    assert found[2]["item"] == item | {"status": "in_progress", "input": ""}
    told = json.loads(model.prompt().split("<|im_end|>")[0].partition("\n")[2])["function"]
    assert (told["name"], told["description"]) == ("note", "Keeps a note.")
    assert (told["parameters"]["required"], model.constraint) == (["input"], None)
    # Handed back, its turns are those of a function.
    model.says("Kept.")
    items = [{"role": "user", "content": "Keep this."}, item, output_of(item, "done")]
    await posted(http, input=items)
    written = '{"name": "note", "arguments": {"input": "a \\"b\\"\\n"}}'
    assert written in model.prompt()
    assert "<|im_start|>tool\ndone(note)<|im_end|>" in model.prompt()


async def test_other_arguments_of_a_custom_tool_are_its_input_as_written(
    http: Client, model: Model
) -> None:
    model.says(call("note", text="a"))
    assert json.loads((await posted(http))["output"][0]["input"]) == {"text": "a"}


async def test_a_text_file_is_shown_to_the_model_in_tags(http: Client, model: Model) -> None:
    model.says("Yes.")
    data = {"file_data": "data:text/plain;base64,YSBub3Rl", "filename": "a.txt"}
    shown = "<document>\n<title>a.txt</title>\na note\n</document>"
    kept = await posted(http, input=[{"role": "user", "content": [{"type": "input_file"} | data]}])
    assert shown in model.prompt()
    # Stored as it came.
    await posted(http, previous_response_id=kept["id"], input="b")
    assert shown in model.prompt()
    chat = {"messages": [{"role": "user", "content": [{"type": "file", "file": data}]}]}
    await http.post("/v1/chat/completions", json=chat)
    assert shown in model.prompt()


async def test_a_threshold_that_is_not_reached_changes_nothing(http: Client, model: Model) -> None:
    model.says("Yes.")
    rules = [{"type": "compaction", "compact_threshold": 1000}]
    answer = await http.post(PATH, json={"input": "a", "context_management": rules})
    assert (answer.status_code, answer.headers[IGNORED]) == (200, "context_management")


async def test_a_custom_tool_s_regular_expression_is_enforced(http: Client, model: Model) -> None:
    model.says(call("note", input="12"))
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}|x"}
    answer = await http.post(PATH, json=ASKED | {"tools": [NOTE | {"format": form}]})
    assert IGNORED not in answer.headers
    constraint = model.constraint
    assert constraint is not None
    assert "^(?:[0-9]{2}|x)$" in (constraint.lark or "")


async def test_a_custom_tool_s_grammar_is_enforced_and_told_to_the_model(
    http: Client, model: Model
) -> None:
    model.says(call("note", input="12"))
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF\n%import common.LF'}
    answer = await http.post(PATH, json=ASKED | {"tools": [NOTE | {"format": form}]})
    assert IGNORED not in answer.headers
    assert "terminal_lf" in (model.constraint.lark or "" if model.constraint else "")
    assert "lark grammar:\\nstart:" in model.prompt()


async def test_a_grammar_that_can_not_be_enforced_is_told_to_the_model_and_named(
    http: Client, model: Model
) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: NUMBER"}  # is not defined
    answer = await http.post(PATH, json=ASKED | {"tools": [NOTE | {"format": form}]})
    assert answer.headers[IGNORED] == "tools[].format"
    assert model.constraint is None
    assert "lark grammar:\\nstart: NUMBER" in model.prompt()


# --- namespaces and built-in tools ------------------------------------------------------------


async def test_the_tools_of_a_namespace_are_called_by_both_names(
    http: Client, model: Model
) -> None:
    model.says(f"{call('home__weather', city='Oslo')}\n{call('home__note', input='a')}")
    asked = {"tools": [HOME, WEATHER, CLOCK]}
    first = await posted(http, **asked)
    weather, note = first["output"]
    assert (weather["type"], weather["namespace"], weather["name"]) == (
        "function_call",
        "home",
        "weather",
    )
    assert (note["type"], note["namespace"], note["name"]) == ("custom_tool_call", "home", "note")
    assert first["tools"][:2] == [HOME, WEATHER]
    assert "Of the house." in model.prompt()
    outputs = [output_of(weather, "cold"), output_of(note, "done")]
    await posted(http, input=outputs, previous_response_id=first["id"], **asked)
    assert '"name": "home__weather", "arguments": {"city": "Oslo"}' in model.prompt()
    assert "cold(home__weather)" in model.prompt()
    chosen = {"type": "custom", "name": "note", "namespace": "home"}
    for choice in (
        chosen,
        {"type": "allowed_tools", "mode": "required", "tools": [chosen, SEARCH]},
    ):
        await posted(http, tool_choice=choice, **asked)
        assert "home__note" in (model.constraint.lark or "" if model.constraint else "")
        assert "home__weather" not in (model.constraint.lark or "" if model.constraint else "")


async def test_built_in_tools_and_their_items_are_left_out_and_named(
    http: Client, model: Model
) -> None:
    kinds = ("web_search_preview_2025_03_11", "local_shell", "shell", "computer_use", "tool_search")
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "file_search_call", "id": "f", "status": "completed"},
    ]
    tools = [*({"type": kind} for kind in kinds), CLOCK]
    body = {"input": items, "tools": tools, "tool_choice": {"type": "auto"}}
    answer = await http.post(PATH, json=body)
    assert answer.headers[IGNORED] == "input[], tools[]"
    assert "web_search" not in model.prompt()
    assert model.prompt().endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")
    # A stored response has only what its prompt was made of.
    where = f"{PATH}/{answer.json()['id']}/input_items"
    again = await http.get(where)
    assert [each["type"] for each in again.json()["data"]] == ["message"]
    assert IGNORED not in again.headers


async def test_what_changes_no_answer_is_taken_and_named(http: Client, model: Model) -> None:
    neutral = {
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "a",
        "safety_identifier": "a",
        "service_tier": "flex",
    }
    more = {"text": {"verbosity": "low"}, "include": ["web_search_call.action.sources"]}
    kept = {"metadata": {"a": "b"}, "store": True, "truncation": "auto"}
    answer = await http.post(PATH, json=ASKED | neutral | more | kept)
    assert answer.headers[IGNORED].split(", ") == [*neutral, "text.verbosity", "include[]"]
    assert answer.json()["service_tier"] == "default"


# --- items that are stored --------------------------------------------------------------------


async def test_references_are_the_items_of_stored_responses(
    http: Client, other: Client, model: Model
) -> None:
    model.says(f"Let me see.\n{call('weather', city='Oslo')}")
    asked = {"tools": [WEATHER]}
    first = await posted(http, **asked)
    text, called = first["output"]
    references = [{"type": "item_reference", "id": each["id"]} for each in (text, called)]
    question = {"role": "user", "content": "Keep this."}
    output = output_of(called, "cold")
    await posted(other, input=[question, *references, output], **asked)
    by_reference = model.prompt()
    await posted(http, input=[question, text, called, output], **asked)
    assert by_reference == model.prompt()
    # One that is there already is not repeated.
    more = {"previous_response_id": first["id"], "input": [*references, output]}
    await posted(http, **asked, **more)
    assert by_reference == model.prompt()
    for headers, reference in (
        ({"X-Tenant": "other"}, references[0]),
        ({}, {"id": "msg_0"}),
        ({}, {"type": "item_reference", "id": "a"}),
    ):
        body = ASKED | {"input": [reference]}
        refused = await http.post(PATH, json=body, headers=headers)
        assert refusal(refused, 404) == ("unknown_item", "input[0].id")


async def test_an_empty_input_continues_a_response_or_is_a_probe(
    http: Client, model: Model
) -> None:
    model.says("Yes.")
    first = await posted(http)
    await posted(http, input=[], previous_response_id=first["id"])
    assert model.prompt().endswith("Yes.<|im_end|>\n<|im_start|>assistant\n")
    await posted(http, input=[], instructions="Be brief.", tools=[])
    assert model.prompt() == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"
    await posted(http, input="", max_output_tokens=1, tools=[])
    assert model.prompt() == "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"


async def test_reasoning_comes_back_sealed(http: Client, other: Client, model: Model) -> None:
    """Clients that keep no reasoning themselves hand it back so, such as Codex."""
    model.says(f"<think>\nI keep it.\n</think>\n\n{call('note', input='a')}")
    found = response_events(await http.post(PATH, json=ASKED | ENCRYPTED | {"stream": True}))
    reasoning, called = found[-1]["response"]["output"]
    sealed = {name: reasoning[name] for name in ("type", "summary", "encrypted_content")}
    items = [{"role": "user", "content": "Keep this."}, sealed, called, output_of(called, "done")]
    model.says("Kept.")
    await posted(other, input=items)
    assert "<think>\nI keep it.\n</think>" in model.prompt()
    async with http_of(other._transport.app, headers={"X-Tenant": "b"}) as foreign:  # type: ignore[attr-defined]
        answer = await foreign.post(PATH, json=ASKED | {"input": items})
    assert answer.headers[IGNORED] == "input[].encrypted_content"
    assert "I keep it." not in model.prompt()


def test_a_sealed_text_is_for_its_kind_and_tenant_and_whole() -> None:
    sealed = seal("reasoning", "a", "text")
    assert unseal("reasoning", "a", sealed) == "text"
    for kind, tenant, text in (
        ("compaction", "a", sealed),
        ("reasoning", "b", sealed),
        ("reasoning", "a", sealed[:-6]),
        ("reasoning", "a", sealed[:-9] + "AAAAAAAA="),
        ("reasoning", "a", "ni1."),
        ("reasoning", "a", "gAAAAABm"),
        ("reasoning", "a", seal("reasoning", "a", "x" * (1 << 22))),
    ):
        assert unseal(kind, tenant, text) is None


# --- truncation -------------------------------------------------------------------------------


async def test_truncation_drops_the_oldest_turns_until_the_prompt_fits(
    http: Client, model: Model
) -> None:
    model.says("Yes.")
    length = 2048
    asked = {"tools": [], "truncation": "auto", "instructions": "Be brief."}
    turns: list[dict[str, Any]] = []
    for number in range(12):
        turns += [
            {"role": "user", "content": f"question {number}" + " a" * 300},
            {"role": "assistant", "content": "b"},
        ]
    made = await posted(http, input=[*turns, {"role": "user", "content": "last"}], **asked)
    prompt, tokens = model.prompt(), len(model.requests[-1].prompt_token_ids or ())
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nquestion ")
    assert "question 0" not in prompt
    assert "question 11" in prompt
    # One more would not leave an eighth of the length.
    one = (tokens - 20) // prompt.count("question")
    assert length - length // 8 - one < tokens <= length - length // 8
    assert (made["truncation"], made["status"]) == ("auto", "completed")
    listed = await http.get(f"{PATH}/{made['id']}/input_items?limit=100")
    assert len(listed.json()["data"]) == 25
    refused = await http.post(PATH, json=asked | {"input": "a" + " a" * 3000})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


# --- the catalogue ----------------------------------------------------------------------------


async def test_codex_gets_its_catalogue_of_models(http: Client) -> None:
    listed = (await http.get("/v1/models?client_version=0.171.0")).json()
    (card,), (entry,) = listed["data"], listed["models"]
    # Codex drops the whole list for a missing field; these are the ones that it requires.
    required = {
        "slug",
        "display_name",
        "base_instructions",
        "truncation_policy",
        "shell_type",
        "supported_reasoning_levels",
        "support_verbosity",
        "experimental_supported_tools",
        "visibility",
        "supported_in_api",
        "priority",
    }
    assert required <= entry.keys()
    assert (entry["slug"], entry["context_window"]) == (card["id"], card["max_model_len"])
    assert entry["truncation_policy"] == {"mode": "tokens", "limit": 256}
    assert "models" not in (await http.get("/v1/models")).json()
