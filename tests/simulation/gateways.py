"""Gateways of a simulation: the real application, and connections to it below HTTP's bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping
from contextvars import Context
from functools import cache
from typing import Any, NamedTuple

from nano_inference.config import Config
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving import chat_templates, tokenizer
from nano_inference.pipeline.client import BusClient
from nano_inference.text.template_process import render_template
from nano_inference.text.tokenizer import load_tokenizer

from .loop import SimulatedLoop, SimulatedProcess

MS = 1_000_000

TENANT = "x-tenant"

Message = MutableMapping[str, Any]
"""A message of ASGI."""


class _TemplatesHere:
    """`TemplateWorkers` without processes; the bundled model's template is quick."""

    started = True

    def __init__(self, number: int, limit_s: float) -> None:
        """Args: as of `TemplateWorkers`, without a meaning here."""

    def run(self, call: dict[str, Any]) -> dict[str, Any]:
        return render_template(call)


_cached_tokenizer = cache(load_tokenizer)


def replaced() -> list[tuple[Any, str, Any]]:
    """Return what a simulation replaces in gateways: module, name and replacement."""
    return [
        (chat_templates, "TemplateWorkers", _TemplatesHere),
        (tokenizer, "load_tokenizer", _cached_tokenizer),
    ]


class Asked(NamedTuple):
    """A client's request.

    Attributes:
        headers: Beside the tenant's.
    """

    method: str
    path: str
    tenant: str
    headers: dict[str, str]
    body: bytes = b""


class Connection:
    """A connection that carries one request and its answer.

    Messages arrive in order, each after a delay. A gateway sends the next one when the last has
    arrived, so a slow network is a client that reads slowly.
    """

    def __init__(self, loop: SimulatedLoop, delay_ns: Callable[[], int], asked: Asked) -> None:
        self._loop = loop
        self._delay_ns = delay_ns
        self._asked = asked
        self._has_asked = False
        self._left: asyncio.Future[None] = loop.create_future()
        self._arrived: deque[Message | None] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.is_closed = False

    @property
    def scope(self) -> dict[str, Any]:
        """The scope of ASGI."""
        asked = self._asked
        headers = {TENANT: asked.tenant, "content-type": "application/json", **asked.headers}
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": asked.method,
            "scheme": "http",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }

    # --- the gateway's side -------------------------------------------------------------------

    async def receive(self) -> Message:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": self._asked.body, "more_body": False}
        await asyncio.shield(self._left)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._left.done():
            return  # as the server does
        arrived: asyncio.Future[None] = self._loop.create_future()

        def arrive() -> None:
            self._arrive(message)
            if not arrived.done():
                arrived.set_result(None)

        self._later(arrive)
        await arrived

    def lose(self) -> None:
        """Note that the gateway is gone."""
        self._later(lambda: self._arrive(None))

    # --- the client's side --------------------------------------------------------------------

    async def read(self) -> Message | None:
        """Return the next message; None if the connection is lost."""
        while not self._arrived:
            self._reader = self._loop.create_future()
            await self._reader
        return self._arrived.popleft()

    def close(self) -> None:
        """Leave; the gateway notices it later."""
        self.is_closed = True
        self._later(self._leave)

    def _leave(self) -> None:
        if not self._left.done():
            self._left.set_result(None)

    def _arrive(self, message: Message | None) -> None:
        self._arrived.append(message)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _later(self, action: Callable[[], None]) -> None:
        self._loop.call_in(self._delay_ns(), action, context=Context())


class SimulatedGateway:
    """A gateway's application with its background, without a server, while the context is open.

    Attributes:
        process: The gateway's.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        process: SimulatedProcess,
        client: BusClient,
        config: Config,
        delay_ns: Callable[[], int],
    ) -> None:
        """`delay_ns`: draws how long a message takes."""
        self._loop = loop
        self.process = process
        self._delay_ns = delay_ns
        self._app = make_app(client, config)
        self._open: dict[Connection, None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> SimulatedGateway:
        await self._app.policy.open()
        self._tasks = [asyncio.create_task(work()) for work in self._app.background.values()]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()

    def connect(self, asked: Asked) -> Connection:
        """Send a request; the gateway begins with it a moment later."""
        connection = Connection(self._loop, self._delay_ns, asked)
        self._open[connection] = None

        def begin() -> None:
            if self.process.alive:
                self._loop.start(self.process, self._serve(connection))

        self._loop.call_in(self._delay_ns(), begin, context=Context())
        return connection

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._app(connection.scope, connection.receive, connection.send)
        except RuntimeError as error:
            # An answer that fails once it has begun; the server closes its connection.
            if "already started" not in str(error):
                raise
            connection.lose()
        finally:
            self._open.pop(connection, None)

    def kill(self) -> None:
        """Note that the process was killed: all connections break."""
        for connection in self._open:
            connection.lose()
        self._open.clear()
