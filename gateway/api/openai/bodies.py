"""The bodies of calls, as far as their fields count."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....config import PoolingKind
from ...server.http import Int64
from ...serving.sampling_fields import SamplerFields, SamplingFields

Role = Literal["system", "developer", "user", "assistant", "tool"]
CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Harmless: prefixes are cached without them."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells beside the tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # It pads chunks, against those who watch their sizes.
    include_obfuscation: bool | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a text, as clients write it, or hand back what a server has answered."""

    HARMLESS: ClassVar = CACHE_MARKS | {"annotations", "id", "index", "logprobs"}

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(msgspec.Struct, frozen=True):
    """A part of a message that was refused."""

    type: Literal["refusal"]
    refusal: str


class Prediction(msgspec.Struct, frozen=True):
    """What the client expects the answer to be."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


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
    prediction: Prediction | None = None


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
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    thinking_token_budget: Int64 | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True


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


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Options of a response's stream; usage is in its last event anyway."""

    include_obfuscation: bool | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a response's model is to think. No summaries are made: the reasoning itself is told."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


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
    stream_options: ResponseStreamOptions | None = None
    text: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Int64 | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What was called, and with what: an object, or its JSON."""

    HARMLESS: ClassVar = frozenset({"parsed_arguments"})

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, as clients' libraries hand it back."""

    HARMLESS: ClassVar = CACHE_MARKS | {"extra_content", "index"}

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message; its content is looked at by itself."""

    # `parsed` is what a client's library adds to a message of ours.
    HARMLESS: ClassVar = CACHE_MARKS | {"parsed"}

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
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
    tools: list[dict[str, Any]] = []
    reasoning_effort: Effort | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Of `/detokenize`."""

    model: str = ""
    tokens: list[Int64] | None = None


class EmbeddingCommon(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all calls that embed."""

    model: str = ""
    dimensions: Int64 | None = None
    pooling: PoolingKind | Literal[""] = ""
    normalize: bool | None = None
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class EmbeddingBody(EmbeddingCommon, frozen=True, kw_only=True):
    """Of `/v1/embeddings`."""

    input: str | list[str | Int64 | list[Int64]] | None = None
    encoding_format: Literal["float", "base64"] = "float"


class ScoreBody(EmbeddingCommon, frozen=True, kw_only=True):
    """Of `/score`."""

    text_1: str | list[str | Int64 | list[Int64]] | None = None
    text_2: str | list[str | Int64 | list[Int64]] | None = None


class Document(msgspec.Struct, frozen=True):
    """A text in an object."""

    text: str


class RerankBody(EmbeddingCommon, frozen=True, kw_only=True):
    """Of `/rerank`."""

    query: str = ""
    documents: list[str | dict[str, Any]] | None = None
    top_n: Int64 | None = None
    return_documents: bool = True
