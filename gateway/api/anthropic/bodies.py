"""The bodies of calls: the fields that count, and those that are known and don't."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....bus.public import KVSession
from ....config import Int64
from ...serving.fields import EMPTY, RefusedField
from ...serving.sampling_fields import ANTHROPIC

Role = Literal["user", "assistant", "system"]
Effort = Literal["low", "medium", "high", "xhigh", "max"]
Blocks = list[dict[str, Any]]

CACHE_MARK = {"cache_control": "prefixes are found without it"}
_BILLING = "nothing is billed here"
_NOTHING_EXECUTED = "nothing is executed here; the model answers without"


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

    NEUTRAL: ClassVar = {"block_binding": "blocks of thinking are bound to no conversation"}

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Int64 | None = None
    display: Literal["summarized", "omitted", "updates"] = "summarized"


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The format of the answer, and the effort."""

    REFUSED: ClassVar = {"task_budget": RefusedField("the model is shown no budget")}

    format: dict[str, Any] = {}
    effort: Effort | None = None


class ContextManagement(msgspec.Struct, frozen=True, kw_only=True):
    """Edits of the conversation before the model reads it."""

    edits: list[dict[str, Any]] = []


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/messages/count_tokens`: the fields of which a prompt is made."""

    NEUTRAL: ClassVar = CACHE_MARK | {
        "betas": "fields of a beta are taken without it",
        "anthropic_beta": "fields of a beta are taken without it",
        "anthropic_version": "the header counts",
        "compaction": "it does not change the prompt",
        "mcp_servers": "nothing is called from here; the model answers without",
        "output_format": "it does not change the prompt",
        "speed": "there is one; `priority` says more",
    }
    REFUSED: ClassVar[dict[str, RefusedField]] = {}

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    system: str | Blocks | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] = {}


class MessagesBody(CountBody, frozen=True, kw_only=True):
    """`/v1/messages`."""

    SAMPLING: ClassVar = ANTHROPIC
    NEUTRAL: ClassVar = {
        name: why
        for name, why in CountBody.NEUTRAL.items()
        if name not in ("compaction", "output_format")
    } | {
        "billing_policy": _BILLING,
        "container": _NOTHING_EXECUTED,
        "fallback_credit_token": _BILLING,
        "fallbacks": "they are for calls that a model declines by its policy",
        "metadata": "the key, or without keys the header `X-Tenant`, says whose a request is",
        "user_profile_id": _BILLING,
    }
    REFUSED: ClassVar = {
        "compaction": RefusedField("no conversation is summarised here"),
        "inference_geo": RefusedField("it runs where it runs", (*EMPTY, "global")),
        "service_tier": RefusedField(
            "there is one; `priority` says more", (*EMPTY, "auto", "standard_only")
        ),
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
    diagnostics: dict[str, Any] | None = None


# --- messages -------------------------------------------------------------------------------------


class MessageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings from a system message on."""

    effort: Effort | None = None


class AnthropicMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message.

    Attributes:
        content: Only a system message may have none.
        clear_at: Whether a system message is dropped once there is a later message of the user.
        output_config: Settings of a system message.
    """

    OPEN: ClassVar = True

    role: Role
    content: str | Blocks | None = None
    clear_at: Literal["never", "next_user_message"] = "never"
    output_config: MessageConfig = MessageConfig()


class Citations(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the answer cites a document."""

    REFUSED: ClassVar = {"enabled": RefusedField("no citations are written")}


class TextBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of text."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK | {"citations": "the model reads the text"}

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
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["image"]
    source: dict[str, Any]


class DocumentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in base64."""

    type: Literal["base64"]
    data: str
    media_type: str = ""


class DocumentText(msgspec.Struct, frozen=True, kw_only=True):
    """A text."""

    NEUTRAL: ClassVar = {"media_type": "it is text"}

    type: Literal["text"]
    data: str


class DocumentBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of text and images."""

    type: Literal["content"]
    content: str | Blocks


class DocumentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A document."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["document"]
    source: dict[str, Any]
    title: str = ""
    context: str = ""
    citations: Citations = Citations()


class SearchResultBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A result of a search, by the caller."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["search_result"]
    source: str
    title: str
    content: Blocks
    citations: Citations = Citations()


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's thinking; see `signatures`. Clients may write such blocks."""

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
    NEUTRAL: ClassVar = CACHE_MARK | {"caller": "the call is the same"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = {}


class ToolResultBlock(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a tool call."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Blocks = ""
    is_error: bool = False


class ToolReferenceBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A deferred tool, offered from here on, in the result of a search for tools."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["tool_reference"]
    tool_name: str


class ChangedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool by name, or by a definition as in `tools`."""

    OPEN: ClassVar = True

    type: Literal["tool_reference", "tool_definition"]
    name: str = ""
    definition: dict[str, Any] = {}


class ToolChangeBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that is offered, or no longer offered, from here on."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["tool_addition", "tool_removal"]
    tool: ChangedTool


class CompactionBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A summary in place of all messages before it; None after a failure."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK

    type: Literal["compaction"]
    content: str | None = None


class LeftOutBlock(msgspec.Struct, frozen=True):
    """A block of Anthropic's own tools, executed by its servers; its fields are not read."""
