"""Message formats of models: reasoning, text, tool calls.

A response template of Transformers, which is data (`transformers.utils.chat_parsing`), describes
how messages are read. Grammars, which describe how they are written, need the text between the
parts of a call as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec

from .elements import ELEMENTS
from .regions import CALLS, CONTENT, REASONING, region_template
from .typed import type_of

NAME, NUMBER, KIND = "{name}", "{number}", "{kind}"
"""What stands in a syntax for a call's name, and number, and for the word for a value's type."""


class ArgumentSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The syntax of an argument between tags: `before NAME middle VALUE after`.

    Texts are written as they are, other values as JSON.

    Attributes:
        middle: With `{kind}` where a word for the value's type stands.
        kinds: These words by JSON's types; "" for all other types.
    """

    before: str
    middle: str
    after: str
    kinds: dict[str, str] = {}

    def word(self, kind: str) -> str:
        """Return the word for one of JSON's types."""
        return self.kinds.get(kind, self.kinds.get("", ""))

    def written(self, name: str, value: Any) -> str:
        """Return an argument in this syntax."""
        middle = self.middle.replace(KIND, self.word(type_of(value)))
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{self.before}{name}{middle}{text}{self.after}"


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The syntax of calls: `open (before NAME middle ARGUMENTS after) (between …)* close`.

    Attributes:
        before: With `{name}` where the name stands once more.
        before, middle: With `{number}` where a number of the call stands.
        arguments: The syntax of each argument; "python" for `name=value, …`; None if all together
            are a JSON object.
    """

    open: str = ""
    before: str
    middle: str
    arguments: ArgumentSyntax | Literal["python"] | None = None
    after: str
    between: str = ""
    close: str = ""

    def written(
        self, name: str = "name", arguments: Mapping[str, Any] | None = None, number: int = 0
    ) -> str:
        """Return a call in this syntax."""
        given = arguments or {}
        if self.arguments is None:
            body = json.dumps(given, ensure_ascii=False)
        elif self.arguments == "python":
            body = ", ".join(f"{key}={value!r}" for key, value in given.items())
        else:
            body = "".join(self.arguments.written(key, value) for key, value in given.items())
        head = f"{self.before.replace(NAME, name)}{name}{self.middle}"
        return f"{head.replace(NUMBER, str(number))}{body}{self.after}"


class ReasoningSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The marks before and after the reasoning.

    Attributes:
        ends: Other texts that end it, as the reader has it; no grammar writes them in it.
    """

    open: str
    close: str
    ends: tuple[str, ...] = ()


class MessageFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The message format of a family of models.

    Attributes:
        models: The models that write so, for the docs.
        model_types: Transformers' names of the architectures of the family; they decide between
            several formats that read what a chat template writes.
        markers: Texts that all stand in chat templates of the family; without any, such a template
            has to write calls for the format to be recognised.
        calls_marker: One more in the templates of models that call tools.
        reasoning_marker: A text in the templates of models that reason, of which some drop the
            reasoning of the history.
        response_template: As Transformers has it. Its fields are called `content`, `tool_calls` and
            `reasoning_content` (or `reasoning`, or `thinking`); what others take apart is content.
        call_ids: The ids of calls in the history, with `{name}` and `{number}`, which counts all of
            them; "" for ids of any form.
        calls: None if the syntax of calls is unknown, so that they can't be enforced.
        reasoning: None without reasoning.
        answer_open: The mark before the text of an answer.
    """

    name: str
    models: str = ""
    model_types: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    calls_marker: str = ""
    reasoning_marker: str = ""
    response_template: dict[str, Any]
    call_ids: str = ""
    calls: CallSyntax | None = None
    reasoning: ReasoningSyntax | None = None
    answer_open: str = ""

    @property
    def reads_calls(self) -> bool:
        """Whether calls can be distinguished from text."""
        return CALLS in self.response_template["fields"]

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning can be distinguished from text."""
        return not self.response_template["fields"].keys().isdisjoint(REASONING)

    @property
    def marks_around_calls(self) -> frozenset[str]:
        """What stands before and after all calls."""
        if self.calls is not None:
            return frozenset({self.calls.open.strip(), self.calls.close.strip()})
        fields = self.response_template["fields"]
        if fields.get(CALLS, {}).get("content_args", {}).get("as") != ELEMENTS:
            return frozenset()
        marks = fields.get(CONTENT, {}).get("close", ())
        return frozenset([marks] if isinstance(marks, str) else marks)


@cache
def known_formats() -> tuple[MessageFormat, ...]:
    """Return the formats of the package, in the order of their names."""
    folder = resources.files(__package__) / "formats"
    files = sorted(
        (each for each in folder.iterdir() if each.name.endswith(".json")), key=lambda f: f.name
    )
    return tuple(msgspec.json.decode(file.read_bytes(), type=MessageFormat) for file in files)


def opening_of(form: MessageFormat, prompt: str) -> str:
    """Return the part of the assistant's turn that stands in a prompt: the text after the last
    beginning of a turn, or ""."""
    begins = region_template(form.response_template, with_calls=True).template.start_anchor_re
    ends = [found.end() for found in begins.finditer(prompt)]
    return prompt[ends[-1] :] if ends else ""
