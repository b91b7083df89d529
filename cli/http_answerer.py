"""A server, asked over OpenAI's interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import httpx2
import msgspec

from ..config import RequestError, cut
from .answerer import AnswerPiece, AskedCall, ServedModel
from .http_calls import CallError, HttpCalls

_DONE = "[DONE]"

_OUTPUTS = {"json_schema": "json", "lark": "grammar", "gbnf": "grammar"}
"""What vLLM's `structured_outputs` call our kinds of constraints, where it is not the same."""

_Answer = TypeVar("_Answer")


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


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: CallError | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ServedModel] = []


class HttpAnswerer(HttpCalls):
    """An `Answerer`. Use it as an async context."""

    async def check(self) -> str:
        return next((model.id for model in await self.models()), "")

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        path = "/chat/completions" if "messages" in request else "/completions"
        body, headers = openai_call(request)
        done = False
        calls: dict[int, AskedCall] = {}
        async with self.answer("POST", self.url + path, body, headers) as response:
            async for event in httpx2.EventSource(response):
                # Read to its end, or its server would take us for one that has left.
                if done := done or event.data == _DONE:
                    continue
                chunk = _decoded(event.data.encode(), _Chunk, self.url)
                if chunk.error is not None:
                    raise RequestError(chunk.error.message, code=str(chunk.error.code))
                for choice in chunk.choices:
                    piece = _piece_of(choice, calls)
                    if piece.text or piece.reasoning:
                        yield piece
                    if choice.finish_reason == "abort":
                        raise RequestError("somebody has ended the request", code="aborted")
        if calls:
            yield AnswerPiece(calls=tuple(call for _, call in sorted(calls.items())))
        if not done:
            raise RequestError(f"{self.url} ended before its answer did", code="connection_lost")

    async def cancel(self, request_id: str) -> None:
        # Not OpenAI's, which has no such call; so it is beside its interface.
        async with self.answer("POST", f"{self.root}/abort_request", {"rid": request_id}):
            pass

    async def models(self) -> list[ServedModel]:
        async with self.answer("GET", f"{self.url}/models") as response:
            return _decoded(await response.aread(), _Models, self.url).data


def _piece_of(choice: _Choice, calls: dict[int, AskedCall]) -> AnswerPiece:
    """What is new of an answer, but for calls, which are gathered: servers send them in pieces."""
    delta = choice.delta
    for new in delta.tool_calls or ():
        before = calls.get(new.index, AskedCall("", "", ""))
        calls[new.index] = AskedCall(
            new.id or before.id,
            before.name + (new.function.name or ""),
            before.arguments + (new.function.arguments or ""),
        )
    reasoning = delta.reasoning_content or delta.reasoning or ""
    return AnswerPiece(choice.text or delta.content or "", reasoning)


def openai_call(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The body and the headers by which OpenAI's interface takes what a GenerateRequest asks."""
    body: dict[str, Any] = {"stream": True, **request.get("sampling", {})}
    if constraint := body.pop("constraint", None):
        body["structured_outputs"] = {
            _OUTPUTS.get(kind, kind): value for kind, value in constraint.items()
        }
    names = ("prompt", "messages", "model", "tools")
    body |= {name: request[name] for name in names if name in request}
    if "prediction" in request:
        body["prediction"] = {"type": "content", "content": request["prediction"]}
    if "priority" in request:
        body["priority"] = -request["priority"]
    if "budget_ns" in request:
        body["budget_ms"] = request["budget_ns"] / 1e6
    return body, {"X-Tenant": request["tenant"]} if "tenant" in request else {}


def _decoded(body: bytes, kind: type[_Answer], url: str) -> _Answer:
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError:
        raise RequestError(
            f"what {url} answers is not OpenAI's interface: {cut(ascii(body[:400]))}",
            code="malformed_output",
        ) from None
