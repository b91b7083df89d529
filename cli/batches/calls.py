"""Calls of lines: at a server, again while it refuses for load, or at an engine in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from typing import NamedTuple

import anyio
import msgspec

from ...config import STAGES, ConfigError, NanoInferenceError, PolicyConfig
from ...telemetry import setup_logging
from ..clients import refusal
from ..connection import ServerAddress, running_server, server_of
from ..model_files import check_model_files
from ..options import Options
from ..process import ending_at_once
from ..terminal import complain, waiting
from .client import BatchClient
from .journal import Response

CONCURRENT = 256
"""Lines at once."""

PATIENCE_S = 600.0
"""The run ends when for so long a server has refused for load, or was away."""

_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_TRIED_500 = 3
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 30.0
_ENDS_THE_RUN = (401, 403)

Send = Callable[[str, bytes], Awaitable[Response]]


class Place(NamedTuple):
    """Where lines are sent.

    Attributes:
        model: Returns the model of lines that name none.
        concurrent: Lines at once, unless the command has a number.
        calls: Opens it; yields what calls a path with a body, and returns the response.
    """

    model: Callable[[], Awaitable[str]]
    concurrent: int
    calls: Callable[[], AbstractAsyncContextManager[Send]]


def server_address(options: Options) -> ServerAddress:
    """Return the server of --url, else the newest that runs here, else the default one.

    Raises:
        ConfigError: The URL is malformed, or what runs has no HTTP.
    """
    options.client_config()
    if options.url is not None:
        return server_of(options)
    return running_server(options) or server_of(options)


def at_server(options: Options, tenant: str | None) -> Place:
    """Return a server. Raises ConfigError: as `server_address`."""
    address = server_address(options)

    async def model() -> str:
        if options.served is not None:
            return options.served
        async with BatchClient(address) as client:
            return await client.check()

    @asynccontextmanager
    async def calls() -> AsyncIterator[Send]:
        async with BatchClient(address) as client:
            yield _Patient(client, tenant).send

    return Place(model, CONCURRENT, calls)


class _Patient:
    """Sends lines to a server, again while it refuses for load or is away."""

    def __init__(self, client: BatchClient, tenant: str | None) -> None:
        self._client = client
        self._headers = {} if tenant is None else {"X-Tenant": tenant}
        self._answered_s = time.monotonic()
        self._any = self._said = False

    async def send(self, path: str, body: bytes) -> Response:
        """See Place.

        Raises:
            NanoInferenceError: The server refuses the key, or has been away for `PATIENCE_S`.
        """
        for tried, wait_s in enumerate(_waits(), 1):
            after_s = 0.0
            try:
                status, content, headers = await self._client.post(path, body, self._headers)
            except NanoInferenceError as error:  # away, or the connection was lost
                if not self._any:
                    raise
                failure = error
            else:
                self._any = True
                if status in _ENDS_THE_RUN:
                    raise refusal(status, content)
                if status not in _RETRIED or (status == 500 and tried >= _TRIED_500):
                    self._answered_s = time.monotonic()
                    return _response(status, content)
                failure = refusal(status, content)
                if (text := headers.get("retry-after", "")).isdigit():
                    after_s = min(float(text), PATIENCE_S)
            if time.monotonic() - self._answered_s > PATIENCE_S:
                raise failure
            self._say(failure)
            await anyio.sleep(max(wait_s, after_s))
        raise AssertionError("the waits have no end")

    def _say(self, failure: NanoInferenceError) -> None:
        if not self._said:
            self._said = True
            complain(f"a line is sent again, as others may be: {failure}")


def _waits() -> Iterator[float]:
    wait_s = _FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _MOST_WAIT_S)


def _response(status: int, content: bytes) -> Response:
    """Return a response, on one line."""
    try:
        return Response(status, msgspec.Raw(msgspec.json.format(content, indent=-1)))
    except ValueError:
        text = content.decode(errors="replace")
        return Response(status if status >= 400 else 502, msgspec.Raw(msgspec.json.encode(text)))


def in_process(options: Options, tenant: str | None) -> Place:
    """Return an engine in this process, with the interfaces of a gateway and no port.

    Raises:
        NanoInferenceError: It can't be started with these settings.
    """
    if options.url is not None:
        raise ConfigError("give --url or --local, and not both")
    here = msgspec.structs.replace(
        options, bus="memory", model=options.served, log_level=options.log_level or "warning"
    )
    config = here.config(**{"pipeline.stages": list(STAGES), "gateway.console": False})
    # No caller is another than the one of this command.
    config = msgspec.structs.replace(config, policy=PolicyConfig())
    check_model_files(config, options.served)
    setup_logging(config.telemetry)
    headers = [(b"content-type", b"application/json")]
    if tenant is not None:
        headers.append((b"x-tenant", tenant.encode()))

    async def model() -> str:
        return config.engine.model_name

    @asynccontextmanager
    async def calls() -> AsyncIterator[Send]:
        # Imports torch and the libraries of HTTP.
        from ...gateway.app import make_app
        from ...gateway.call import Call
        from ...gateway.caller import ANYBODY
        from ...pipeline.pipeline import Pipeline

        numbers = count(1)
        async with AsyncExitStack() as stack:
            with waiting("loading the model"), ending_at_once():
                pipeline = await stack.enter_async_context(Pipeline(config))
            app = make_app(pipeline.client, config)
            stack.push_async_callback(app.aclose)

            async def send(path: str, body: bytes) -> Response:
                name = f"line-{next(numbers)}"
                call = Call(id=name, caller=ANYBODY, headers=headers, path=path)
                answer = await app.answer_own(call, body)
                return _response(answer.status, answer.body)

            yield send

    return Place(model, max(CONCURRENT, 4 * config.engine.max_batch_size), calls)
