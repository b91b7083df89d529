"""Calls of rows: an OpenAI batch line as it is, or a template over the row's columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from ...config import ConfigError, nearest, shown
from ..openai_calls import openai_call
from ..requests import Template
from .rows import JSON_LINES, Row, columns_of, format_of, rows_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_ID = "custom_id"
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_WHOLE = re.compile(r"\{([^{}]+)\}")
_ENDPOINTS = {"messages": CHAT, "prompt": COMPLETIONS}
"""By the field of a body that has the prompt."""


class Line(NamedTuple):
    """A call to send.

    Attributes:
        row: The row that it was made of.
        id: Its `custom_id`.
        url: The path that it calls.
        body: Its body, as JSON; None if it can't be sent.
        fault: Why; "" if it can.
    """

    row: Row
    id: str
    url: str
    body: bytes | None
    fault: str = ""

    @property
    def digest(self) -> str:
        """A digest of what is sent, by which a changed input is found."""
        content = b"%b\0%b" % (self.url.encode(), self.body or self.fault.encode())
        return xxhash.xxh3_64_hexdigest(content)


class Fault(Exception):
    """A row of which no call can be made."""


class Fills:
    """A text with placeholders, `{name}` for the value of a column; `{{` and `}}` are braces."""

    def __init__(self, text: str) -> None:
        """Raises ConfigError: a brace is neither."""
        self.columns: list[str] = []
        self._parts: list[tuple[str, str]] = []
        end = 0
        for found in _PLACEHOLDER.finditer(text):
            before = text[end : found.start()]
            end = found.end()
            if found[1]:
                self.columns.append(found[1])
                self._parts.append((before, found[1]))
            elif found[0] in ("{{", "}}"):
                self._parts.append((before + found[0][0], ""))
            else:
                raise ConfigError(
                    f"--template has {shown(text[found.start() : found.start() + 20])}",
                    remedy="a column is {name}, and a brace itself is {{ or }}",
                )
        self._rest = text[end:]

    def fill(self, row: dict[str, Any]) -> str:
        """Return the text. Raises Fault: a column is missing, or has no text."""
        parts = [
            before + (text_of(value_of(row, name), name) if name else "")
            for before, name in self._parts
        ]
        return "".join(parts) + self._rest


class RowTemplate:
    """Makes calls of rows: of a text with placeholders, or a JSON body with placeholders.

    Attributes:
        columns: The columns that it names.
    """

    def __init__(self, text: str, endpoint: str | None, options: Template) -> None:
        """Raises ConfigError: it is malformed."""
        self._body: Callable[[dict[str, Any]], dict[str, Any]]
        self.columns: list[str] = []
        if re.match(r'\s*\{\s*"', text):
            try:
                body = msgspec.json.decode(text, type=dict[str, Any])
            except (ValueError, RecursionError) as error:
                why = f"--template is no valid JSON: {error}"
                raise ConfigError(why, remedy="correct it, or write a text") from None
            found = (path for field, path in _ENDPOINTS.items() if field in body)
            self.endpoint = endpoint or next(found, CHAT)
            defaults, fill = body_of({**options}), self._filled(body)
            self._body = lambda row: {**defaults, **fill(row)}
        else:
            self.endpoint = endpoint or CHAT
            fills = Fills(text)
            self.columns += fills.columns
            self._body = lambda row: prompted(fills.fill(row), self.endpoint, options)

    def body(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a row's call. Raises Fault: there is none."""
        return self._body(row)

    def _filled(self, value: Any) -> Callable[[dict[str, Any]], Any]:
        """Return what fills the strings of a JSON value."""
        match value:
            case dict():
                fields = {name: self._filled(each) for name, each in value.items()}
                return lambda row: {name: fill(row) for name, fill in fields.items()}
            case list():
                items = [self._filled(each) for each in value]
                return lambda row: [fill(row) for fill in items]
            case str() if whole := _WHOLE.fullmatch(value):
                name = whole[1]
                self.columns.append(name)
                return lambda row: value_of(row, name)
            case str():
                fills = Fills(value)
                self.columns += fills.columns
                return fills.fill
        return lambda row: value


class LineMaker:
    """Makes the lines of a file.

    Attributes:
        model: The model of calls that name none; "" for none.
    """

    def __init__(
        self,
        path: Path,
        options: Template,
        *,
        template: str | None = None,
        endpoint: str | None = None,
        id_column: str = _ID,
        model: str = "",
    ) -> None:
        """Raises ConfigError: the template is malformed, or names an unknown column."""
        if endpoint is not None and not endpoint.startswith("/"):
            raise ConfigError(f"--endpoint is {shown(endpoint)}; it must be such as {CHAT}")
        self._path, self._options = path, options
        self._endpoint, self._id_column, self.model = endpoint, id_column, model
        columns = columns_of(path)
        is_table = format_of(path, "IN") not in JSON_LINES
        if template is None and is_table and columns:
            if not (found := [each for each in _ENDPOINTS if each in columns]):
                raise ConfigError(
                    f"{path} has no column prompt or messages, but {', '.join(columns)}",
                    remedy='make a prompt of them, as --template "Translate {text}"',
                )
            template = f'{{"messages": "{{{found[0]}}}"}}' if "messages" in found else "{prompt}"
        self._template = template and RowTemplate(template, endpoint, options)
        named = list(self._template.columns) if self._template else []
        if id_column != _ID:
            named.append(id_column)
        for name in named:
            if columns and name not in columns:
                raise ConfigError(
                    f"{path} has no column {shown(name)}{nearest(name, columns)}",
                    remedy=f"it has {', '.join(columns)}",
                )
        self._defaults = body_of({**options})

    def lines(self) -> Iterator[Line]:
        """Yield the lines. Raises ConfigError: the file can't be read."""
        return map(self._line, rows_of(self._path))

    def _line(self, row: Row) -> Line:
        id, url = str(row.number), ""
        try:
            if row.fault:
                raise Fault(row.fault)
            if isinstance(row.value, dict):
                id = self._id(row)
            url, body = self._call(row.value)
            if body.get("stream"):
                raise Fault("stream is true, and the lines of a batch have no streams")
            if self.model:
                body.setdefault("model", self.model)
            text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return Line(row, id, url, text.encode())
        except Fault as fault:
            return Line(row, id, url, None, str(fault))
        except (ValueError, TypeError, RecursionError) as error:
            return Line(row, id, url, None, f"its body is no JSON: {error}")

    def _id(self, row: Row) -> str:
        id = row.value.get(self._id_column, str(row.number))
        if isinstance(id, bool) or not isinstance(id, (str, int)) or id == "":
            raise Fault(f"{self._id_column} is {shown(id)}; it must be a text or a whole number")
        return str(id)

    def _call(self, value: Any) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a row's call. Raises Fault: it has none."""
        if self._template:
            if not isinstance(value, dict):
                raise Fault("a template takes an object with columns in each line")
            return self._template.endpoint, self._template.body(value)
        if isinstance(value, str):
            endpoint = self._endpoint or CHAT
            return endpoint, prompted(value, endpoint, self._options)
        if not isinstance(value, dict):
            raise Fault("a line is a JSON object, or a prompt as a JSON string")
        if "body" in value:
            url, body, method = value.get("url"), value["body"], value.get("method", "POST")
            if not (isinstance(url, str) and url.startswith("/")):
                raise Fault(f"url is {shown(url)}; it must be a path such as {CHAT}")
            if method != "POST":
                raise Fault(f"method is {shown(method)}; it must be POST")
            if not isinstance(body, dict):
                raise Fault(f"body is {shown(body)}; it must be an object")
            return url, {**self._defaults, **body}
        found = (path for field, path in _ENDPOINTS.items() if field in value)
        url = self._endpoint or next(found, "")
        if not url:
            raise Fault(
                "it has no body, messages or prompt; write custom_id, url and body, or give "
                "--template"
            )
        body = {name: each for name, each in value.items() if name != self._id_column}
        return url, {**self._defaults, **body}


def prompted(text: str, endpoint: str, options: Template) -> dict[str, Any]:
    """Return the body of a call with one text."""
    if endpoint == CHAT:
        return body_of(options.of_messages([{"role": "user", "content": text}]))
    if endpoint == COMPLETIONS:
        return body_of(options.of_text(text))
    return {**body_of({**options}), "input": text}


def body_of(request: dict[str, Any]) -> dict[str, Any]:
    """Return the body of OpenAI's interface for fields of a GenerateRequest."""
    body, _ = openai_call(request)
    del body["stream"]
    return body


def value_of(row: dict[str, Any], name: str) -> Any:
    """Return the value of a column. Raises Fault: the row has none."""
    if name not in row:
        raise Fault(f"it has no column {shown(name)}{nearest(name, list(row))}")
    if row[name] is None:
        raise Fault(f"its column {shown(name)} is null")
    return row[name]


def text_of(value: Any, name: str) -> str:
    """Return a value of a column as a text. Raises Fault: it has none."""
    match value:
        case str():
            return value
        case bytes():
            raise Fault(f"its column {shown(name)} has bytes, and no text")
        case float() if not math.isfinite(value):
            raise Fault(f"its column {shown(name)} is {value}")
        case bool() | int() | float() | list() | dict():
            return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
