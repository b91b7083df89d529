"""The bodies of calls, as far as their fields count."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..http import Int64

Role = Literal["user", "assistant", "system"]
Blocks = list[dict[str, Any]]


class CountBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/v1/messages/count_tokens`: all that a prompt is made of."""

    model: str = ""
    messages: list[dict[str, Any]] | None = None
    system: str | Blocks | None = None
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
    output_config: dict[str, Any] = {}
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
