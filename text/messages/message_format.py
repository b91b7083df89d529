"""Message formats of models: reasoning, text, tool calls.

A response template of Transformers, which is data (`transformers.utils.chat_parsing`), describes
how messages are read. Grammars, which describe how they are written, need the text between the
parts of a call as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from ...config import ConfigError
from .regions import CALLS, FIELDS, REASONING, region_template

NUMBER, KIND = "{number}", "{kind}"
"""What stands in a syntax for a call's number, and for the word for a value's type."""

_MOST_BYTES = 1 << 20
"""Most bytes of a file with a format."""


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


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The syntax of calls: `open (before NAME middle ARGUMENTS after) (between …)* close`.

    Attributes:
        middle: With `{number}` where a number of the call stands.
        arguments: The syntax of each argument; None if all together are a JSON object.
    """

    open: str = ""
    before: str
    middle: str
    arguments: ArgumentSyntax | None = None
    after: str
    between: str = ""
    close: str = ""

    def example(self, name: str = "name") -> str:
        """Return a call without arguments."""
        arguments = "{}" if self.arguments is None else ""
        middle = self.middle.replace(NUMBER, "0")
        return f"{self.before}{name}{middle}{arguments}{self.after}"


class ReasoningSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The marks before and after the reasoning."""

    open: str
    close: str


class MessageFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The message format of a family of models.

    Attributes:
        model_types: Transformers' names of the architectures of the family; they decide between
            several formats that fit a chat template.
        markers: Texts that all stand in the chat templates of the family.
        calls_marker: A text in the templates of models that call tools; "" if all do.
        reasoning_marker: A text in the templates of models that reason; "" if all do.
        response_template: As Transformers has it. Its fields are called `content`, `tool_calls` and
            `reasoning_content` (or `reasoning`, or `thinking`); what others take apart is content.
        calls: None if the syntax of calls is unknown, so that they can't be enforced.
        reasoning: None without reasoning.
        answer_open: The mark before the text of an answer.
    """

    name: str
    model_types: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    calls_marker: str = ""
    reasoning_marker: str = ""
    response_template: dict[str, Any]
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


@cache
def known_formats() -> tuple[MessageFormat, ...]:
    """Return the formats of the package, in the order of their names."""
    folder = resources.files(__package__) / "formats"
    files = sorted(
        (each for each in folder.iterdir() if each.name.endswith(".json")), key=lambda f: f.name
    )
    return tuple(msgspec.json.decode(file.read_bytes(), type=MessageFormat) for file in files)


def find_format(
    asked: str, own: dict[str, Any] | None, chat_template: str, model_type: str
) -> MessageFormat | None:
    """Return the format of a model's messages; None if it is unknown.

    A format found by the chat template has calls, and reasoning, if that template shows their
    marks. A format by name, and that of the model's own tokenizer, are taken as they are.

    Args:
        asked: "auto"; "off"; a format's name; or the path of a file with a format.
        own: The response template of the model's own tokenizer.
        chat_template: The model's.
        model_type: The model's, by its configuration.

    Raises:
        ConfigError: There is no such format, or the file's or the tokenizer's is invalid.
    """
    if asked == "off":
        return None
    by_name = {form.name: form for form in known_formats()}
    if asked in by_name:
        return by_name[asked]
    if asked != "auto":
        return _from_file(Path(asked).expanduser(), by_name)
    fitting = [
        form
        for form in known_formats()
        if form.markers and all(marker in chat_template for marker in form.markers)
    ]
    # The first of several that fit equally well.
    found = max(
        fitting, key=lambda form: (model_type in form.model_types, len(form.markers)), default=None
    )
    if own is not None:
        return _checked_own(own, found)
    return found and _shown_in(chat_template, found)


def format_of(tokenizer: Any, folder: Path, asked: str) -> MessageFormat | None:
    """Return the format of a model's messages, by its tokenizer and its folder.

    Args:
        tokenizer: Transformers'.
        asked: As for `find_format`.

    Raises:
        ConfigError: As `find_format`.
    """
    template = tokenizer.chat_template or ""
    texts = "\n".join(template.values()) if isinstance(template, dict) else template
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    own = getattr(tokenizer, "response_template", None)
    return find_format(asked, own, texts, str(config.get("model_type", "")))


def opening_of(form: MessageFormat, prompt: str) -> str:
    """Return the part of the assistant's turn that stands in a prompt: the text after the last
    beginning of a turn, or ""."""
    begins = region_template(form.response_template, with_calls=True).template.start_anchor_re
    ends = [found.end() for found in begins.finditer(prompt)]
    return prompt[ends[-1] :] if ends else ""


def _shown_in(chat_template: str, form: MessageFormat) -> MessageFormat | None:
    """Return a format without the parts that the chat template lacks; None without any part."""
    fields = dict(form.response_template["fields"])
    if form.calls_marker not in chat_template:
        fields.pop(CALLS, None)
    if form.reasoning_marker not in chat_template:
        fields = {name: field for name, field in fields.items() if name not in REASONING}
    shown = msgspec.structs.replace(
        form, response_template=form.response_template | {"fields": fields}
    )
    if not shown.reads_calls and not shown.reads_reasoning:
        return None
    return msgspec.structs.replace(
        shown,
        calls=form.calls if shown.reads_calls else None,
        reasoning=form.reasoning if shown.reads_reasoning else None,
    )


def _checked_own(own: Any, found: MessageFormat | None) -> MessageFormat:
    """Return the tokenizer's format, with the syntax of a known format that fits it."""
    try:
        form = MessageFormat(name="the model's own", response_template=own)
        _check(form)
        fields = {name: _spaced(field) for name, field in own["fields"].items()}
        form = MessageFormat(name=form.name, response_template=own | {"fields": fields})
    except ValueError as error:
        raise ConfigError(
            f"the response_template of the model's tokenizer_config.json can't be used: {error}; "
            "mend it, or set gateway.message_format"
        ) from None
    if found is None:
        return form
    return msgspec.structs.replace(
        form,
        name=found.name,
        calls=found.calls if _reads_calls_of(form, found.calls) else None,
        reasoning=found.reasoning if _reads_reasoning_of(form, found.reasoning) else None,
        answer_open=found.answer_open,
    )


def _spaced(field: dict[str, Any]) -> dict[str, Any]:
    """Return a field whose marks include the white space around them.

    Transformers strips the text between marks at its end; here text is reported as it comes.
    """
    if "open" not in field or not field.get("content_args", {}).get("strip", True):
        return field
    patterns = {}
    for mark in ("open", "close"):
        if (texts := field.get(mark)) is not None:
            either = "|".join(map(re.escape, [texts] if isinstance(texts, str) else texts))
            patterns[f"{mark}_pattern"] = rf"\s{{0,8}}(?:{either})\s{{0,8}}"
    others = {name: value for name, value in field.items() if name not in ("open", "close")}
    return others | patterns


def _from_file(path: Path, known: Collection[str]) -> MessageFormat:
    """Read a format, or a response template alone."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes, and at most {_MOST_BYTES} are read")
        given = msgspec.json.decode(path.read_bytes())
        if isinstance(given, dict) and "response_template" not in given:
            given = {"name": path.name, "response_template": given}
        form = msgspec.convert(given, MessageFormat)
        _check(form)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"gateway.message_format is {str(path)!r}, and that can't be used: {error}; give "
            f"auto, off, {', '.join(sorted(known))}, or a file as docs/tools.md has it"
        ) from None
    return form


def _check(form: MessageFormat) -> None:
    """Raises ValueError for a format that can't read messages."""
    template = form.response_template
    try:
        made = load_response_template(template)
        region_template(template, with_calls=True)
    # Wrong types within a template raise any of these.
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no response template of Transformers: {error}") from None
    if template["fields"].keys().isdisjoint(FIELDS):
        raise ValueError(f"response_template.fields has none of {', '.join(FIELDS)}")
    for name, field in made.fields.items():
        marks = (field.open_re, field.close_re)
        if all(mark is not None and mark.fullmatch("") for mark in marks):
            raise ValueError(f"response_template.fields.{name} begins, and ends, without any text")
    calls = template["fields"].get(CALLS, {})
    if form.reads_calls and "open" not in calls and "open_pattern" not in calls:
        raise ValueError(f"response_template.fields.{CALLS} needs an open or an open_pattern")
    if form.calls is not None and not _reads_calls_of(form, form.calls):
        raise ValueError(f"response_template.fields.{CALLS} does not read what calls writes")
    if form.reasoning is not None and not _reads_reasoning_of(form, form.reasoning):
        raise ValueError(f"response_template.fields.{REASONING[0]} does not read what reasoning is")


def _reads_calls_of(form: MessageFormat, calls: CallSyntax | None) -> bool:
    if calls is None:
        return False
    return CALLS in _parsed(form, f"{calls.open}{calls.example()}{calls.close}")


def _reads_reasoning_of(form: MessageFormat, reasoning: ReasoningSyntax | None) -> bool:
    if reasoning is None:
        return False
    return not _parsed(form, f"{reasoning.open}a{reasoning.close}").keys().isdisjoint(REASONING)


def _parsed(form: MessageFormat, text: str) -> dict[str, Any]:
    try:
        parsed: dict[str, Any] = parse_response(text, form.response_template, prefix="")
    except (ValueError, LookupError, TypeError):
        return {}
    return parsed
