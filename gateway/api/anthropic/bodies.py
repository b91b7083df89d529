"""The bodies of calls: the fields that count, and those that are known and don't."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....bus.public import KVSession
from ....config import Int64
from ...serving.fields import EMPTY, RefusedField
from ...serving.sampling_fields import ANTHROPIC
from ...serving.tools import DirectCaller

Role = Literal["user", "assistant", "system"]
Blocks = list[dict[str, Any]]

_CACHE_MARK = {"cache_control": "prefixes are found without it"}
_ONE_SPEED = "there is one; `priority` says more"


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the caller's."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = _CACHE_MARK | {
        "eager_input_streaming": "a call is sent when it is complete"
    }

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str = ""
    strict: bool = False
    allowed_callers: list[Literal["direct"]] = []


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that may, or must, be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the model thinks before it answers.

    Attributes:
        budget_tokens: Most tokens of thinking; None for no limit.
        display: Whether the answer has the text of thinking, or empty blocks.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int64 | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the answer, and the effort."""

    format: dict[str, Any] = {}
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`: the fields of which a prompt is made."""

    NEUTRAL: ClassVar = _CACHE_MARK | {"output_format": "it does not change the prompt"}
    REFUSED: ClassVar = {
        "context_management": RefusedField("prompts are taken whole"),
        "mcp_servers": RefusedField("nothing is called from here"),
        "speed": RefusedField(_ONE_SPEED, (*EMPTY, "standard")),
    }

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    system: str | Blocks | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`/v1/messages`."""

    SAMPLING: ClassVar = ANTHROPIC
    NEUTRAL: ClassVar = _CACHE_MARK | {
        "metadata": "the key, or without keys the header `X-Tenant`, says whose a request is"
    }
    REFUSED: ClassVar = CountBody.REFUSED | {
        "container": RefusedField("nothing is executed"),
        "diagnostics": RefusedField("nothing is compared with former calls"),
        "inference_geo": RefusedField("it runs where it runs"),
        "service_tier": RefusedField(_ONE_SPEED, (*EMPTY, "auto", "standard_only")),
        "thread": RefusedField("conversations are sent whole, and none is kept"),
    }

    max_tokens: Int64 | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""
    kv_session: KVSession | None = None
    output_format: dict[str, Any] = {}


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message."""

    OPEN: ClassVar = True

    role: Role
    content: str | Blocks


class TextBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of text."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = _CACHE_MARK

    type: Literal["text"]
    text: str


class ImageFile(msgspec.Struct, frozen=True, kw_only=True):
    """An image in base64. Its content decides the format, not the declared type."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = {"media_type": "the file's content decides"}

    type: Literal["base64"]
    data: str


class ImageAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An image by URL."""

    OPEN: ClassVar = True

    type: Literal["url"]
    url: str


class ImageBlock(msgspec.Struct, frozen=True, kw_only=True):
    """An image."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = _CACHE_MARK

    type: Literal["image"]
    source: dict[str, Any]


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's thinking. The signature is ignored: clients may write such blocks."""

    OPEN: ClassVar = True

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Thinking in a form that only Anthropic reads."""

    OPEN: ClassVar = True

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = _CACHE_MARK

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}
    caller: DirectCaller | None = None


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tool call."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = _CACHE_MARK

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Blocks = ""
    is_error: bool = False
