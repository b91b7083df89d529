"""Servers of the Model Context Protocol: their file, connections to them, and calls of their tools.

Imported only where such servers are configured. docs/tools.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpcore2
import httpx2
import msgspec
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents, Tool

from ...config import ConfigError, McpConfig, NanoInferenceError, RequestError, shown
from ...config.logger import get_logger
from ...media.addresses import UrlRules, check_url
from ...media.fetch import CheckedBackend, Resolve
from .tools import result_text

# The library logs URLs, which may hold secrets.
for _each in ("mcp", "client"):
    logging.getLogger(_each).setLevel(logging.CRITICAL)

FAILED = "mcp_server_failed"

_ANSWER_BYTES = 8
"""Bytes of a server's answer over HTTP, in `mcp.max_result_bytes`."""

_CONNECTION_LOST = -32000
"""The code of JSON-RPC for a call of which nothing is known."""

_ERRORS = (
    *(ExceptionGroup, MCPError, NanoInferenceError, OSError, RuntimeError, TimeoutError),
    *(ValueError, httpx2.HTTPError, httpx2.InvalidURL),
)
"""Errors of connecting; the library's task groups raise groups of them."""


class McpServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server, as the configuration files of other programs describe it: by its URL (streamable
    HTTP) or its command (stdio). Other fields are ignored."""

    url: str = ""
    headers: dict[str, str] = {}
    command: str = ""
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None

    def __repr__(self) -> str:
        # Headers, arguments and environments have secrets.
        return f"McpServer({'a URL' if self.url else 'a command'})"


class _ServerFile(msgspec.Struct):
    """A configuration file."""

    mcpServers: dict[str, McpServer]


def read_servers(path: Path, setting: str) -> dict[str, McpServer]:
    """Read the servers of a configuration file, by their names.

    Args:
        setting: For errors.

    Raises:
        ConfigError: It has none.
    """
    try:
        servers = msgspec.json.decode(path.read_bytes(), type=_ServerFile).mcpServers
    except OSError as error:
        why = f"{setting}: can't read {path}: {error.strerror}"
        raise ConfigError(why, remedy="name a readable file") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{setting}: {path} has no servers: {error}",
            remedy='write {"mcpServers": {"NAME": {"url": "…"} or {"command": "…"}}}',
        ) from None
    for name, server in servers.items():
        if bool(server.url) == bool(server.command):
            raise ConfigError(f"{setting}: server {shown(name)} takes either a url or a command")
    return servers


def configured(config: McpConfig) -> dict[str, McpServer]:
    """Return the servers that calls may name, as they are now in their file.

    Raises:
        ConfigError: The file has none.
    """
    return read_servers(Path(config.servers), "mcp.servers") if config.servers else {}


def url_rules(config: McpConfig) -> UrlRules:
    """Return the rules of URLs that clients give."""
    return UrlRules(
        config.server_hosts,
        config.server_networks,
        config.server_ports,
        setting="mcp.server",
        instead="name a server of the gateway (mcp.servers), or have the host allowed",
        off="mcp_off",
        invalid="invalid_mcp_url",
        refused="mcp_host_refused",
    )


class Outcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        text: The result; "" of a call that failed.
        error: In OpenAI's form; None of a call that did not fail.
    """

    text: str
    error: dict[str, Any] | None = None

    @property
    def for_model(self) -> str:
        """The text of the result or of the error, as the model reads it."""
        return result_text(self.text, self.error)


class Connection:
    """An open connection to a server."""

    def __init__(self, name: str, client: Client, config: McpConfig) -> None:
        self._name, self._client, self._config = name, client, config

    async def tools(self) -> list[Tool]:
        """Return all tools of the server.

        Raises:
            RequestError: mcp_server_failed.
        """
        found: list[Tool] = []
        cursor: str | None = None
        try:
            with anyio.fail_after(self._config.timeout_s):
                while True:
                    page = await self._client.list_tools(cursor=cursor)
                    found += page.tools
                    cursor = page.next_cursor
                    if not cursor or len(found) > self._config.max_tools:
                        return found
        except (TimeoutError, MCPError, ValueError, RuntimeError) as error:
            raise _as_failure(self._name, error) from error

    async def call(self, name: str, arguments: str) -> Outcome:
        """Call a tool, once: nothing is ever sent again.

        Args:
            arguments: As the model wrote them, in JSON.
        """
        try:
            given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (ValueError, RecursionError):
            return failed("the arguments are no JSON object; the tool was not called", -32602)
        limit = f"{self._config.timeout_s:g} s (mcp.timeout_s)"
        try:
            with anyio.fail_after(self._config.timeout_s):
                # The client's own method would send some calls twice.
                result = await self._client.session.call_tool(name, given)
        except TimeoutError:
            return failed(f"no result within {limit}; the call may have had its effect")
        except MCPError as error:
            return failed(error.message, error.code)
        except (RuntimeError, ValueError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            return failed("the result can't be used; the call may have had its effect")
        text, most = _text_of(result), self._config.max_result_bytes
        if (size := len(text.encode())) > most:
            return failed(
                f"the call was made, and its result has {size} bytes, more than {most} "
                "(mcp.max_result_bytes); ask the tool for less"
            )
        if result.is_error:
            content = [{"type": "text", "text": text}]
            return Outcome("", {"type": "mcp_tool_execution_error", "content": content})
        return Outcome(text)


@asynccontextmanager
async def connected(
    name: str,
    server: McpServer,
    config: McpConfig,
    rules: UrlRules | None = None,
    resolve: Resolve | None = None,
) -> AsyncIterator[Connection]:
    """Connect to a server. To be left by the task that entered it.

    Args:
        name: For errors.
        config: Limits.
        rules: For a URL of a client; None for a server of the configuration.
        resolve: By default the system's resolver.

    Raises:
        RequestError: mcp_server_failed; a URL that is not allowed.
    """
    if rules is not None:
        check_url(server.url, rules, name)
    failure: BaseException | None = None
    try:
        async with AsyncExitStack() as stack:
            if server.command:
                command = StdioServerParameters(
                    command=server.command, args=server.args, env=server.env, cwd=server.cwd
                )
                transport = stdio_client(command, sys.__stderr__ or sys.stderr)
            else:
                http = httpx2.AsyncClient(
                    transport=_LimitedTransport(config, rules, name, resolve),
                    headers={"Accept-Encoding": "identity"} | server.headers,
                    timeout=config.timeout_s,
                    trust_env=False,
                )
                transport = streamable_http_client(
                    server.url, http_client=await stack.enter_async_context(http)
                )
            client = await stack.enter_async_context(
                Client(transport, read_timeout_seconds=config.timeout_s, cache=None)
            )
            try:
                yield Connection(name, client, config)
            except BaseException as error:
                failure = error
                raise
    except _ERRORS as error:
        if isinstance(failure, Exception):
            raise failure from None
        raise _as_failure(name, error) from _leaf(error)


class _LimitedTransport(httpx2.AsyncHTTPTransport):
    """Requests to checked URLs and addresses, and responses of limited size."""

    def __init__(
        self, config: McpConfig, rules: UrlRules | None, name: str, resolve: Resolve | None
    ) -> None:
        super().__init__(trust_env=False)
        self._rules, self._name = rules, name
        self._most = _ANSWER_BYTES * config.max_result_bytes
        if rules is not None:
            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=httpx2.create_ssl_context(trust_env=False),
                network_backend=CheckedBackend(rules, name, resolve),
            )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._rules is not None:
            # Also of a redirect.
            check_url(str(request.url), self._rules, self._name)
        response = await super().handle_async_request(request)
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise httpx2.RemoteProtocolError("the server compresses, although asked not to")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Counted(response.stream, self._most)
        return response


class _Counted(httpx2.AsyncByteStream):
    """A body of limited size."""

    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream, self._left = stream, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                raise httpx2.RemoteProtocolError("the server's answer is too large")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def _leaf(error: BaseException) -> BaseException:
    """Return the first error of a group; an error of ours before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_leaf(each) for each in error.exceptions]
    return next((each for each in leaves if isinstance(each, NanoInferenceError)), leaves[0])


def _as_failure(name: str, error: BaseException) -> NanoInferenceError:
    """Return the error for a server that does not answer. The reason would tell a client about
    ports and hosts that it can't reach."""
    leaf = _leaf(error)
    if isinstance(leaf, NanoInferenceError):
        return leaf
    get_logger().info(FAILED, server=name, error=type(leaf).__name__)
    return RequestError(
        f"the MCP server {shown(name)} can't be reached, breaks off, or answers with no list of "
        "tools; see that it runs, and that its authorization is valid",
        code=FAILED,
    )


def failed(message: str, code: int = _CONNECTION_LOST) -> Outcome:
    """Return the outcome of a call that has none from its server."""
    return Outcome("", {"type": "mcp_protocol_error", "code": code, "message": message})


def _text_of(result: CallToolResult) -> str:
    """Return a result as text. Images and other contents are named, and left out."""
    texts: list[str] = []
    for part in result.content:
        if isinstance(part, TextContent):
            texts.append(part.text)
        elif isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
            texts.append(part.resource.text)
        else:
            texts.append(f"[{part.type}: left out, it is no text]")
    if not texts and result.structured_content is not None:
        texts.append(msgspec.json.encode(result.structured_content).decode())
    return "\n".join(texts)
