"""A server, asked over OpenAI's interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import httpx2
import msgspec

from ..config import RequestError, cut
from .answerer import ServedModel
from .http_calls import CallError, HttpCalls

_DONE = "[DONE]"

_Answer = TypeVar("_Answer")


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


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

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[str, None]:
        path = "/chat/completions" if "messages" in request else "/completions"
        body, headers = openai_call(request)
        done = False
        async with self.answer("POST", self.url + path, body, headers) as response:
            async for event in httpx2.EventSource(response):
                # Read to its end, or its server would take us for one that has left.
                if done := done or event.data == _DONE:
                    continue
                chunk = _decoded(event.data.encode(), _Chunk, self.url)
                if chunk.error is not None:
                    raise RequestError(chunk.error.message, code=str(chunk.error.code))
                for choice in chunk.choices:
                    if text := choice.text or choice.delta.content:
                        yield text
                    if choice.finish_reason == "abort":
                        raise RequestError("somebody has ended the request", code="aborted")
        if not done:
            raise RequestError(f"{self.url} ended before its answer did", code="connection_lost")

    async def cancel(self, request_id: str) -> None:
        # Not OpenAI's, which has no such call; so it is beside its interface.
        async with self.answer("POST", f"{self.root}/abort_request", {"rid": request_id}):
            pass

    async def models(self) -> list[ServedModel]:
        async with self.answer("GET", f"{self.url}/models") as response:
            return _decoded(await response.aread(), _Models, self.url).data


def openai_call(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The body and the headers by which OpenAI's interface takes what a GenerateRequest asks."""
    body: dict[str, Any] = {"stream": True, **request.get("sampling", {})}
    body |= {name: request[name] for name in ("prompt", "messages", "model") if name in request}
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
