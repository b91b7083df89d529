"""Calls to a server over HTTP, and what its refusals say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import httpx2
import msgspec

from ..config import NanoInferenceError, RequestError, cut
from .answerer import DEFAULT_SERVER, Server

_CONNECT_S = 10.0


class Unreachable(NanoInferenceError):
    """Nobody answers at a server's URL, or it is no server of this kind."""

    code = "unreachable"


class CallError(msgspec.Struct, frozen=True):
    """An error as OpenAI's interface tells it."""

    message: str = ""
    code: str | int | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error: CallError | None = None


class HttpCalls:
    """A connection to a server. Use it as an async context.

    Attributes:
        url: Of OpenAI's interface, without a slash at its end.
    """

    def __init__(self, server: Server) -> None:
        self.url = server.url
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        # How long an answer takes is its server's business; Ctrl-C is the caller's.
        timeout = httpx2.Timeout(None, connect=_CONNECT_S)
        self._client = httpx2.AsyncClient(timeout=timeout, headers=headers)

    @property
    def root(self) -> str:
        """Where there is what is not OpenAI's."""
        return self.url.removesuffix("/v1")

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def answer(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """An answer of a status that says that it was done.

        Raises:
            RequestError: Any other, or the connection was lost in mid-answer.
            Unreachable: There was none.
        """
        answered = False
        try:
            async with self._client.stream(method, url, json=body, headers=headers) as response:
                answered = True
                if not response.is_success:
                    raise _refusal(response.status_code, await response.aread())
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            if answered:
                raise RequestError(f"{self.url}: {why}", code="connection_lost") from None
            raise self._unreachable(why) from None

    async def get(self, path: str, refused: Collection[int] = ()) -> tuple[int, bytes]:
        """The status and the body of an answer to a GET outside of OpenAI's interface.

        Args:
            path: Behind `root`.
            refused: Statuses that are answers too; 404 always is.

        Raises:
            RequestError: Any other that does not say that it was done.
            Unreachable: There was none.
        """
        try:
            response = await self._client.get(f"{self.root}{path}")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise self._unreachable(why, self.root) from None
        if not (response.is_success or response.status_code in (404, *refused)):
            raise _refusal(response.status_code, response.content)
        return response.status_code, response.content

    def _unreachable(self, why: str, place: str = "") -> Unreachable:
        if self.url == DEFAULT_SERVER:
            return Unreachable(
                f"no server at {self.url}; start one with `nano-inference serve`, or give the URL "
                "of another with --url, or a pipeline's bus with --bus"
            )
        return Unreachable(f"can't reach {place or self.url}: {why}")


def _refusal(status: int, body: bytes) -> RequestError:
    """What a server says with a status, as far as it says it in OpenAI's shape."""
    try:
        error = msgspec.json.decode(body, type=_Refusal).error or CallError()
    except ValueError:
        error = CallError()
    message = error.message or cut(f"the server answers with status {status}: {body[:400]!r}")
    return RequestError(message, code=str(error.code or status))
