"""Tools of MCP servers in a response's body, and the items about them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....serving.fields import RefusedField
from ..bodies import CACHE_MARKS

_ELSEWHERE = RefusedField("only OpenAI's servers have these connections; give `server_url`")


class McpFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Some tools of an MCP server."""

    tool_names: list[str] | None = None
    read_only: bool | None = None

    def has(self, name: str, *, read_only: bool) -> bool:
        """Return whether a tool is one of them.

        Args:
            read_only: Whether its server declares that it changes nothing.
        """
        named = self.tool_names is None or name in self.tool_names
        return named and self.read_only in (None, read_only)


class McpApproval(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of an MCP server that need an approval, and those that need none."""

    always: McpFilter | None = None
    never: McpFilter | None = None


class McpTool(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of an MCP server."""

    NEUTRAL: ClassVar = CACHE_MARKS | {"defer_loading": "all tools are shown to the model"}
    REFUSED: ClassVar = {"connector_id": _ELSEWHERE, "tunnel_id": _ELSEWHERE}

    type: Literal["mcp"]
    server_label: str
    server_url: str | None = None
    server_description: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: list[str] | McpFilter | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    require_approval: Literal["always", "never"] | McpApproval | None = None

    def __repr__(self) -> str:
        # Its headers are secrets.
        return f"McpTool({self.server_label!r})"

    def allows(self, name: str, *, read_only: bool) -> bool:
        """Return whether the model is offered a tool of the server."""
        allowed = self.allowed_tools
        if isinstance(allowed, McpFilter):
            return allowed.has(name, read_only=read_only)
        return allowed is None or name in allowed

    def needs_approval(self, name: str, *, read_only: bool) -> bool:
        """Return whether a person has to approve a call of a tool; of one that no filter names,
        too."""
        match self.require_approval:
            case "never":
                return False
            case McpApproval(always=always, never=never):
                if always is not None and always.has(name, read_only=read_only):
                    return True
                return never is None or not never.has(name, read_only=read_only)
        return True

    def shown(self, server_url: str | None) -> dict[str, Any]:
        """Return the tool as a response shows and keeps it, without secrets.

        Args:
            server_url: Without its path, which may be one.
        """
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found | {
            "server_url": server_url,
            "headers": None,
            "authorization": None,
            "require_approval": found["require_approval"] or "always",
        }
