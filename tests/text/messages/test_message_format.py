"""The detected format, and the errors for formats that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import ConfigError, RequestError
from nano_inference.text.messages import MessageFormat, find_format, opening_of

from .families import FAMILIES, Read, found_for, named, read

QWEN3 = FAMILIES["Qwen3"].chat_template

TEMPLATE: dict[str, Any] = {
    "start_anchor": "Assistant:",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
WITHOUT_CALLS = TEMPLATE | {"fields": {"content": {}, "thinking": TEMPLATE["fields"]["thinking"]}}


def written(folder: Path, content: object) -> str:
    path = folder / "format.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_off_is_none() -> None:
    assert find_format("off", TEMPLATE, QWEN3, "qwen3") is None


def test_an_unknown_template_has_no_format() -> None:
    """It writes calls as nobody reads them, or none."""
    for call in ("I call {name}: {arguments}.", ""):
        family = FAMILIES["Gemma 4"]._replace(
            chat_template="<|turn>model", call=call, reasoning=("", "")
        )
        assert found_for(family, "gemma4") is None


def test_a_name_is_taken_as_it_is() -> None:
    assert find_format("qwen", TEMPLATE, "", "") == named("qwen")


def test_the_model_type_decides_where_several_fit() -> None:
    found = {kind: found_for(FAMILIES["Qwen3"], kind) for kind in ("qwen3", "llama")}
    assert {kind: form and form.name for kind, form in found.items()} == {
        "qwen3": "qwen",
        "llama": "hermes",
    }


def test_calls_that_the_chat_template_does_not_write_are_text() -> None:
    """Not even if it speaks of them."""
    family = FAMILIES["Qwen3"]._replace(call="I call {name}: {arguments}.")
    form = found_for(family, "qwen3")
    assert (form.reads_calls, form.calls, form.reads_reasoning) == (False, None, True)
    call = '<tool_call>{"name": "get_weather"}</tool_call>'
    assert read(form, "<think>a</think>" + call) == Read("a", call, [], 0)


def test_calls_of_a_template_that_writes_none_are_found_by_their_marks() -> None:
    """Such a model's calls stay in the text of the history."""
    for call in ("", "refused"):
        family = FAMILIES["Qwen3"]._replace(call=call)
        assert found_for(family, "qwen3") == named("qwen")


def test_calls_with_arguments_that_a_template_writes_as_no_json_are_found_by_their_begin() -> None:
    family = FAMILIES["InternLM"]

    def rendered(turns: Any, begin: bool) -> str:
        return family.rendered(turns, begin).replace('"city"', "'city'")

    assert find_format("auto", None, "", "", rendered).calls == named("internlm").calls


def test_reasoning_that_the_chat_template_does_not_show_is_text() -> None:
    form = found_for(FAMILIES["Qwen2.5"], "qwen2")
    assert (form.reads_reasoning, form.reasoning) == (False, None)
    assert read(form, "<think>a</think>") == Read("", "<think>a</think>", [], 0)


def test_reasoning_may_be_that_of_another_format() -> None:
    family = FAMILIES["Llama 3"]._replace(reasoning=("<think>\n", "\n</think>\n\n"))
    form = found_for(family, "llama")
    assert (form.name, form.calls) == ("llama", named("llama").calls)
    text = "<think>\nHm.\n</think>\n\n" + family.written([("get_weather", {"city": "Rome"})])
    assert read(form, text) == Read("Hm.", "", [("get_weather", {"city": "Rome"})], 0)


def test_reasoning_that_the_prompt_begins_may_lack_its_mark_in_the_history() -> None:
    family = FAMILIES["Apriel 1.6"]
    before = family.reasoning[0]

    def rendered(turns: Any, begin: bool) -> str:
        text = family.rendered(turns, False).replace(before, "")
        return text + (family.turn + before if begin else "")

    form = find_format("auto", None, family.turn, "", rendered)
    assert (form.name, form.reasoning) == ("apriel", named("apriel").reasoning)
    text = "Hm." + family.reasoning[1] + "Yes."
    assert read(form, text, opening=opening_of(form, family.turn + before)).reasoning == "Hm."


def test_the_begin_of_a_turn_is_that_of_the_templates_prompts() -> None:
    family = FAMILIES["Qwen3"]._replace(turn="<|start_of_role|>assistant<|end_of_role|>")
    form = found_for(family, "")
    assert opening_of(form, f"Hi.{family.turn}Yes.\nGo on.{family.turn}<think>\n") == "<think>\n"


def test_a_template_that_fails_has_no_format() -> None:
    def fails(turns: object, begin: bool) -> str:
        raise RequestError("it fails", code="chat_template_failed")

    assert find_format("auto", None, "{{ messages }}", "qwen3", fails) is None


def test_the_tokenizers_own_comes_before_ours() -> None:
    ours = named("qwen")
    fields = dict(ours.response_template["fields"])
    fields["thinking"] = fields.pop("reasoning_content")
    own = ours.response_template | {"fields": fields}
    form = found_for(FAMILIES["Qwen3"], "qwen3", own)
    assert form.response_template == own
    assert (form.calls, form.reasoning) == (ours.calls, ours.reasoning)
    del fields["tool_calls"]
    without = found_for(FAMILIES["Qwen3"], "qwen3", own)
    assert (without.calls, without.reasoning) == (None, ours.reasoning)


def test_a_tokenizer_format_drops_spaces_around_marks() -> None:
    """Transformers strips them, in a text that grows as well."""
    form = find_format("auto", TEMPLATE, "", "unknown")
    call = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    text = f"<t>\n a b \n</t>\n\nText.\n<c> {json.dumps(call)}\n</c>"
    wanted = Read("a b", "Text.", [("get_weather", {"city": "Oslo"})], 0)
    assert read(form, text) == read(form, [text]) == wanted
    kept = {"open": "<t>", "close": "</t>", "content_args": {"strip": False}}
    fields = TEMPLATE["fields"] | {"thinking": kept}
    form = find_format("auto", TEMPLATE | {"fields": fields}, "", "unknown")
    assert read(form, text).reasoning == "\n a b \n"


def test_a_tokenizer_format_with_other_marks_has_no_call_syntax() -> None:
    for form in (
        find_format("auto", TEMPLATE, "", "qwen3"),
        found_for(FAMILIES["Qwen3"], "qwen3", TEMPLATE),
    ):
        assert form.reads_calls
        assert form.reads_reasoning
        assert (form.calls, form.reasoning) == (None, None)
        assert read(form, "<t>a</t>b") == Read("a", "b", [], 0)


def test_a_users_file(tmp_path: Path) -> None:
    given = {
        "name": "mine",
        "response_template": TEMPLATE,
        "calls": {"before": '<c>{"name": "', "middle": '", "arguments": ', "after": "}</c>"},
        "reasoning": {"open": "<t>", "close": "</t>"},
    }
    form = find_format(written(tmp_path, given), None, QWEN3, "qwen3")
    assert (form.name, form.response_template) == ("mine", TEMPLATE)
    assert form.reasoning is not None
    call = form.calls.before + "get_weather" + form.calls.middle + "{}" + form.calls.after
    assert read(form, "<t>a</t>" + call) == Read("a", "", [("get_weather", {})], 0)


def test_a_users_file_may_be_a_response_template(tmp_path: Path) -> None:
    form = find_format(written(tmp_path, TEMPLATE), None, "", "")
    assert (form.response_template, form.calls) == (TEMPLATE, None)
    assert read(form, "<t>a</t>b") == Read("a", "b", [], 0)


def _with(**fields: Any) -> dict[str, Any]:
    return TEMPLATE | {"fields": TEMPLATE["fields"] | fields}


BAD_TEMPLATES = {
    "no object": ([TEMPLATE], "dict|Expected `object`"),
    "unknown keys": (TEMPLATE | {"feilds": {}}, "feilds"),
    "unknown keys in a field": (_with(content={"opn": "x"}), "opn"),
    "no fields": ({"start_anchor": "x", "fields": {}}, "fields"),
    "no field that is known": ({"start_anchor": "x", "fields": {"text": {}}}, "tool_calls"),
    "no anchor": ({"fields": {"content": {}}}, "start_anchor"),
    "a pattern that is none": (_with(thinking={"open_pattern": "("}), "open_pattern"),
    "a pattern that is no text": (_with(thinking={"open_pattern": 5}), "response template"),
    "a mark that is no text": (_with(thinking={"open": 5}), "open"),
    "a parser that is unknown": (_with(content={"content": "yaml"}), "yaml"),
    "two fields without marks": (_with(thinking={}), "thinking"),
    "calls without a mark": (
        {"start_anchor": "x", "fields": {"tool_calls": {"content": "json"}}},
        "tool_calls",
    ),
    "a body that is unknown": (
        _with(tool_calls={"open": "<c>", "content": "text", "content_args": {"as": "lisp"}}),
        "lisp",
    ),
    "marks without width": (
        _with(thinking={"open_pattern": "a*", "close_pattern": "b*"}),
        "thinking",
    ),
}


@pytest.mark.parametrize(("template", "why"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_a_template_that_cant_be_used(tmp_path: Path, template: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        find_format(written(tmp_path, template), None, "", "")
    assert str(tmp_path / "format.json") in raised.value.message
    assert "gateway.message_format" in raised.value.message
    with pytest.raises(ConfigError, match=why) as raised:
        find_format("auto", template, "", "")
    assert "tokenizer_config.json" in raised.value.message
    assert find_format("off", template, "", "") is None


NAMED: dict[str, Any] = {"name": "a", "response_template": TEMPLATE}
NO_FIELDS = {"start_anchor": "x", "fields": {"content": {}}}
OTHER_MARKS = {"before": '<d>{"name": "', "middle": '", "arguments": ', "after": "}</d>"}
CALLS = {"before": "a", "middle": "b", "after": "c"}

BAD_FILES = {
    "no JSON": ("{", "truncated"),
    "no text": ("\udcff", "UTF-8|malformed"),
    "nested without end": ("[" * 100_000, "recursion|depth"),
    "too large": ('{"name": "' + "x" * (1 << 20) + '"}', "1048576"),
    "unknown keys": (NAMED | {"call": 1}, "call"),
    "no name": ({"response_template": TEMPLATE}, "name"),
    "calls that are none": (NAMED | {"calls": {"before": "a"}}, "middle"),
    "calls that can't be read": (
        NAMED | {"response_template": WITHOUT_CALLS, "calls": CALLS},
        "tool_calls",
    ),
    "calls with other marks": (NAMED | {"calls": OTHER_MARKS}, "tool_calls"),
    "reasoning with other marks": (
        NAMED | {"reasoning": {"open": "<think>", "close": "</think>"}},
        "reasoning",
    ),
    "reasoning that can't be read": (
        NAMED | {"response_template": NO_FIELDS, "reasoning": {"open": "a", "close": "b"}},
        "reasoning",
    ),
}


@pytest.mark.parametrize(("content", "why"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cant_be_used(tmp_path: Path, content: object, why: str) -> None:
    path = tmp_path / "format.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=why) as raised:
        find_format(str(path), None, "", "")
    assert str(path) in raised.value.message


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match=r"gateway\.message_format.*qwen"):
            find_format(str(path), None, "", "")


def test_the_opening_is_the_text_after_the_last_turn_mark() -> None:
    prompt = "<|im_start|>assistant\nOne.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert opening_of(named("qwen"), prompt) == "<think>\n"
    assert opening_of(named("qwen"), prompt[:-8]) == ""


def test_a_prompt_in_which_no_turn_begins_has_no_opening() -> None:
    """It may say much of marks: the whole conversation is no part of the message."""
    assert opening_of(named("qwen"), "Write <tool_call> to call.\nAssistant: ") == ""


def test_formats_are_values() -> None:
    form = found_for(FAMILIES["Qwen3"], "qwen3")
    assert form == found_for(FAMILIES["Qwen3"], "qwen3")
    assert form != MessageFormat(name="qwen", response_template=TEMPLATE)
