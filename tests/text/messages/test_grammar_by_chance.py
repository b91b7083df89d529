"""Messages that are written by chance, within what is asked of them, and then read."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any, Literal

import jsonschema
import pytest

from nano_inference.config import Constraint
from nano_inference.text.messages import MessageFormat, Reading, Tool, ToolUse, constraint_of

from ..random_schemas import random_schema
from .message_writer import FORMS, Message, writer_of

NAMES = ("find", "find_all", "now", "a-b.c", "X")


def random_tools(rng: random.Random, form: MessageFormat) -> tuple[Tool, ...]:
    """Tools of any arguments, all strict."""
    names = rng.sample(NAMES, rng.randint(1, 4))
    return tuple(
        Tool(name=name, parameters=random_arguments(rng, form), strict=True) for name in names
    )


def random_arguments(rng: random.Random, form: MessageFormat) -> dict[str, Any]:
    # Between tags a name with their quotation mark can't be written.
    tagged = form.calls.arguments is not None
    quoted = "quo'te" if tagged else 'quo"te'
    possible = ("name", "x\\y", quoted, "größe")
    if form.calls.arguments == "python":
        possible = ("name", "x-y", "in", "größe")
    names = rng.sample(possible, rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, 2) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def random_use(rng: random.Random, form: MessageFormat) -> ToolUse:
    tools, parallel = random_tools(rng, form), rng.random() < 0.6
    named = rng.choice(tools).name if rng.random() < 0.2 else ""
    choice: Literal["auto", "required"] = "required" if named else rng.choice(["auto", "required"])
    return ToolUse(tools=tools, choice=choice, named=named, parallel=parallel)


UNREADABLE = re.compile(r"[eE]\+?\d{3}|\\u[dD][89a-fA-F]")
"""JSON has numbers and halves of characters that no reader can hold."""

SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": [1, "two"]}},
    "required": ["x"],
    "additionalProperties": False,
}


def hints_of(form: MessageFormat, use: ToolUse) -> list[str]:
    """Return the marks that begin or end the parts of a message."""
    begin = (form.calls.open + form.calls.before).lstrip()
    hints = [f"{begin}{tool.name}{form.calls.middle}" for tool in use.tools]
    hints += [begin, form.calls.between, form.answer_open]
    if form.reasoning is not None:
        hints += [form.reasoning.open, form.reasoning.close, form.reasoning.close.strip()]
    return [hint for hint in hints if hint]


@pytest.mark.soak
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_complete_messages_are_read_as_requested(name: str, marked: bool, soak: bool) -> None:
    form, writer = FORMS[name], writer_of(name, marked=marked)
    seen = Counter[str]()
    number = 500 if soak else 2
    may_budget = form.reasoning is not None and form.reasoning.close.strip() in (
        writer.special_tokens
    )
    for seed in range(number):
        rng = random.Random(seed)
        use, opening = random_use(rng, form), ""
        if form.reasoning is not None:
            begun = form.reasoning.open
            opening = rng.choice(["", begun, begun + form.reasoning.close])
        answer = Constraint(json_schema=SCHEMA) if rng.random() < 0.3 else None
        budget = rng.randint(0, 20) if may_budget and rng.random() < 0.4 else None
        given = (form, opening, use, answer, budget, writer.special_tokens)
        constraint = constraint_of(*given, reasoning_asked=rng.choice([None, True]))
        tokens, complete = writer.write(constraint, seed, hints_of(form, use))
        if complete and UNREADABLE.search(writer.text(tokens)) is None:
            message = writer.read(form, Reading(opening=opening, tools=use.tools), tokens)
            check(use, answer, message)
            parts = ("reasoning", "content", "calls")
            seen.update(["ended", *(part for part in parts if getattr(message, part))])
    if not soak:
        return
    assert seen["ended"] > number // 2, seen
    assert min(seen["calls"], seen["content"]) > number // 20, seen
    assert form.reasoning is None or seen["reasoning"] > number // 20, seen


def check(use: ToolUse, answer: Constraint | None, message: Message) -> None:
    """That a message is what was asked for."""
    by_name = {tool.name: tool for tool in use.tools}
    for each in message.calls:
        jsonschema.validate(json.loads(each.arguments), by_name[each.name].parameters)
    if use.named:
        assert [each.name for each in message.calls] == [use.named]
    if not use.parallel:
        assert len(message.calls) <= 1
    if use.choice == "required" or (answer is not None and message.calls):
        assert message.calls
        assert message.content == ""
    elif answer is not None:
        jsonschema.validate(json.loads(message.content), SCHEMA)
