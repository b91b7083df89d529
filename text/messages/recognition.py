"""Recognises a model's message format by what its chat template writes.

The template is given a conversation with calls, and one with reasoning; the format is the one that
reads the same back. Marks that merely occur in a template decide only where it writes no calls, as
that of a model whose calls stay in its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...config import RequestError
from .message_format import MessageFormat
from .message_reader import Delta, MessageReader, Reading
from .regions import CALLS, CONTENT, REASONING, MessageRegions, region_template
from .tools import Tool

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Renders messages, with `TOOLS` and reasoning turned on; the flag is `add_generation_prompt`.
Raises RequestError for messages that the template refuses, and others if it can't be rendered."""

_MARK = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")

_ARGUMENTS = {"city": "Rome", "days": 3}

TOOL = Tool(
    name="look_up_weather",
    description="Look up the weather.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "A city."},
            "days": {"type": "integer", "description": "Days."},
        },
        "required": ["city", "days"],
    },
)
"""The tool of the conversations."""

_REFUSED = ("invalid_messages", "chat_template_failed", "no_chat_template")
"""Errors of the template itself."""

_QUESTION = "Which weather?"
_THOUGHT = "Where is it?"
_ANSWER = "Sunny."


class _Samples(NamedTuple):
    """What a template writes after a user's message; "" for what it refuses.

    Attributes:
        begin: Without the assistant's message.
        prompt: As a prompt: the begin of the assistant's message at its end.
        calls: An assistant's message with two calls.
        call: One with a single call.
        reasoning: One with reasoning and an answer.
    """

    begin: str
    prompt: str
    calls: str
    call: str
    reasoning: str


class _Fit(NamedTuple):
    """How well a format reads what a template writes: the larger, the better.

    Attributes:
        calls: The number of calls that it reads, at most two.
        reasoning: Whether it reads it.
        alike: Whether a grammar would write a call as the template does.
        rest: Less than 0 by the characters that it takes for content and that are none.
        whole: Whether the template shows all that it reads, so that nothing has to be left out.
        known: Whether the model is one of its models.
        marks: The number of marks of the format that stand in the template, less that of others.
    """

    calls: int
    reasoning: bool
    alike: bool
    rest: int
    whole: bool
    known: bool
    marks: int


def recognised(
    known: Iterable[MessageFormat], chat_template: str, model_type: str, render: Render
) -> MessageFormat | None:
    """Return the format of a model's messages; None if no format reads what its template writes."""
    samples = _samples(render)
    fits = [(form, _fit(form, samples, chat_template, model_type)) for form in known]
    if not fits:
        return None
    form, fit = max(fits, key=lambda each: each[1])
    if not fit.calls:
        shown = [each for each in fits if _shows_calls(each[0], samples, chat_template)]
        if shown:
            form, fit = max(shown, key=lambda each: (each[1].known, each[1].marks))
            fit = fit._replace(calls=1)
    if not fit.calls and not fit.reasoning:
        return None
    found = _with_reasoning(form, fit, fits)
    if not fit.calls:
        found = _without(found, CALLS)
    return _with_begin(found, samples)


def _samples(render: Render) -> _Samples:
    function = {"name": TOOL.name, "arguments": _ARGUMENTS}
    calls = [{"id": f"call{n:05}", "type": "function", "function": function} for n in range(2)]

    def written(turn: Mapping[str, Any] | None, *, begin: bool = False) -> str:
        turns: list[Mapping[str, Any]] = [{"role": "user", "content": _QUESTION}]
        try:
            text = render([*turns, turn] if turn else turns, begin)
        except RequestError as error:
            if error.code not in _REFUSED:
                raise
            return ""
        return text[text.rfind(_QUESTION) + len(_QUESTION) :] if _QUESTION in text else ""

    turn: Mapping[str, Any] = {"role": "assistant", "content": ""}
    thought = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
    # Some templates take a single call only, or write several in a form that no format reads.
    two, one = (written({**turn, "tool_calls": calls[:number]}) for number in (2, 1))
    return _Samples(written(None), written(None, begin=True), two, one, written(thought))


# --- how well a format fits ---------------------------------------------------------------------


def _fit(form: MessageFormat, samples: _Samples, chat_template: str, model_type: str) -> _Fit:
    calls, alike, rest = 0, False, 0
    for number, text in ((2, samples.calls), (1, samples.call)):
        if calls or not form.reads_calls or TOOL.name not in text:
            continue
        found = _read(form, text)
        if _are_the_calls(found):
            calls, rest = number, len(found.content)
            alike = form.calls is not None and any(
                form.calls.written(TOOL.name, _ARGUMENTS, place).strip() in text for place in (0, 1)
            )
    reasons, found = False, _read(form, samples.reasoning)
    if form.reads_reasoning and found.reasoning.strip() != _THOUGHT:
        # The prompt may begin it, and the history lack that mark.
        begun = samples.reasoning[samples.reasoning.find(_THOUGHT) :]
        found = _read(form, begun, samples.prompt) if begun.startswith(_THOUGHT) else found
    if not form.reads_reasoning:
        pass
    elif _THOUGHT in samples.reasoning:
        reasons = found.reasoning.strip() == _THOUGHT and _ANSWER in found.content
    else:
        shows = calls > 0 or _shows_marks(form, chat_template)
        marker = form.reasoning_marker
        reasons = _begins_reasoning(form, samples.prompt) or (
            shows and marker != "" and marker in chat_template
        )
    if _ANSWER in found.content:
        rest += len(found.content.replace(_THOUGHT, ""))
    whole = (calls > 0, reasons) == (form.reads_calls, form.reads_reasoning)
    marks = sum(1 if mark in chat_template else -1 for mark in form.markers)
    return _Fit(calls, reasons, alike, -rest, whole, model_type in form.model_types, marks)


def _shows_calls(form: MessageFormat, samples: _Samples, chat_template: str) -> bool:
    """Return whether a template whose calls no format reads shows that its model writes them so: it
    writes none, and names the marks; or it begins them so, with arguments that are no JSON."""
    if not form.reads_calls:
        return False
    if TOOL.name in samples.call:
        before = form.calls.before if form.calls is not None else ""
        return _MARK.search(before) is not None and f"{before}{TOOL.name}" in samples.call
    return form.calls_marker in chat_template and _shows_marks(form, chat_template)


def _shows_marks(form: MessageFormat, chat_template: str) -> bool:
    return bool(form.markers) and all(mark in chat_template for mark in form.markers)


def _read(form: MessageFormat, text: str, opening: str = "") -> Delta:
    reader = MessageReader(form, Reading(opening=opening, tools=(TOOL,)), "")
    first, last = reader.feed(text), reader.finish()
    return Delta(
        first.reasoning + last.reasoning, first.content + last.content, first.calls + last.calls
    )


def _are_the_calls(found: Delta) -> bool:
    return (
        bool(found.calls)
        and all(_texts(json.loads(call.arguments)) == _texts(_ARGUMENTS) for call in found.calls)
        and TOOL.name not in found.content
        and not found.reasoning.strip()
    )


def _texts(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments as texts: some templates put numbers between quotation marks."""
    return {name: str(value) for name, value in arguments.items()}


def _begins_reasoning(form: MessageFormat, prompt: str) -> bool:
    """Return whether a prompt opens, or closes, the reasoning."""
    template = region_template(form.response_template, with_calls=False)
    regions = MessageRegions(template, prompt)
    return regions.field in REASONING or any(
        piece.kind == "open" and piece.field in REASONING for piece in regions.opening
    )


# --- the format as it is used -------------------------------------------------------------------


def _with_reasoning(
    form: MessageFormat, fit: _Fit, fits: Iterable[tuple[MessageFormat, _Fit]]
) -> MessageFormat:
    """Return a format of calls with the reasoning that the template writes."""
    if fit.reasoning:
        return form
    without = _without(form, *REASONING)
    reasoning = [each for each in fits if each[1].reasoning]
    if not reasoning:
        return without
    other = max(reasoning, key=lambda each: each[1][1:])[0]
    template = form.response_template
    fields = other.response_template["fields"]
    grafted = {name: field for name, field in fields.items() if name in REASONING}
    return replace(
        without,
        response_template=template | {"fields": grafted | without.response_template["fields"]},
        reasoning=other.reasoning,
    )


def _without(form: MessageFormat, *names: str) -> MessageFormat:
    template = form.response_template
    fields = {name: field for name, field in template["fields"].items() if name not in names}
    if fields.keys() == template["fields"].keys():
        return form
    if not fields:
        fields = {CONTENT: {}}
    return replace(
        form,
        response_template=template | {"fields": fields},
        calls=None if CALLS in names else form.calls,
        reasoning=form.reasoning if CALLS in names else None,
    )


def _with_begin(form: MessageFormat, samples: _Samples) -> MessageFormat:
    """Return a format that finds the begin of the assistant's message in the template's prompts."""
    template = form.response_template
    anchor = template.get("start_anchor")
    begins = region_template(template, with_calls=True).template.start_anchor_re
    if anchor is None or begins.search(samples.prompt) is not None:
        return form
    if not samples.begin or not samples.prompt.startswith(samples.begin):
        return form
    begin = samples.prompt[len(samples.begin) :]
    if form.reasoning is not None:
        for mark in (form.reasoning.open, form.reasoning.close):
            begin = begin.partition(mark.strip())[0]
    if not (begin := begin.rstrip()):
        return form
    anchors = [anchor] if isinstance(anchor, str) else list(anchor)
    return replace(form, response_template=template | {"start_anchor": [*anchors, begin]})
