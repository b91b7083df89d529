"""A message is the same however its text is cut."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.text.messages import MessageFormat, MessageReader, Reading, Tool

from .families import FAMILIES, TOOLS, Family, deltas_of, format_of_family

ALPHABET = 'ab \n"{}[]<>/|\\,;:=é東😀'


def marks_of(family: Family) -> list[str]:
    """Return a family's marks, whole and in halves."""
    behind = family.call.split("{arguments}")
    marks = [*behind, *family.reasoning, family.open, family.close, family.between, family.answer]
    whole = [mark for mark in marks if mark] + ["<|im_end|>", "</s>", "<|eot_id|>", "{name}"]
    return whole + [mark[: len(mark) // 2] for mark in whole] + [mark[3:] for mark in whole]


def values_with_marks(family: Family) -> st.SearchStrategy[str]:
    pieces = st.text(ALPHABET, max_size=12) | st.sampled_from(marks_of(family))
    return st.lists(pieces, max_size=4).map("".join)


def arguments(family: Family) -> st.SearchStrategy[dict[str, object]]:
    texts = values_with_marks(family)
    values = texts | st.integers() | st.booleans() | st.lists(texts, max_size=2)
    return st.dictionaries(st.sampled_from(["city", "days", "x"]), values, max_size=3)


@st.composite
def messages(draw: st.DrawFn, family: Family) -> str:
    """Reasoning, text, calls, halves of marks and nonsense, in any order."""
    before, behind = family.reasoning
    names = st.sampled_from(["get_weather", "stop-now.v2", "unknown"])
    calls = st.lists(st.tuples(names, arguments(family)), max_size=3).map(family.written)
    texts = st.text(ALPHABET, max_size=20)
    parts = st.one_of(
        texts,
        calls,
        texts.map(lambda text: before + text + behind),
        # As a budget closes reasoning, and the model once more.
        texts.map(lambda text: before + behind + text + behind),
        st.sampled_from(marks_of(family)),
        # Malformed ones.
        calls.flatmap(lambda text: st.integers(0, len(text)).map(lambda at: text[:at])),
        calls.map(lambda text: text.replace('"', "", 1)),
    )
    return "".join(draw(st.lists(parts, max_size=5)))


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    places = draw(st.lists(st.integers(0, len(text)), max_size=12))
    return [text[start:end] for start, end in pairwise([0, *sorted(places), len(text)])]


def reader_of(
    form: MessageFormat, opening: str, with_tools: bool, separates: bool
) -> MessageReader:
    tools = TOOLS if with_tools else ()
    reading = Reading(opening=opening, tools=tools, separates_reasoning=separates)
    return MessageReader(form, reading, "seed")


@given(st.data())
def test_cuts_do_not_change_a_message(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    form = format_of_family(family)
    whole = data.draw(messages(family))
    start = data.draw(st.integers(0, len(whole))) if data.draw(st.booleans()) else 0
    opening, text = whole[:start], whole[start:]
    with_tools, separates = data.draw(st.booleans()), data.draw(st.booleans())
    cut_off = data.draw(st.booleans())
    found = []
    for pieces in ([text], list(text), data.draw(cuts(text))):
        reader = reader_of(form, opening, with_tools, separates)
        delta = deltas_of(reader, pieces, cut_off=cut_off)
        found.append((delta, reader.calls, reader.malformed))
        for call in delta.calls:
            assert isinstance(json.loads(call.arguments), dict)
            assert call.name in {tool.name for tool in TOOLS}
    assert found[0] == found[1] == found[2]


@given(st.data())
def test_text_without_marks_is_complete(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    text = data.draw(st.text("ab \n<>/|é東😀", max_size=60))
    pieces = data.draw(cuts(text))
    delta = deltas_of(reader_of(format_of_family(FAMILIES[name]), "", True, True), pieces)
    assert (delta.reasoning, delta.content, delta.calls) == ("", text, ())


@given(st.data())
def test_nothing_is_lost(data: st.DataObject) -> None:
    """If nothing parses as a call and reasoning stays in the text, the whole text is kept."""
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    template = format_of_family(FAMILIES[name]).response_template
    fields = template["fields"] | {"content": {}}
    form = MessageFormat(name=name, response_template=template | {"fields": fields})
    text = data.draw(messages(FAMILIES[name]))
    reading = Reading(tools=(Tool(name="no_other"),), separates_reasoning=False)
    for pieces in (text, data.draw(cuts(text))):
        delta = deltas_of(MessageReader(form, reading, ""), pieces)
        assert (delta.reasoning, delta.content, delta.calls) == ("", text, ())


# What a value can't have in syntaxes without escapes: the marks of its own end.
AMBIGUOUS = re.compile(
    r"<parameter=|</parameter>\s*$|</parameter>\s*<|<\|\"\|>|<escape>|[\x01\x02]"
    r"|\]<\]minimax\[>\["
)


@given(st.data())
def test_a_call_is_whole_or_text(data: st.DataObject) -> None:
    """Whatever marks stand in its values."""
    name = data.draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    texts = values_with_marks(family)
    if not family.is_json:
        texts = texts.filter(lambda text: not AMBIGUOUS.search(text))
    known = st.dictionaries(st.sampled_from(["city", "x"]), texts)
    calls = [("get_weather", each) for each in data.draw(st.lists(known, min_size=1, max_size=3))]
    text = family.written(calls)
    delta = deltas_of(
        reader_of(format_of_family(FAMILIES[name]), "", True, True), data.draw(cuts(text))
    )
    found = [(call.name, json.loads(call.arguments)) for call in delta.calls]
    assert found == calls or (found, delta.content) == ([], text)
