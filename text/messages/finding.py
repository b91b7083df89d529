"""Finds the format of a model's messages: by name, in a file, in its tokenizer, or by its chat
template."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from ...config import ConfigError
from .call_body import OWN_BODIES
from .message_format import CallSyntax, MessageFormat, ReasoningSyntax, known_formats
from .recognition import Render, recognised
from .regions import CALLS, FIELDS, REASONING, region_template

_MOST_BYTES = 1 << 20
"""Most bytes of a file with a format."""


def find_format(
    asked: str,
    own: dict[str, Any] | None,
    chat_template: str,
    model_type: str,
    render: Render | None = None,
) -> MessageFormat | None:
    """Return the format of a model's messages; None if it is unknown.

    A recognised format has calls, and reasoning, if the chat template shows them. A format by name,
    and that of the model's own tokenizer, are taken as they are.

    Args:
        asked: "auto"; "off"; a format's name; or the path of a file with a format.
        own: The response template of the model's own tokenizer.
        chat_template: The model's.
        model_type: The model's, by its configuration.
        render: Renders messages by the chat template; None without one.

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
    found = None
    if render is not None:
        found = recognised(known_formats(), chat_template, model_type, render)
    return found if own is None else _checked_own(own, found)


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
    kind = calls.get("content_args", {}).get("as")
    if kind is not None and (kind not in OWN_BODIES or calls.get("content") != "text"):
        raise ValueError(
            f"response_template.fields.{CALLS}.content_args.as is {kind!r}; with content 'text' it "
            f"may be {', '.join(OWN_BODIES)}"
        )
    if form.calls is not None and not _reads_calls_of(form, form.calls):
        raise ValueError(f"response_template.fields.{CALLS} does not read what calls writes")
    if form.reasoning is not None and not _reads_reasoning_of(form, form.reasoning):
        raise ValueError(f"response_template.fields.{REASONING[0]} does not read what reasoning is")


def _reads_calls_of(form: MessageFormat, calls: CallSyntax | None) -> bool:
    if calls is None:
        return False
    return CALLS in _parsed(form, f"{calls.open}{calls.written()}{calls.close}")


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
