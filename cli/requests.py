"""Requests from options, a text, a file of lines, or standard input."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from ..bus.codec import check_request
from ..bus.entries import Malformed
from ..bus.public import OnVersionLag
from ..config import (
    ConfigError,
    Constraint,
    RequestError,
    SamplingParams,
    nearest,
    parse_value,
    shown,
)
from .images import for_bus, question
from .options import option
from .process import stdin_lines
from .terminal import read_input

DEFAULT_MAX_TOKENS = 64
"""Limit of tokens of an answer to one prompt."""

CHAT_MAX_TOKENS = 1024
"""Limit of tokens of an answer in a conversation."""

field = partial(option, rich_help_panel="Requests")
"""Makes an option that sets a field of requests."""


class Template(dict[str, Any]):
    """Fields of requests that options set, as in a GenerateRequest."""

    def of_text(
        self, text: str, *, chat: bool = False, images: Sequence[bytes] = ()
    ) -> dict[str, Any]:
        """Return the request for a prompt, by default greedy. With images it is a question."""
        if chat or images:
            return self._request(for_bus([question(text, images)]), DEFAULT_MAX_TOKENS)
        return self._request({"prompt": text}, DEFAULT_MAX_TOKENS)

    def of_fork(self) -> dict[str, Any]:
        """Return the request of a fork, which options set, by default greedy."""
        return self._request({}, DEFAULT_MAX_TOKENS)

    def of_messages(
        self, messages: list[dict[str, Any]], max_tokens: int = CHAT_MAX_TOKENS
    ) -> dict[str, Any]:
        """Return the request for a conversation, by default greedy."""
        return self._request({"messages": messages}, max_tokens)

    def _request(self, prompt: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_tokens": max_tokens} | self.get("sampling", {})
        return {**self, **prompt, "sampling": sampling}

    def of_object(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a request given as an object, with options for its missing fields."""
        request = {**self, **given}
        sampling = given.get("sampling", {})
        if isinstance(sampling, dict) and (merged := self.get("sampling", {}) | sampling):
            request["sampling"] = merged
        return request


def template(
    *,
    max_tokens: Annotated[
        int | None,
        field("--max-tokens", f"Default: {DEFAULT_MAX_TOKENS}, in `chat` {CHAT_MAX_TOKENS}."),
    ],
    temperature: Annotated[float | None, field("--temperature -t", "0, the default, is greedy.")],
    seed: Annotated[int | None, field("--seed", "Makes samples reproducible.")],
    stop: Annotated[list[str] | None, field("--stop TEXT", "End before this text. Repeatable.")],
    sampling: Annotated[
        list[str] | None,
        field("--sampling NAME=VALUE", "Any parameter, as logprobs=3. Repeatable."),
    ],
    constraint: Annotated[
        str | None, field("--constraint KIND=VALUE", "As regex='[0-9]+' or json_schema=@FILE.")
    ],
    prediction: Annotated[
        str | None, field("--prediction TEXT", "The expected answer, or @FILE, for speculation.")
    ],
    priority: Annotated[int | None, field("--priority", "Higher runs first; default: 0.")],
    tenant: Annotated[str | None, field("--tenant NAME", "Its tenant.")],
    budget: Annotated[float | None, field("--budget SECONDS", "Time limit of a request.")],
    max_lag: Annotated[
        int | None, field("--max-version-lag N", "Versions that a sample may be behind.")
    ],
    on_lag: Annotated[
        OnVersionLag | None, field("--on-version-lag", "What happens beyond; default: flag.")
    ],
) -> Template:
    """Return the options. Raises ConfigError: a value is malformed."""
    if budget is not None and not math.isfinite(budget):
        raise ConfigError("--budget must be a number of seconds")
    parameters = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "seed": seed,
        "stop": stop or None,
        "constraint": constraint and parse_constraint(constraint),
    }
    fields = {
        "sampling": given(parameters) | parse_sampling(sampling or ()) or None,
        "prediction": prediction and text_or_file("--prediction", prediction),
        "priority": priority,
        "tenant": tenant,
        "budget_ns": None if budget is None else round(budget * 1e9),
        "max_version_lag": max_lag,
        "on_version_lag": on_lag,
    }
    return Template(given(fields))


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def parse_sampling(texts: Iterable[str]) -> dict[str, Any]:
    """Return sampling parameters from "name=value" texts, with YAML values.

    Raises:
        ConfigError: A text has another form, or names no parameter.
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
    """Return a constraint from "kind=value", or "kind=@file" for the content of a file.

    The value of `json_schema` is JSON, that of `choice` a YAML list whose items stay texts
    ("[red, 12, yes]"), the others are texts, and `json_object` has none.

    Raises:
        ConfigError: The kind is unknown, or the value malformed.
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
    value = text_or_file("--constraint", value)
    if kind == "choice":
        return {kind: _texts(value)}
    if kind != "json_schema":
        return {kind: value}
    try:
        return {kind: msgspec.json.decode(value, type=dict[str, Any])}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--constraint: the schema is no JSON object: {error}") from None


def text_or_file(option: str, value: str) -> str:
    """Return the text, or for "@file" the content of the file.

    Raises:
        ConfigError: The file can't be read.
    """
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option}: can't read {value[1:]}: {error}", remedy="give a readable file"
        ) from None


def _texts(value: str) -> list[str]:
    """Raises ConfigError: it is no list of texts."""
    try:
        # This loader keeps "yes", "12" and "null" as texts.
        found = yaml.load(value, yaml.BaseLoader)
    except yaml.YAMLError:
        found = None
    if not (isinstance(found, list) and found and all(isinstance(each, str) for each in found)):
        raise ConfigError(f"--constraint: choice is {shown(value)}, and no list such as [yes, no]")
    return found


class Submission(msgspec.Struct, frozen=True):
    """A request, and the label of its answer among several."""

    label: str
    request: dict[str, Any]


class LineReader(msgspec.Struct):
    """Turns lines into submissions; its errors name the line.

    Attributes:
        name: Name of the file.
        template: Fields that a line lacks.
        max_bytes: Limit of a request's size.
        chat: Whether the chat template is applied to prompts.
        plain_prompts: A line without "{" at its start is a prompt as it stands; else every line is
            JSON, an object (a GenerateRequest) or a string (a prompt).
        number: Number of the last line.
    """

    name: str
    template: Template
    max_bytes: int
    chat: bool = False
    plain_prompts: bool = False
    number: int = 0

    def read(self, line: bytes) -> Submission | None:
        """Return the request of the next line; None for an empty line.

        Raises:
            RequestError: It is not a request.
        """
        self.number += 1
        line = line.strip()
        if not line:
            return None
        is_prompt = self.plain_prompts and not line.startswith(b"{")
        try:
            content: object = line.decode() if is_prompt else msgspec.json.decode(line)
        except (ValueError, RecursionError) as error:
            # msgspec's errors and decoding errors are ValueErrors.
            raise self._error(f"not valid JSON: {error}") from None
        if isinstance(content, str):
            request = self.template.of_text(content, chat=self.chat)
        elif isinstance(content, dict):
            request = self.template.of_object(content)
        else:
            raise self._error('a line is a request, as {"prompt": "…"}, or a prompt, as "…"')
        checked = check_request(request, self.max_bytes)
        if isinstance(checked, Malformed):
            raise self._error(checked.message)
        return Submission(checked.request_id or str(self.number), request)

    def _error(self, problem: str) -> RequestError:
        return RequestError(f"{self.name}, line {self.number}: {problem}")


def read_file(path: Path, reader: LineReader) -> list[Submission]:
    """Return all requests of a file, so that a malformed line is found before any is sent.

    Raises:
        ConfigError: The file can't be read, or holds no request.
        RequestError: A line is not a request.
    """
    submissions = [found for line in read_input(path).split(b"\n") if (found := reader.read(line))]
    if not submissions:
        raise ConfigError(f"{path} holds no requests; write one JSON object to a line")
    return submissions


async def read_stdin(reader: LineReader) -> AsyncIterator[Submission]:
    """Yield requests as their lines arrive. Raises RequestError: a line is not a request."""
    async for line in stdin_lines():
        if (submission := reader.read(line)) is not None:
            yield submission
