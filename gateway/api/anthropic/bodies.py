"""The bodies of calls, as far as their fields count."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...server.http import Int64

Role = Literal["user", "assistant", "system"]
Blocks = list[dict[str, Any]]


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/v1/messages/count_tokens`: all that a prompt is made of."""

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    system: str | Blocks | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """Of `/v1/messages`."""

    max_tokens: Int64 | None = None
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    seed: Int64 | None = None
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""
    output_format: dict[str, Any] = {}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message; its content is looked at by itself."""

    role: Role
    content: str | Blocks


class TextBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of text."""

    type: Literal["text"]
    text: str
    # Harmless: prefixes are cached without it.
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What the assistant thought. Anybody may have written it, so its signature says nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The same, in a form that only Anthropic reads."""

    type: Literal["redacted_thinking"]
    data: str = ""


class DirectCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The model itself, and no program of its."""

    type: Literal["direct"]


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Blocks = ""
    is_error: bool = False
    cache_control: dict[str, Any] | None = None
