"""Settings of Model Context Protocol servers."""

from __future__ import annotations

from typing import ClassVar

from .base import PositiveInt, Seconds, Section
from .images import check_urls


class McpConfig(Section, frozen=True, forbid_unknown_fields=True):
    """Servers of the Model Context Protocol, whose tools `/v1/responses` calls. docs/tools.md.

    Attributes:
        servers: A JSON file with servers (`mcpServers`), which calls name by their `server_label`:
            a `url` with `headers`, or a `command` with `args` and `env`. Empty: there are none.
        server_hosts: Hosts of the `server_url` that a call may give, as in `images.url_hosts`.
            Empty: none.
        server_networks: Networks, as "10.1.0.0/16", whose addresses such hosts may have although
            they are not public.
        server_ports: Ports of these URLs.
        timeout_s: Time limit for connecting to a server, for a list of its tools, and for a call.
        max_result_bytes: Size limit of a tool's result, as text. A server's whole answer may have
            eight times as many.
        max_tools: Limit on the tools that a response offers the model.
        max_calls: Calls of a response that run at once.
        max_rounds: Limit on the rounds of calls of a response; then the model answers without
            tools.
    """

    SECTION: ClassVar[str] = "mcp"

    servers: str = ""
    server_hosts: tuple[str, ...] = ()
    server_networks: tuple[str, ...] = ()
    server_ports: tuple[int, ...] = (80, 443)
    timeout_s: Seconds = 30.0
    max_result_bytes: PositiveInt = 256 << 10
    max_tools: PositiveInt = 128
    max_calls: PositiveInt = 8
    max_rounds: PositiveInt = 16

    def check(self) -> None:
        check_urls(self, "server")

    @property
    def enabled(self) -> bool:
        """Whether a call may name any server."""
        return bool(self.servers or self.server_hosts)
