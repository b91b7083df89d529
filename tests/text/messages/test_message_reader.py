"""Text that is no call stays text, and the result does not depend on the cuts of the text."""

from __future__ import annotations

import json
from functools import partial

import msgspec
import pytest

from nano_inference.text.messages import MessageFormat, MessageReader, Reading

from .families import FAMILIES, TOOLS, Read, deltas_of, format_of_family, joined, named, read
from .families import both as both_in

QWEN = named("qwen")
GOOD = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bari"}}\n</tool_call>'
CALL = ("get_weather", {"city": "Bari"})


both = partial(both_in, QWEN)


def wrapped(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


NO_CALLS = {
    "no JSON": "get_weather(Bari)",
    "nothing": "",
    "broken JSON": '{"name": "get_weather", "arguments": {"city": }}',
    "two values": '{"name": "get_weather", "arguments": {}} {}',
    "no name": '{"arguments": {}}',
    "a name that is no text": '{"name": ["get_weather"], "arguments": {}}',
    "an unknown tool": '{"name": "get_time", "arguments": {}}',
    "no object": '["get_weather", {}]',
    "a number": "12",
    "a list in which one is no call": '[{"name": "get_weather", "arguments": {}}, 1]',
    "arguments that are a list": '{"name": "get_weather", "arguments": ["Bari"]}',
    "arguments that are null": '{"name": "get_weather", "arguments": null}',
    "arguments that are a text": '{"name": "get_weather", "arguments": "Bari"}',
    "arguments that are the text of a list": '{"name": "get_weather", "arguments": "[]"}',
    "NaN": '{"name": "get_weather", "arguments": {"days": NaN}}',
    "infinity": '{"name": "get_weather", "arguments": {"days": -Infinity}}',
    "a number beyond all": '{"name": "get_weather", "arguments": {"days": 1e999}}',
    "digits without end": '{"name": "get_weather", "arguments": {"days": 1' + "0" * 9999 + "}}",
    "nested deeply": '{"name": "get_weather", "arguments": {"places": ' + "[" * 20_000,
    "nested deeply and whole": '{"name": "get_weather", "arguments": {"places": '
    + "[" * 20_000
    + "]" * 20_000
    + "}}",
    "half a surrogate pair": r'{"name": "get_weather", "arguments": {"city": "\ud83d"}}',
    "half a surrogate pair as a name": r'{"name": "\udc00", "arguments": {}}',
    "a string with a line break": '{"name": "get_weather", "arguments": {"city": "a\nb"}}',
}


@pytest.mark.parametrize("inner", NO_CALLS.values(), ids=NO_CALLS)
def test_invalid_calls_are_text(inner: str) -> None:
    bad = wrapped(inner)
    assert both(f"Let me.\n{bad}\nHm. {GOOD}") == Read("", f"Let me.\n{bad}\nHm.", [CALL], 1)


def test_a_malformed_call_between_two_others() -> None:
    bad = wrapped("oops")
    assert both(f"{GOOD}\n{bad}\n{GOOD}{bad}") == Read("", f"{bad}\n{bad}", [CALL, CALL], 2)


def test_a_string_that_is_not_closed_is_text_in_the_end() -> None:
    bad = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bari}}</tool_call> and then'
    assert both(bad) == Read("", bad, [], 1)


@pytest.mark.parametrize("form", ["mistral", "mistral-args", "gemma", "gpt-oss", "llama"])
def test_invalid_calls_are_text_in_other_formats(form: str) -> None:
    opens = {
        "mistral": "[TOOL_CALLS][",
        "mistral-args": "[TOOL_CALLS]get_weather[ARGS]",
        "gemma": "<|tool_call>call:get_weather",
        "gpt-oss": "<|channel|>commentary to=functions.get_weather<|message|>",
        "llama": "<|python_tag|>",
    }
    bad = opens[form] + '{"city: oops'
    assert both_in(named(form), "Well. " + bad) == Read("", "Well. " + bad, [], 1)


def test_several_calls_between_two_marks() -> None:
    form = named("mistral")
    whole = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bari"}}, '
    good = whole + '{"name": "stop-now.v2", "arguments": {}}]'
    assert both_in(form, good) == Read("", "", [CALL, ("stop-now.v2", {})], 0)
    bad = whole + '{"name": "unknown", "arguments": {}}]'
    assert both_in(form, bad) == Read("", bad, [], 1)
    assert both_in(form, "[TOOL_CALLS] []") == Read("", "[TOOL_CALLS] []", [], 1)


def test_marks_in_many_strings_of_a_call() -> None:
    """So many that the JSON is no longer read at each of them."""
    texts = ["</tool_call>", '"</tool_call>\\', "a"] * 100
    text = GOOD.replace('"Bari"', json.dumps(texts))
    for pieces in ([text], text):
        found = read(QWEN, pieces)
        assert [arguments["city"] for _, arguments in found.calls] == [texts]
        assert (found.content, found.malformed) == ("", 0)


def test_arguments_may_be_the_text_of_an_object() -> None:
    inner = json.dumps({"name": "get_weather", "arguments": json.dumps(CALL[1])})
    assert both(wrapped(inner)) == Read("", "", [CALL], 0)


def test_arguments_may_be_left_out() -> None:
    assert both(wrapped('{"name": "get_weather"}')) == Read("", "", [("get_weather", {})], 0)


def test_arguments_have_the_form_that_models_write() -> None:
    inner = (
        '{"name":"get_weather","arguments":{"city":"M\\u00fcn\\nchen","days":12345678901234567890}}'
    )
    delta = deltas_of(MessageReader(QWEN, Reading(tools=TOOLS), ""), [wrapped(inner)])
    assert delta.calls[0].arguments == '{"city": "Mün\\nchen", "days": 12345678901234567890}'


def test_a_call_cut_off_is_text_and_not_malformed() -> None:
    for end in range(len("<tool_call>"), len(GOOD) - len("}\n</tool_call>")):
        text = "Hm. " + GOOD[:end]
        assert both(text, cut_off=True) == Read("", text, [], 0)
        assert both(text) == Read("", text, [], 1)


def test_half_a_mark_at_the_end_is_text() -> None:
    for end in range(1, len("<tool_call>")):
        text = "1 " + "<tool_call>"[:end]
        assert both(text) == Read("", text, [], 0)


def test_json_that_is_whole_is_a_call_however_the_message_ends() -> None:
    for text, form in (
        ('{"name": "get_weather", "parameters": {"city": "Bari"}}', named("llama")),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Bari"}', named("mistral-args")),
        (GOOD.removesuffix("\n</tool_call>"), QWEN),
    ):
        for cut_off in (False, True):
            assert both_in(form, text, cut_off=cut_off) == Read("", "", [CALL], 0)


def test_without_tools_marks_are_text() -> None:
    found = read(QWEN, "Hm. " + GOOD, tools=())
    assert found == Read("", "Hm. " + GOOD, [], 0)


def test_reasoning_can_stay_in_the_text() -> None:
    for name in ("Qwen3", "gpt-oss", "Magistral"):
        family = FAMILIES[name]
        before, behind = family.reasoning
        text = before + "I  think\nso." + behind + family.answer + "Yes."
        form = format_of_family(family)
        found = read(form, text, separates_reasoning=False)
        reasoning = before + "I  think\nso." + behind.removesuffix("<|start|>assistant")
        assert found == Read("", reasoning + "Yes.", [], 0)
        assert read(form, [text], separates_reasoning=False) == found


def test_reasoning_that_stays_in_the_text_hides_calls_as_well() -> None:
    text = f"<think>\n{GOOD}\n</think>\n\nNo."
    assert read(QWEN, text, separates_reasoning=False) == Read("", text, [], 0)


def test_reasoning_that_is_not_closed_stays_reasoning() -> None:
    assert both("Hm, </thi", opening="<think>\n") == Read("Hm, </thi", "", [], 0)


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\nHm,"])
def test_calls_at_the_end_of_reasoning_that_is_not_closed_are_calls(opening: str) -> None:
    """Some models forget the mark; what they wrote before is reasoning."""
    before = "<think>\nHm," if not opening else "Hm," * opening.endswith("\n")
    thought = before.removeprefix("<think>\n")
    for calls in (f"{GOOD}\n{GOOD}", GOOD.removesuffix("</tool_call>") * 1, f"\n{GOOD}\n"):
        count = calls.count("get_weather")
        assert both(before + calls, opening) == Read(thought, "", [CALL] * count, 0)
    found = read(QWEN, f"{before}{GOOD}", opening=opening, separates_reasoning=False)
    assert found == Read("", before, [CALL], 0)


def test_calls_in_reasoning_that_goes_on_are_reasoning() -> None:
    for text in (
        f"Maybe {GOOD} or not.",
        f"Maybe {GOOD}{GOOD.replace('get_weather', 'other')}",
        f"{GOOD.replace('{', '', 1)}",
        "Between <tool_call> and </tool_call>.",
        GOOD[:-20],
    ):
        for end, content in (("", ""), ("\n</think>\n\nYes.", "Yes.")):
            assert both(text + end, "<think>\n") == Read(text, content, [], 0)
    assert both(GOOD + "</think>", "<think>\n") == Read(GOOD, "", [], 0)
    assert both(f"Hm {GOOD}", "<think>\n", cut_off=True) == Read(f"Hm {GOOD}", "", [], 0)


def test_reasoning_that_mentions_a_mark_is_not_held_back() -> None:
    reader = MessageReader(QWEN, Reading(opening="<think>\n", tools=TOOLS), "")
    assert reader.feed("So <tool_call> is").reasoning == "So <tool_call> is"
    assert reader.feed(f" a mark.{GOOD}").reasoning == " a mark."
    assert [call.name for call in reader.finish().calls] == ["get_weather"]


def test_text_of_the_prompt_is_not_repeated() -> None:
    """Neither as text, nor where a mark was held back."""
    assert both("pon a time.", opening="Once u") == Read("", "pon a time.", [], 0)
    assert both("upon a time.", opening="Once \n ") == Read("", "upon a time.", [], 0)
    assert both("ing", opening="<think>\nso <") == Read("ing", "", [], 0)
    assert both("cool_call>", opening="a <") == Read("", "cool_call>", [], 0)
    assert both("ol_call>x</tool_call>", opening="a <to") == Read(
        "", "ol_call>x</tool_call>", [], 1
    )
    assert both(GOOD[30:], opening=GOOD[:30]) == Read("", "", [CALL], 0)
    oops = "oops" + GOOD[30:]
    assert both(oops, opening="Hm." + GOOD[:30]) == Read("", oops, [], 1)
    assert both("", opening="Once ") == Read("", "", [], 0)
    for opening in (GOOD, GOOD + " and "):
        assert both("", opening=opening) == Read("", "", [], 0)
        assert both("\nSo", opening=opening).calls == []
        assert both(GOOD, opening=opening) == Read("", "", [CALL], 0)
        assert both(wrapped("a"), opening=opening) == Read("", wrapped("a"), [], 1)


def test_calls_are_neither_lost_nor_doubled_by_how_the_text_is_cut() -> None:
    """Parsers of streams had such defects (vLLM 47901, 51697, 56263)."""
    calls = "\n".join(GOOD.replace("Bari", str(n)) for n in range(3))
    text = "<think>\nTwo.\n</think>\n\nI ask. " + calls
    whole = read(QWEN, [text])
    assert [arguments["city"] for _, arguments in whole.calls] == ["0", "1", "2"]
    for size in range(1, len(text)):
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(QWEN, cut) == whole
    for place in range(len(text)):
        assert read(QWEN, [text[:place], text[place:]]) == whole


def test_text_goes_on_while_no_mark_can_begin() -> None:
    reader = MessageReader(QWEN, Reading(tools=TOOLS), "")
    assert reader.feed("Hello").content == "Hello"
    assert reader.feed(" <").content == ""
    assert reader.feed("b>").content == " <b>"
    assert reader.feed("<tool_call>") == reader.feed('{"name": "get_weather"}') == joined([])
    assert reader.feed("</tool_call>") == joined([])
    assert [call.name for call in reader.feed("x").calls] == ["get_weather"]


def test_text_after_a_call_comes_after_it() -> None:
    reader = MessageReader(QWEN, Reading(tools=TOOLS), "")
    told = [*map(reader.feed, [GOOD[:-1], ">b", "c", ""]), reader.finish()]
    kinds = [(delta.content, len(delta.calls)) for delta in told if any(delta)]
    assert kinds == [("", 1), ("bc", 0)]
    reader = MessageReader(QWEN, Reading(tools=TOOLS), "")
    told = [*map(reader.feed, [f"a{GOOD}{GOOD}b{GOOD}c", "", ""]), reader.finish()]
    kinds = [(delta.content, len(delta.calls)) for delta in told if any(delta)]
    assert kinds == [("a", 2), ("b", 1), ("c", 0)]


def test_ids_are_the_same_wherever_a_message_is_read() -> None:
    def ids(seed: str, pieces: list[str]) -> list[str]:
        reader = MessageReader(QWEN, Reading(tools=TOOLS), seed)
        return [call.id for call in deltas_of(reader, pieces).calls]

    text = GOOD + GOOD
    assert ids("a0", [text]) == ids("a0", list(text))
    assert len({*ids("a0", [text]), *ids("a1", [text])}) == 4


@pytest.mark.parametrize(
    ("opening", "tokens", "count"),
    [
        ("", ["<think>", "\n", "a", " b", "\n", "</think>", "\n\n", "Yes", "."], 7),
        ("<think>\n", ["a", " b", "\n", "</think>", "\n\n", "Yes", "."], 5),
        ("<think>\n", ["a", " b", "", "</think>", "Yes"], 4),
        ("<think>\n\n</think>\n\n", ["Yes", "."], 0),
        ("", ["Yes", " <", "b>"], 0),
        ("", ["\n", "<th", "ink>", "a", "</thi", "nk>", "Yes"], 6),
        ("", ["<think>", "a", "</think>", "<tool_call>", "{}", "</tool_call>"], 3),
        ("", ["<think>", "a", " b"], 3),
        ("", ["<think>"], 1),
        ("", ["a ", "<thi"], 0),
    ],
)
def test_reasoning_tokens_are_counted_with_their_marks(
    opening: str, tokens: list[str], count: int
) -> None:
    for separates in (True, False):
        reading = Reading(opening=opening, tools=TOOLS, separates_reasoning=separates)
        reader = MessageReader(QWEN, reading, "")
        deltas_of(reader, tokens)
        assert reader.reasoning_tokens == count


def test_gpt_oss_reasoning_tokens() -> None:
    reader = MessageReader(named("gpt-oss"), Reading(), "")
    tokens = ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "assistant"]
    deltas_of(reader, [*tokens, "<|channel|>", "final", "<|message|>", "Yes"])
    assert reader.reasoning_tokens == 5


def test_long_messages_are_read_in_pieces() -> None:
    """Parsers are replaced on the way, in the text, in reasoning and within a call."""
    city = "Bari é界 </tool_call> " * 2_000
    for form, text in (
        (QWEN, "<think>\n{}\n</think>\n\n{} <tool_call>{}</tool_call>"),
        (named("mistral-args"), "[THINK]{}[/THINK]{} [TOOL_CALLS]get_weather[ARGS]{}"),
    ):
        long = "word <b> \n" * 2_000 + "."
        arguments = json.dumps({"city": city}, ensure_ascii=False)
        call = arguments
        if form is QWEN:
            call = f'{{"name": "get_weather", "arguments": {arguments}}}'
        found = read(form, _tokens(text.format(long, long, call)))
        assert found == Read(long, long, [("get_weather", {"city": city})], 0)


def _tokens(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_a_template_that_looks_back_is_read_as_its_author_meant() -> None:
    """Reasoning begins with the message, with or without a mark, and never again."""
    template = {
        "start_anchor": "Assistant:",
        "fields": {
            "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
    form = MessageFormat(name="Ernie's", response_template=template)
    long = "word " * 2_000
    text = f"{long}</think>\n\n<response>\n{long}\n</response>\n{GOOD}\n</s>"
    assert both_in(form, text) == Read(long, long, [CALL], 0)
    bad = wrapped("oops")
    assert both_in(form, f"a</think>{bad}") == Read("a", bad, [], 1)


def test_a_template_without_content_has_some() -> None:
    template = {
        "start_anchor": "x",
        "defaults": {"role": "assistant"},
        "fields": {
            "reasoning": {"open": "<think>", "close": "</think>", "optional": False},
            "citations": {"open": "<c>", "close": "</c>", "content": "int"},
        },
    }
    form = MessageFormat(name="", response_template=template)
    assert both_in(form, "<think>a</think>b<c>1</c>") == Read("a", "b<c>1</c>", [], 0)


def test_a_field_whose_end_has_no_width() -> None:
    template = {
        "start_anchor": "x",
        "fields": {
            "content": {"close_pattern": r"\s*$"},
            "thinking": {"open": "<t>", "close_pattern": r"(?=\n)|\Z"},
        },
    }
    form = MessageFormat(name="", response_template=template)
    assert both_in(form, "<t>a\nb\n") == Read("a", "\nb\n", [], 0)


def test_reading_survives_the_wire() -> None:
    reading = Reading(opening="<think>", tools=TOOLS, separates_reasoning=False)
    encoded = msgspec.msgpack.encode(reading)
    assert msgspec.msgpack.decode(encoded, type=Reading) == reading
