"""The bodies of `/v1/responses`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....bus.public import KVSession
from ....config import Int64
from ...serving.fields import RefusedField
from ...serving.sampling_fields import RESPONSE_SAMPLING, WHOLE
from .bodies import (
    MODERATION,
    NO_PADDING,
    TEXT_NEUTRAL,
    TEXT_REFUSED,
    VERBOSITY,
    Budget,
    Effort,
    RequestBody,
)


class TextOptions(msgspec.Struct, frozen=True):
    """Options of a response's text."""

    NEUTRAL: ClassVar = {"verbosity": VERBOSITY}

    format: dict[str, Any] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Options of a response's stream, whose last event has the usage anyway."""

    NEUTRAL: ClassVar = {"include_obfuscation": NO_PADDING}


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A response's reasoning. There are no summaries: the reasoning itself is returned."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class NamedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A stored conversation."""

    id: str


class CompactionRule(msgspec.Struct, frozen=True, kw_only=True):
    """The most tokens of a prompt that is not compacted."""

    type: Literal["compaction"]
    compact_threshold: Int64 | None = None


class ResponseBody(RequestBody, frozen=True, kw_only=True):
    """`/v1/responses`."""

    SAMPLING: ClassVar = RESPONSE_SAMPLING
    NEUTRAL: ClassVar = TEXT_NEUTRAL | {
        "prompt_cache_options": "the cache decides",
        "verbosity": VERBOSITY,
    }
    REFUSED: ClassVar = (
        TEXT_REFUSED
        | WHOLE
        | {
            "background_options": RefusedField("there is one speed; `priority` says more"),
            "moderation": MODERATION,
            "prompt": RefusedField("there are no prompts by name; send `input`"),
            "return_sampling_mask": RefusedField("ask `/v1/chat/completions`"),
        }
    )

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    include: list[str] = []
    top_logprobs: Int64 | None = None
    store: bool = True
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | NamedConversation | None = None
    kv_session: KVSession | None = None
    metadata: dict[str, str] = {}
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    structured_outputs: dict[str, Any] = {}
    text: TextOptions = TextOptions()
    truncation: Literal["auto", "disabled"] = "disabled"
    context_management: list[CompactionRule] = []
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    max_tool_calls: Int64 | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Budget | None = None

    @property
    def conversation_id(self) -> str:
        """The id of its conversation; "" for none."""
        given = self.conversation
        return given.id if isinstance(given, NamedConversation) else given or ""
