"""Tools of MCP servers in `chat`: connected while a conversation runs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ..config import McpConfig, RequestError
from ..gateway.serving.mcp_servers import Connection, connected, read_servers

ALL = "all"


class McpTools:
    """The tools of a file's servers, by the names that the model sees.

    Attributes:
        offered: The tools in OpenAI's form.
    """

    def __init__(self, path: Path, allowed: str) -> None:
        """Args:
        path: The file.
        allowed: Servers and tools that are called without asking, with commas; or `all`.

        Raises:
            ConfigError: The file has no servers.
        """
        self._servers = read_servers(path, "--mcp")
        self._allowed = {name.strip() for name in allowed.split(",")}
        self._config = McpConfig()
        self._tools: dict[str, tuple[str, str, Connection]] = {}
        self._serving: asyncio.Task[None] | None = None
        self.offered: list[dict[str, Any]] = []

    @property
    def max_rounds(self) -> int:
        return self._config.max_rounds

    async def open(self) -> None:
        """Connect to all servers.

        Raises:
            RequestError: One can't be reached, or breaks off.
        """
        ready = asyncio.get_running_loop().create_future()
        # Connections are closed by the task that opened them, when the event loop is closed.
        self._serving = asyncio.create_task(self._serve(ready))
        await ready

    def has(self, name: str) -> bool:
        return name in self._tools

    def allows(self, name: str) -> bool:
        """Return whether a tool is called without asking."""
        return bool(self._allowed & {ALL, name, self._tools[name][0]})

    def allow(self, name: str) -> None:
        self._allowed.add(name)

    async def call(self, name: str, arguments: str) -> str:
        """Call a tool, once, and return its result, or its error, for the model."""
        _, tool, connection = self._tools[name]
        assert self._serving is not None, "the servers are connected"
        if self._serving.done():
            return "Error: not called: the connection to the server is lost"
        return (await connection.call(tool, arguments)).for_model

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            async with AsyncExitStack() as stack:
                for name, server in self._servers.items():
                    opened = connected(name, server, self._config)
                    await self._add(name, await stack.enter_async_context(opened))
                ready.set_result(None)
                await asyncio.Event().wait()
        except RequestError as error:
            # After that, calls fail.
            if not ready.done():
                reason = (
                    f"{error.message} ({error.__cause__})" if error.__cause__ else error.message
                )
                ready.set_exception(RequestError(reason, code=error.code))

    async def _add(self, server: str, connection: Connection) -> None:
        for tool in await connection.tools():
            name = f"{server}__{tool.name}"
            self._tools[name] = server, tool.name, connection
            function = {
                "name": name,
                "description": tool.description or "",
                "parameters": tool.input_schema,
            }
            self.offered.append({"type": "function", "function": function})
