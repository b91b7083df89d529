"""The bodies of calls, as far as their fields count."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....config import Int64
from ...serving.fields import EMPTY, Refused
from ...serving.sampling_fields import ANTHROPIC

Role = Literal["user", "assistant", "system"]
Blocks = list[dict[str, Any]]


_WHOLE = Refused("prompts are taken whole")


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`: the fields that a prompt is made of."""

    HARMLESS: ClassVar = frozenset({"cache_control", "output_format"})
    REFUSED: ClassVar = {
        "context_management": _WHOLE,
        "mcp_servers": Refused("nothing is called from here"),
        "speed": Refused("there is one; `priority` says more", (*EMPTY, "standard")),
    }

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    system: str | Blocks | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`/v1/messages`."""

    SAMPLING: ClassVar = ANTHROPIC
    HARMLESS: ClassVar = frozenset({"cache_control", "metadata"})
    REFUSED: ClassVar = CountBody.REFUSED | {
        "container": Refused("nothing is executed"),
        "diagnostics": Refused("nothing is compared with former calls"),
        "inference_geo": Refused("it runs where it runs"),
        "service_tier": Refused(
            "there is one; `priority` says more", (*EMPTY, "auto", "standard_only")
        ),
        "thread": Refused("conversations are sent whole, and none is kept"),
    }

    max_tokens: Int64 | None = None
    stream: bool = False
    stop_sequences: list[str] = []
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
