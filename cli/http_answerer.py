"""A server, asked over OpenAI's interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

import httpx2
import msgspec

from ..config import NanoInferenceError, RequestError, cut
from .answerer import DEFAULT_SERVER, ServedModel

_CONNECT_S = 10.0
_DONE = "[DONE]"

_Answer = TypeVar("_Answer")


class Unreachable(NanoInferenceError):
    """Nobody answers at a server's URL, or it is no server of this kind."""

    code = "unreachable"


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str | int | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    error: _Error | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ServedModel] = []


class HttpAnswerer:
    """An `Answerer`. Use it as an async context."""

    def __init__(self, url: str) -> None:
        """`url`: of OpenAI's interface, without a slash at its end."""
        self._url = url
        # How long an answer takes is its server's business; Ctrl-C is the caller's.
        self._client = httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=_CONNECT_S))

    async def __aenter__(self) -> HttpAnswerer:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def check(self) -> str:
        return next((model.id for model in await self.models()), "")

    async def ask(self, request: dict[str, Any]) -> AsyncGenerator[str, None]:
        path = "/chat/completions" if "messages" in request else "/completions"
        body, headers = openai_call(request)
        done = False
        async with self._answer("POST", self._url + path, body, headers) as response:
            async for event in httpx2.EventSource(response):
                # Read to its end, or its server would take us for one that has left.
                if done := done or event.data == _DONE:
                    continue
                chunk = _decoded(event.data.encode(), _Chunk, self._url)
                if chunk.error is not None:
                    raise RequestError(chunk.error.message, code=str(chunk.error.code))
                for choice in chunk.choices:
                    if text := choice.text or choice.delta.content:
                        yield text
                    if choice.finish_reason == "abort":
                        raise RequestError("somebody has ended the request", code="aborted")
        if not done:
            raise RequestError(f"{self._url} ended before its answer did", code="connection_lost")

    async def cancel(self, request_id: str) -> None:
        # Not OpenAI's, which has no such call; so it is beside its interface.
        root = self._url.removesuffix("/v1")
        async with self._answer("POST", f"{root}/abort_request", {"rid": request_id}):
            pass

    async def models(self) -> list[ServedModel]:
        async with self._answer("GET", f"{self._url}/models") as response:
            return _decoded(await response.aread(), _Models, self._url).data

    @asynccontextmanager
    async def _answer(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """An answer of status 200.

        Raises:
            RequestError: Any other, or the connection was lost in mid-answer.
            Unreachable: There was none.
        """
        answered = False
        try:
            async with self._client.stream(method, url, json=body, headers=headers) as response:
                answered = True
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            if answered:
                raise RequestError(f"{self._url}: {why}", code="connection_lost") from None
            raise self._unreachable(why) from None

    def _unreachable(self, why: str) -> Unreachable:
        if self._url == DEFAULT_SERVER:
            return Unreachable(
                f"no server at {self._url}; start one with `nano-inference serve`, or give the URL "
                "of another with --url, or a pipeline's bus with --bus"
            )
        return Unreachable(f"can't reach {self._url}: {why}")


def openai_call(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The body and the headers by which OpenAI's interface takes what a GenerateRequest asks."""
    body: dict[str, Any] = {"stream": True, **request.get("sampling", {})}
    body |= {name: request[name] for name in ("prompt", "messages", "model") if name in request}
    if "priority" in request:
        body["priority"] = -request["priority"]
    if "budget_ns" in request:
        body["budget_ms"] = request["budget_ns"] / 1e6
    return body, {"X-Tenant": request["tenant"]} if "tenant" in request else {}


def _refusal(status: int, body: bytes) -> RequestError:
    """What a server says with a status, as far as it says it in OpenAI's shape."""
    try:
        error = msgspec.json.decode(body, type=_Chunk).error or _Error()
    except ValueError:
        error = _Error()
    message = error.message or cut(f"the server answers with status {status}: {body[:400]!r}")
    return RequestError(message, code=str(error.code or status))


def _decoded(body: bytes, kind: type[_Answer], url: str) -> _Answer:
    try:
        return msgspec.json.decode(body, type=kind)
    except ValueError:
        raise RequestError(
            f"what {url} answers is not OpenAI's interface: {cut(ascii(body[:400]))}",
            code="malformed_output",
        ) from None
