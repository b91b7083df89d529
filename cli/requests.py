"""From what the user gives `submit` to requests: a text, a file of lines, standard input."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ..bus.channel import Malformed
from ..bus.codec import check_request
from ..config import (
    ConfigError,
    Constraint,
    RequestError,
    SamplingParams,
    nearest,
    parse_value,
    shown,
)
from .stdin import stdin_lines

DEFAULT_MAX_TOKENS = 64
"""Of an answer to one prompt."""


class Submission(msgspec.Struct, frozen=True):
    """A request to be sent, and what its answer is called where several are printed."""

    label: str
    request: dict[str, Any]


class Wanted(msgspec.Struct, frozen=True):
    """What the options say about requests; None where an option was not given."""

    chat: bool = False
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    sampling: dict[str, Any] = {}
    priority: int | None = None
    tenant: str | None = None
    budget_s: float | None = None
    stream: bool = False
    model: str | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        if self.budget_s is not None and not math.isfinite(self.budget_s):
            raise ConfigError("--budget must be a number of seconds")

    def of_text(self, text: str) -> dict[str, Any]:
        """The request for a prompt. Greedy unless the options say otherwise."""
        if self.chat:
            messages = [{"role": "user", "content": text}]
            return self.of_messages(messages, max_tokens=DEFAULT_MAX_TOKENS)
        return self._request({"prompt": text}, max_tokens=DEFAULT_MAX_TOKENS)

    def of_messages(self, messages: list[dict[str, Any]], *, max_tokens: int) -> dict[str, Any]:
        """The request for a conversation. Greedy unless the options say otherwise; they also go
        before `max_tokens`."""
        return self._request({"messages": messages}, max_tokens)

    def _request(self, asked: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_tokens": max_tokens} | self._sampling()
        return asked | {"sampling": sampling} | self._fields()

    def of_object(self, given: dict[str, Any]) -> dict[str, Any]:
        """A request as it was written; options fill in what it leaves out."""
        request = self._fields() | given
        sampling = given.get("sampling", {})
        if isinstance(sampling, dict) and (merged := self._sampling() | sampling):
            request["sampling"] = merged
        return request

    def _fields(self) -> dict[str, Any]:
        budget_ns = None if self.budget_s is None else round(self.budget_s * 1e9)
        fields = {
            "n": self.n,
            "priority": self.priority,
            "tenant": self.tenant,
            "budget_ns": budget_ns,
            "model": self.model,
            "prediction": self.prediction,
        }
        return {"stream": self.stream} | _given(fields)

    def _sampling(self) -> dict[str, Any]:
        fields = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "stop": list(self.stop) or None,
        }
        return _given(fields) | self.sampling


def parse_sampling(texts: Iterable[str]) -> dict[str, Any]:
    """Sampling parameters from "name=value" texts; values are read as YAML.

    Raises:
        ConfigError: A text is not of that form, or names no parameter.
    """
    known = SamplingParams.__struct_fields__
    fields: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise ConfigError(f"--sampling takes name=value, not {text!r:.80}")
        if name not in known:
            raise ConfigError(f"--sampling: no parameter {name!r:.80}{nearest(name, known)}")
        fields[name] = parse_value(value)
    return fields


def parse_constraint(text: str) -> dict[str, Any]:
    """What an answer has to be, from "kind=value", or "kind=@file" for what a file has.

    The value of `json_schema` is JSON, that of `choice` a list as YAML has it ("[red, 12, yes]"),
    whose words are texts whatever else YAML takes them for; all others are texts, and `json_object`
    has none.

    Raises:
        ConfigError: There is no such kind, or the value is none of it.
    """
    kind, equals, value = text.partition("=")
    known = Constraint.__struct_fields__
    if kind not in known:
        raise ConfigError(f"--constraint: no kind {kind!r:.80}{nearest(kind, known)}")
    if kind == "json_object":
        if equals:
            raise ConfigError("--constraint json_object takes no value; json_schema does")
        return {kind: True}
    if not equals:
        raise ConfigError(f"--constraint takes {kind}=value, or {kind}=@file")
    value = _text_or_file("--constraint", value)
    if kind == "choice":
        return {kind: _texts(value)}
    if kind != "json_schema":
        return {kind: value}
    try:
        return {kind: msgspec.json.decode(value, type=dict[str, Any])}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--constraint: the schema is no JSON object: {error}") from None


def parse_prediction(text: str) -> str:
    """What an answer may be, from the text itself, or "@file" for what a file has.

    Raises:
        ConfigError: The file can't be read.
    """
    return _text_or_file("--prediction", text)


def _text_or_file(option: str, value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: can't read {value[1:]}: {error}") from None


def _texts(value: str) -> list[str]:
    """Raises ConfigError: it is no list of texts."""
    try:
        # Of YAML's loaders the one that takes "yes", "12" and "null" for what they look like.
        found = yaml.load(value, yaml.BaseLoader)
    except yaml.YAMLError:
        found = None
    if not (isinstance(found, list) and found and all(isinstance(each, str) for each in found)):
        raise ConfigError(f"--constraint: choice is {shown(value)}, and no list such as [yes, no]")
    return found


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


class LineReader:
    """Turns lines into submissions, and knows where a line that can't be read stands."""

    def __init__(self, name: str, wanted: Wanted, max_bytes: int, *, plain_prompts: bool) -> None:
        """`plain_prompts`: a line that does not begin with "{" is a prompt as it stands; else
        every line is JSON, an object (a GenerateRequest) or a string (a prompt)."""
        self._name = name
        self._wanted = wanted
        self._max_bytes = max_bytes
        self._plain_prompts = plain_prompts
        self._number = 0

    def read(self, line: bytes) -> Submission | None:
        """The request of the next line; None for an empty one.

        Raises:
            RequestError: It is not a request; the message names the line.
        """
        self._number += 1
        line = line.strip()
        if not line:
            return None
        given = self._decode(line)
        if isinstance(given, str):
            request = self._wanted.of_text(given)
        elif isinstance(given, dict):
            request = self._wanted.of_object(given)
        else:
            raise self._error('a line is a request, as {"prompt": "…"}, or a prompt, as "…"')
        checked = check_request(request, self._max_bytes)
        if isinstance(checked, Malformed):
            raise self._error(checked.message)
        return Submission(checked.request_id or str(self._number), request)

    def _decode(self, line: bytes) -> object:
        try:
            if self._plain_prompts and not line.startswith(b"{"):
                return line.decode()
            return msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            # msgspec's errors are ValueErrors, and so is what undecodable text raises.
            raise self._error(f"not valid JSON: {error}") from None

    def _error(self, problem: str) -> RequestError:
        return RequestError(f"{self._name}, line {self._number}: {problem}")


def read_file(path: Path, reader: LineReader) -> list[Submission]:
    """All requests of a file, so that one bad line is found before anything is sent.

    Raises:
        ConfigError: The file can't be read, or holds no request.
        RequestError: A line is not a request.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    submissions = [submission for line in lines if (submission := reader.read(line)) is not None]
    if not submissions:
        raise ConfigError(f"{path} holds no requests")
    return submissions


async def read_stdin(reader: LineReader) -> AsyncIterator[Submission]:
    """Requests as their lines come. Raises RequestError at a line that is none."""
    async for line in stdin_lines():
        if (submission := reader.read(line)) is not None:
            yield submission
