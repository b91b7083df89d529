"""Whom `chat`, `complete`, `cancel` and `models` ask: a server by its URL, or a pipeline."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from ..config import Config, ConfigError, shown
from .options import Options
from .serve import SERVE_PORT

DEFAULT_SERVER = f"http://127.0.0.1:{SERVE_PORT}/v1"
"""Where `serve` listens."""


class Server(NamedTuple):
    """A server: the URL of its OpenAI interface, without a slash at its end, and the key for it."""

    url: str
    api_key: str = ""


Place = Server | Config
"""A server, or the settings of the bus."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model that takes requests.

    Attributes:
        id: The name that requests give.
        max_model_len: The tokens that prompt and answer may have together; None if unknown.
        root: The folder or file that it was loaded from, as `--model` names it; None if unknown.
    """

    id: str
    max_model_len: int | None = None
    root: str | None = None


class AskedCall(NamedTuple):
    """A tool that the model calls; its arguments are JSON."""

    id: str
    name: str
    arguments: str


class AnswerPiece(NamedTuple):
    """What is new of an answer. Calls come all at once, at its end."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[AskedCall, ...] = ()


class Answerer(Protocol):
    """One that answers. All methods raise NanoInferenceError when it can't be reached."""

    async def check(self) -> str:
        """Whether it can be asked.

        Returns:
            The name by which its model has to be asked for; "" where that need not be said.
        """

    def ask(self, request: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        """The answer as it comes. A caller that stops before its end cancels it.

        Args:
            request: The fields of a GenerateRequest, for one sample; a server takes `tools` too.

        Raises:
            RequestError: It was refused, or it failed; some text may have come.
        """

    async def cancel(self, request_id: str) -> None:
        """Ends a request; one that has ended, or that nobody knows, is left alone."""

    async def models(self) -> list[ServedModel]:
        """Those that it serves."""


def place_of(options: Options) -> Place:
    """What the options name: --url, else a bus as for any command, else where `serve` listens.

    Logging is set up.

    Raises:
        ConfigError: They name both, or the URL is none.
    """
    if (server := named_server(options)) is not None:
        return server
    configured = options.config().bus.url != "memory"
    config = options.client_config()
    if options.bus is not None or configured:
        return config
    return Server(DEFAULT_SERVER, options.api_key or "")


def named_server(options: Options) -> Server | None:
    """The server that --url names; None without one. Logging is set up for one.

    Raises:
        ConfigError: There is --bus too, or the URL is none.
    """
    if options.url is None:
        return None
    if options.bus is not None:
        raise ConfigError("give --url or --bus, and not both")
    options.client_config()
    return server_of(options)


@asynccontextmanager
async def answerer_at(place: Place) -> AsyncIterator[Answerer]:
    """A connection to it.

    Raises:
        NanoInferenceError: There is nobody.
    """
    # Each loads only what it takes.
    if isinstance(place, Server):
        from .http_answerer import HttpAnswerer

        async with HttpAnswerer(place) as server:
            yield server
    else:
        from .bus_answerer import BusAnswerer
        from .connection import connected

        async with connected(place) as client:
            yield BusAnswerer(client)


def server_of(options: Options) -> Server:
    """The server that --url names. OpenAI's interface is at its `/v1` when that says no path.

    Raises:
        ConfigError: It is no URL.
    """
    url = options.url or DEFAULT_SERVER
    parts = None
    with suppress(ValueError):
        parts = urlsplit(url)
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url is {shown(url)}; it must be such as {DEFAULT_SERVER}")
    path = parts.path.rstrip("/") or "/v1"
    url = parts._replace(path=path, query="", fragment="").geturl()
    return Server(url, options.api_key or "")
