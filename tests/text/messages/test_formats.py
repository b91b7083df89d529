"""The formats that come with the package, each against messages as its models write them."""

from __future__ import annotations

import pytest

from nano_inference.text.messages import (
    MessageFormat,
    MessageReader,
    Reading,
    Tool,
    call_body,
    opening_of,
)
from nano_inference.text.messages.message_format import known_formats

from .families import (
    FAMILIES,
    Family,
    Read,
    both,
    deltas_of,
    format_of_family,
    found_for,
    named,
    read,
)

CALLS = [
    ("get_weather", {"city": "Bari, “Süd” 東", "days": 3, "hourly": True}),
    ("stop-now.v2", {}),
    ("get_weather", {"city": "a\nb {c} [d] <e>", "places": [{"x": None}, 1.5]}),
]


REASONING = [name for name, family in FAMILIES.items() if family.reasoning[0]]
JSON = [name for name, family in FAMILIES.items() if family.is_json]

reasoning_families = pytest.mark.parametrize("family", REASONING, indirect=True)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def form(family: Family) -> MessageFormat:
    return format_of_family(family)


def test_every_format_is_one_of_a_family() -> None:
    known = {form.name for form in known_formats() if form.reads_calls}
    assert {family.format for family in FAMILIES.values()} == known


def test_a_model_that_only_reasons_has_the_format_think() -> None:
    family = FAMILIES["Qwen3"]._replace(chat_template="<think>", call="")
    form = found_for(family, "qwen3")
    assert form == named("think")
    assert both(form, "<think>\nHm.\n</think>\n\nYes.") == Read("Hm.", "Yes.", [], 0)


def test_a_family_is_found_by_its_chat_template(family: Family, form: MessageFormat) -> None:
    assert form.name == family.format
    unknown_type = found_for(family, "")
    assert unknown_type is not None
    same_family = {family.format, "hermes", "qwen"} if "<tool_call>" in family.call else set()
    assert unknown_type.name in (same_family or {family.format})


def test_reasoning_is_separated_where_the_template_has_it(
    family: Family, form: MessageFormat
) -> None:
    assert form.reads_reasoning == bool(family.reasoning[0])
    assert (form.reasoning is not None) == bool(family.reasoning[0])


def test_the_reader_reads_all_that_a_grammar_writes(family: Family, form: MessageFormat) -> None:
    if form.calls is None:
        assert not family.is_json
        return
    syntax = form.calls
    call = syntax.written("get_weather")
    text = syntax.open + call + syntax.between + call + syntax.close
    assert both(form, text) == Read("", "", [("get_weather", {})] * 2, 0)
    if form.reasoning is not None:
        text = form.reasoning.open + "Hm." + form.reasoning.close + text
        assert both(form, text) == Read("Hm.", "", [("get_weather", {})] * 2, 0)
    text = form.answer_open + "Yes."
    assert both(form, text) == Read("", "Yes.", [], 0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_calls(family: Family, form: MessageFormat, count: int) -> None:
    assert both(form, family.written(CALLS[:count])) == Read("", "", CALLS[:count], 0)


def test_a_name_of_128_characters(family: Family, form: MessageFormat) -> None:
    long = "get-weather.v2_" * 9
    for name in (long[:65], long[:128]):
        reading = Reading(tools=(Tool(name=name),))
        text = family.written([(name, {"city": "Bari"})])
        (call,) = deltas_of(MessageReader(form, reading, ""), [text]).calls
        assert (call.name, call.arguments) == (name, '{"city": "Bari"}')


def test_text_before_calls(family: Family, form: MessageFormat) -> None:
    content = "I look it up."
    text = family.answer + content + family.answered + family.written(CALLS)
    assert both(form, text) == Read("", content, CALLS, 0)


def test_text_alone(family: Family, form: MessageFormat) -> None:
    for content in ("Hello\n\n1 < 2, {a} [b] “c”\n", "", "\n", "a\n\n\nb"):
        assert both(form, family.answer + content) == Read("", content, [], 0)


@reasoning_families
def test_reasoning_before_text_and_calls(family: Family, form: MessageFormat) -> None:
    before, behind = family.reasoning
    text = before + "Hm,\n\nso." + behind
    assert both(form, text + family.written(CALLS)) == Read("Hm,\n\nso.", "", CALLS, 0)
    assert both(form, text + family.answer + "Yes.") == Read("Hm,\n\nso.", "Yes.", [], 0)


@reasoning_families
def test_reasoning_that_the_prompt_opens(family: Family, form: MessageFormat) -> None:
    before, behind = family.reasoning
    opening = opening_of(form, "…" + family.turn + before)
    assert opening == before
    text = "Hm." + behind + family.answer + "Yes."
    assert both(form, text, opening) == Read("Hm.", "Yes.", [], 0)


def test_enable_thinking_false_leaves_the_reasoning_before_the_first_token() -> None:
    """The template closes the reasoning in the prompt; what the model writes is all answer."""
    form = format_of_family(FAMILIES["Qwen3"])
    opening = opening_of(form, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert both(form, "The answer.", opening) == Read("", "The answer.", [], 0)
    written = FAMILIES["Qwen3"].written(CALLS)
    assert both(form, written, opening) == Read("", "", CALLS, 0)
    form = format_of_family(FAMILIES["DeepSeek-V3.1"])
    assert both(form, "The answer.", "</think>") == Read("", "The answer.", [], 0)
    form = format_of_family(FAMILIES["Gemma 4"])
    opening = "<|channel>thought\n<channel|>"
    assert both(form, "The answer.", opening) == Read("", "The answer.", [], 0)


@reasoning_families
def test_a_closing_mark_without_reasoning_is_dropped(family: Family, form: MessageFormat) -> None:
    """Models write it where a budget, or the prompt, has closed their reasoning before."""
    before, behind = family.reasoning
    mark = behind.removesuffix("<|start|>assistant")
    closed = before + behind
    yes, space = family.answer + "Yes.", mark[len(mark.rstrip()) :]
    for opening, text, content in (
        (before, f"Hm.{behind}{mark}{yes}", "Yes."),
        (closed, f"{mark}{mark}{yes}", "Yes."),
        (closed, f"{yes}{mark}No.{mark}", f"Yes.{space}No.{space}"),
        ("", f"{mark}{yes}", "Yes."),
    ):
        reasoning = "Hm." if opening == before else ""
        assert both(form, text, opening) == Read(reasoning, content, [], 0)
        assert both(form, text + family.written(CALLS), opening).calls == CALLS


def test_the_space_before_a_dropped_mark_belongs_to_it() -> None:
    form = format_of_family(FAMILIES["Qwen3"])
    assert both(form, "4 = 4.\n</think>\n\n4") == Read("", "4 = 4.\n\n4", [], 0)
    assert both(form, "so </think> it is</think>") == Read("", "so it is", [], 0)
    oops = "<tool_call>oops</tool_call>"
    assert both(form, f"{oops}</think>\nSo.") == Read("", f"{oops}\nSo.", [], 1)
    text = "Hm.</think></think>\nSo."
    found = read(form, text, opening="<think>\n", separates_reasoning=False)
    assert found == Read("", text, [], 0)


def test_calls_are_not_looked_for_in_reasoning() -> None:
    family = FAMILIES["Qwen3"]
    inner = family.written(CALLS[:1])
    text = f"<think>\nI could write {inner} here.\n</think>\n\nNo."
    found = both(format_of_family(family), text)
    assert found == Read(f"I could write {inner} here.", "No.", [], 0)


def test_marks_in_a_value_are_part_of_it(family: Family, form: MessageFormat) -> None:
    behind = family.call.split("{arguments}")[-1].strip()
    others = ["[TOOL_CALLS] ; {", '"', "\\", "</s>", "</tool_call>", "</parameter>", "</think>"]
    marks = {behind, *others, family.close, family.between}
    if family.argument == "elements":
        # No text holds the mark of its tags.
        marks = set(others)
    for mark in marks:
        values = (mark, f"a{mark}b", f"a {mark} b {mark}{mark} c", f"a\n{mark}\nb")
        calls = [("get_weather", {"city": value, "x": "1"}) for value in values]
        calls.append(("get_weather", {"city": mark}))
        assert both(form, family.written(calls)) == Read("", "", calls, 0)


@pytest.mark.parametrize(
    ("name", "mark"),
    [("Qwen3-Coder", "\n<parameter=x>"), ("Gemma 4", '<|"|>'), ("FunctionGemma", "<escape>")],
)
def test_a_call_with_ambiguous_values_is_text(name: str, mark: str) -> None:
    form = format_of_family(FAMILIES[name])
    for value in (mark, f"a{mark} b"):
        text = FAMILIES[name].written([("get_weather", {"city": value, "x": "1"})])
        assert both(form, text) == Read("", text, [], 1)


def xml(body: str) -> str:
    return f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>"


def test_marks_are_looked_at_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond them the call is text, and not another call."""
    monkeypatch.setattr(call_body, "_MOST_LOOKED_CHARS", 1000)
    text = xml("<parameter=city>\n" + "</tool_call>" * 40 + "\n</parameter>\n")
    assert both(named("qwen-xml"), text) == Read("", text, [], 1)


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=city>\nOslo\n",
        "<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n",
        "<parameter=city>\nOslo\n</parameter>\ndays: 3\n",
        "days: 3\n<parameter=city>\nOslo\n</parameter>\n",
        "<parameter=city>\nOslo\n</parameter>\n<parameter=city>\nRome\n</parameter>\n",
        "<parameter=city\nOslo\n</parameter>\n",
    ],
)
def test_no_argument_of_a_call_is_dropped(body: str) -> None:
    """A call with an argument that the parser would drop is text."""
    good = xml("<parameter=city>\n<parameter=x>\n</parameter>\n")
    assert both(named("qwen-xml"), good).calls == [("get_weather", {"city": "<parameter=x>"})]
    assert both(named("qwen-xml"), xml(body)) == Read("", xml(body), [], 1)
    mixed = both(named("qwen-xml"), f"{xml(body)}\n{good}")
    assert mixed.content.startswith(xml(body))


def test_a_call_without_a_closing_mark_is_complete_with_its_json(
    family: Family, form: MessageFormat
) -> None:
    written = Family(**family._asdict() | {"close": ""}).written(CALLS[:1])
    listed = family.open.strip().endswith("[")
    mark = family.close[: family.close.find("]") + 1] if listed else ""
    for end in ("\n</tool_call>", "<tool_call|>", "<end_function_call>", "<|call|>"):
        written = written.removesuffix(end)
    found = both(form, written + mark)
    # Of arguments between tags nobody can say whether there were more to come.
    expected = Read("", written, [], 1) if family.format == "glm" else None
    assert found == (expected or Read("", "", CALLS[:1], 0))


def test_gpt_oss_commentary_is_content() -> None:
    """Commentary for nobody in particular is for the user."""
    family = FAMILIES["gpt-oss"]
    text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    found = both(format_of_family(family), text + family.written(CALLS[:1]))
    assert found == Read("", "I look.", CALLS[:1], 0)


def test_gpt_oss_may_begin_its_header_anew() -> None:
    text = "<|channel|>commentary to=assistant<|channel|>final<|message|>Yes."
    assert both(named("gpt-oss"), text) == Read("", "Yes.", [], 0)


def test_llama_may_call_it_arguments() -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Bari"}}<|eot_id|>'
    assert both(named("llama"), text) == Read("", "", [("get_weather", {"city": "Bari"})], 0)


def test_elements_are_lists_or_objects_by_the_tools_schema() -> None:
    family, tool = (
        FAMILIES["MiniMax-M3"],
        Tool(
            name="mark",
            parameters={
                "type": "object",
                "properties": {
                    "at": {"$ref": "#/$defs/place"},
                    "tags": {"anyOf": [{"type": "string"}, {"type": "array"}]},
                    "item": {"type": "object"},
                    "none": {"type": "array"},
                },
                "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "string"}}}},
            },
        ),
    )
    given = {"at": {"zip": "0123"}, "tags": ["a", 1], "item": {"item": "b"}, "none": []}
    text = family.written([("mark", given)])
    found = read(named("minimax-m3"), [text], tools=(tool,))
    assert found.calls == [("mark", given)]
    for bad in (
        text.replace("</zip>", "</at>", 1),
        text.replace("<tags>", "<tags>x", 1),
        text.replace("<tags>", "<none>", 1).replace("</tags>", "</none>", 1),
        text.replace("<none>", "<at>" * 70, 1),
    ):
        assert read(named("minimax-m3"), [bad], tools=(tool,)).calls == []


def test_values_in_xml_are_of_the_types_that_the_tool_declares() -> None:
    text = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n"
        "<parameter=days>\n12\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=places>\n["a", {}]\n</parameter>\n</function>\n</tool_call>'
    )
    arguments = {"city": "12", "days": 12, "hourly": True, "places": ["a", {}]}
    assert both(named("qwen-xml"), text) == Read("", "", [("get_weather", arguments)], 0)
