"""What becomes of each field of a call: one table, which the document repeats."""

from __future__ import annotations

from typing import Literal, TypeVar

from ...serving.fields import EMPTY, Body, Field, read_known_fields

T = TypeVar("T")

CallName = Literal["messages", "count_tokens"]

_MESSAGES: tuple[CallName, ...] = ("messages",)
_BOTH: tuple[CallName, ...] = ("messages", "count_tokens")
_COUNT: tuple[CallName, ...] = ("count_tokens",)

FIELDS = (
    Field("model", _BOTH, "honoured", "the served model's name, or absent; any other is 404"),
    Field(
        "messages",
        _BOTH,
        "honoured",
        "roles user, assistant and system; content as text, or as [blocks](#messages). One of the "
        "assistant at the end is continued",
    ),
    Field("system", _BOTH, "honoured", "a text, or blocks of text"),
    Field("max_tokens", _MESSAGES, "honoured", "must be given"),
    Field("stream", _MESSAGES, "honoured", "server-sent events"),
    Field("stop_sequences", _MESSAGES, "honoured", "up to 16; the text ends before one"),
    Field("temperature", _MESSAGES, "honoured", "1; 0 is greedy, and so is less than 0.000001"),
    Field("top_p", _MESSAGES, "honoured", "1 is off"),
    Field("top_k", _MESSAGES, "honoured", "0 and -1 are off"),
    Field("seed", _MESSAGES, "honoured", "not Anthropic's: the same sample each time"),
    Field(
        "priority",
        _MESSAGES,
        "honoured",
        "not Anthropic's: lower is earlier; what `gateway.max_priority`, or the key, does not "
        "allow is 400 `invalid_priority`",
    ),
    Field(
        "budget_ms",
        _MESSAGES,
        "honoured",
        "not Anthropic's: how long it may take, beside the header `X-Budget-Ms`",
    ),
    Field(
        "cache_salt",
        _MESSAGES,
        "honoured",
        "not Anthropic's: prefixes are shared only under the same one",
    ),
    Field(
        "chat_template_kwargs",
        _BOTH,
        "honoured",
        "not Anthropic's: variables of the model's chat template; one that it does not read is "
        "refused",
    ),
    Field(
        "metadata",
        _MESSAGES,
        "harmless",
        "the key, or without keys the header `X-Tenant`, says whose a request is",
    ),
    Field("cache_control", _BOTH, "harmless", "prefixes are found without it; in blocks, too"),
    Field("tools", _BOTH, "honoured", "of the caller's own; Anthropic's are refused"),
    Field(
        "tool_choice",
        _BOTH,
        "honoured",
        "auto, any, tool with a name, none; `disable_parallel_tool_use`",
    ),
    Field(
        "thinking",
        _BOTH,
        "honoured",
        "enabled with `budget_tokens`, adaptive, disabled; absent it is left to the model's chat "
        "template",
    ),
    Field("mcp_servers", _BOTH, "refused", "nothing is called from here"),
    Field("container", _MESSAGES, "refused", "nothing is executed"),
    Field(
        "output_config",
        _BOTH,
        "honoured",
        "`format` with a `json_schema`; `effort`, where the chat template reads `reasoning_effort`",
    ),
    Field("output_format", _MESSAGES, "honoured", "the same, as it was called before"),
    Field("output_format", _COUNT, "harmless", "it does not change the prompt"),
    Field("context_management", _BOTH, "refused", "prompts are taken whole"),
    Field("thread", _MESSAGES, "refused", "conversations are sent whole, and none is kept"),
    Field("diagnostics", _MESSAGES, "refused", "nothing is compared with former calls"),
    Field("inference_geo", _MESSAGES, "refused", "it runs where it runs"),
    Field("speed", _BOTH, "refused", "there is one; `priority` says more", (*EMPTY, "standard")),
    Field(
        "service_tier",
        _MESSAGES,
        "refused",
        "there is one; `priority` says more",
        (*EMPTY, "auto", "standard_only"),
    ),
)
"""All that are known by name. Any other is refused when it asks for something."""


def read_fields(body: Body, kind: type[T], call: CallName) -> T:
    """As the one that all interfaces have, by this table."""
    return read_known_fields(FIELDS, body, kind, call)
