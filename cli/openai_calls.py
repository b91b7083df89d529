"""Calls of OpenAI's interface: bodies from requests of the bus, and the parts of answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from .images import for_server

_OUTPUTS = {"json_schema": "json", "lark": "grammar", "gbnf": "grammar"}
"""Kinds of constraints whose name in vLLM's `structured_outputs` differs."""


class ReceivedCall(NamedTuple):
    """A tool call of the model; its arguments are JSON."""

    id: str
    name: str
    arguments: str


class AnswerPart(NamedTuple):
    """The next part of an answer. Tool calls come all at once, at its end."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ReceivedCall, ...] = ()


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _Function = _Function()


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class Choice(msgspec.Struct, frozen=True):
    """The new part of a choice."""

    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class CallError(msgspec.Struct, frozen=True):
    """Why a call was refused or has failed."""

    message: str = ""
    code: str | int | None = None


class Chunk(msgspec.Struct, frozen=True):
    """A part of a streamed answer, or a body with an error."""

    choices: list[Choice] = []
    error: CallError | None = None


def part_of(choice: Choice, calls: dict[int, ReceivedCall]) -> AnswerPart:
    """Return the new text of a choice; tool calls, which come in pieces, are added to `calls`."""
    delta = choice.delta
    for new in delta.tool_calls or ():
        before = calls.get(new.index, ReceivedCall("", "", ""))
        calls[new.index] = ReceivedCall(
            new.id or before.id,
            before.name + (new.function.name or ""),
            before.arguments + (new.function.arguments or ""),
        )
    reasoning = delta.reasoning_content or delta.reasoning or ""
    return AnswerPart(choice.text or delta.content or "", reasoning)


def openai_call(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return body and headers of OpenAI's interface for the fields of a GenerateRequest."""
    body: dict[str, Any] = {"stream": True, **request.get("sampling", {})}
    if constraint := body.pop("constraint", None):
        body["structured_outputs"] = {
            _OUTPUTS.get(kind, kind): value for kind, value in constraint.items()
        }
    names = ("prompt", "messages", "model", "tools")
    body |= {name: request[name] for name in names if name in request}
    if "messages" in body:
        body["messages"] = list(map(for_server, body["messages"]))
    if "prediction" in request:
        body["prediction"] = {"type": "content", "content": request["prediction"]}
    if "priority" in request:
        body["priority"] = -request["priority"]
    if "budget_ns" in request:
        body["budget_ms"] = request["budget_ns"] / 1e6
    return body, {"X-Tenant": request["tenant"]} if "tenant" in request else {}
