"""The bodies of calls, as far as their fields count."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..http import Int64

Role = Literal["system", "developer", "user", "assistant", "tool"]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells beside the tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # It pads chunks, against those who watch their sizes.
    include_obfuscation: bool | None = None


class SamplerFields(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, but for what has other shapes or defaults in each call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int64 = 0
    min_p: float = 0.0
    seed: Int64 | None = None
    stop: str | list[str] = ""
    stop_token_ids: list[Int64] = []
    ignore_eos: bool = False
    min_tokens: Int64 = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[Int64, float] = {}
    structured_outputs: dict[str, Any] = {}


class SamplingFields(SamplerFields, frozen=True, kw_only=True):
    """The same, and what calls have that answer with choices."""

    n: Int64 = 1
    prompt_logprobs: Int64 | None = None


class Common(SamplingFields, frozen=True, kw_only=True):
    """The fields that completions and chats have."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""
    response_format: dict[str, Any] = {}
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(Common, frozen=True, kw_only=True):
    """Of `/v1/completions`."""

    prompt: str | list[str | Int64 | list[Int64]] | None = None
    max_tokens: Int64 = 16
    echo: bool = False
    logprobs: Int64 | None = None


class ChatBody(Common, frozen=True, kw_only=True):
    """Of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/inference/v1/generate`; its parameters are looked at by themselves."""

    model: str = ""
    token_ids: list[Int64] | None = None
    sampling_params: dict[str, Any] = {}
    request_id: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_weight_versions: bool = False
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class SamplingBody(SamplingFields, frozen=True, kw_only=True):
    """Its `sampling_params`."""

    max_tokens: Int64 | None = None
    logprobs: Int64 | None = None


class ResponseBody(SamplerFields, frozen=True, kw_only=True):
    """Of `/v1/responses`."""

    model: str = ""
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    include: list[str] = []
    top_logprobs: Int64 | None = None
    store: bool = True
    background: bool = False
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    stream: bool = False
    text: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message; its content is looked at by itself."""

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/tokenize`."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/detokenize`."""

    model: str = ""
    tokens: list[Int64] | None = None
