"""The bodies of calls: the fields that count, and those that are known and don't."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....bus.public import FinishReason, Fork, KVSession, OnVersionLag, SessionAction
from ....config import MAX_INT64, Int64, PoolingKind
from ...serving.fields import EMPTY, RefusedField
from ...serving.sampling_fields import REFUSED, TEXT_SAMPLING
from ...serving.token_images import ContentPart, Features

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
"""Tokens of reasoning."""
Truncation = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]
"""The most tokens of a prompt; -1: as many as the model has room for."""
Prompts = str | list[str | Int64 | list[Int64]]
CACHE_MARKS = dict.fromkeys(
    ("cache_control", "prompt_cache_breakpoint"), "prefixes are found without it"
)

_TENANT = "the key, or without keys the header `X-Tenant`, identifies the tenant"
TEXT_NEUTRAL = {
    "client_metadata": "a client's notes",
    "prompt_cache_key": "prefixes are found without it",
    "prompt_cache_retention": "the cache decides",
    "safety_identifier": _TENANT,
    "service_tier": "there is one; `priority` says more",
    "spaces_between_special_tokens": "only for slow tokenizers",
    "user": _TENANT,
}
_ANSWERED = "an addition of a client's library to an answer that it sends back"
NO_PADDING = "nothing is padded"
_ONE_RESOLUTION = "a model has one resolution"
TEXT_REFUSED = REFUSED | {
    "extra_body": RefusedField(
        "its fields belong to the body itself, where clients' libraries put them"
    ),
    "include_stop_str_in_output": RefusedField("the text ends before it"),
    "skip_special_tokens": RefusedField("they are left out of the text", (True,)),
}
_REFUSED_BY_BOTH = TEXT_REFUSED | {
    "length_penalty": RefusedField("of beams", (1,)),
    "mm_processor_kwargs": RefusedField("images are read as the model's own settings say"),
    "use_beam_search": RefusedField("samples are drawn"),
}
VERBOSITY = "chat templates read none; ask for it in a message"
MODERATION = RefusedField("nothing is judged")
_OLD_FORM = "answers would have to be of the old form; give"
_NOT_HANDED_OVER = RefusedField("nothing is handed to other servers")


class StreamOptions(msgspec.Struct, frozen=True):
    """Additions to a stream."""

    NEUTRAL: ClassVar = {"include_obfuscation": NO_PADDING}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a text, as clients write it, or hand back what a server has answered."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS | dict.fromkeys(
        ("annotations", "id", "index", "logprobs"), _ANSWERED
    )

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(msgspec.Struct, frozen=True):
    """An image's URL."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = {"detail": _ONE_RESOLUTION}

    url: str


class ImageUrlPart(msgspec.Struct, frozen=True):
    """An image in a message of a chat, or of a response (`input_image`)."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS | {"detail": _ONE_RESOLUTION}
    REFUSED: ClassVar = {"file_id": RefusedField("no files are kept; give an image_url")}

    type: Literal["image_url", "input_image"]
    image_url: str | ImageUrl

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """A text file in a message of a response (`input_file`), or within a chat's part (`file`)."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS | {"detail": _ONE_RESOLUTION}
    REFUSED: ClassVar = dict.fromkeys(
        ("file_id", "file_url"), RefusedField("no files are kept or fetched; give file_data")
    )

    file_data: str
    filename: str = ""


class ChatFilePart(msgspec.Struct, frozen=True, kw_only=True):
    """A text file in a message of a chat."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS

    type: Literal["file"]
    file: FilePart


class RefusalPart(msgspec.Struct, frozen=True):
    """A part of a message that was refused."""

    OPEN: ClassVar = True

    type: Literal["refusal"]
    refusal: str


class Prediction(msgspec.Struct, frozen=True):
    """The text that the client expects as the answer."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class RequestBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all calls that submit requests."""

    model: str = ""
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class StreamedBody(RequestBody, frozen=True, kw_only=True):
    """The fields of calls that answer with choices, or a stream of chunks."""

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_weight_versions: bool = False
    kv_session: KVSession | None = None
    max_version_lag: Int64 | None = None
    on_version_lag: OnVersionLag = "flag"


class TextBody(StreamedBody, frozen=True, kw_only=True):
    """The fields that completions and chats have."""

    SAMPLING: ClassVar = TEXT_SAMPLING
    NEUTRAL: ClassVar = TEXT_NEUTRAL | {"metadata": "nothing is stored"}

    n: Int64 = 1
    prompt_logprobs: Int64 | None = None
    prompt_logprob_token_ids: tuple[tuple[Int64, ...], ...] | None = None
    prompt_logprob_start: Int64 = 0
    return_routed_experts: bool = False
    routed_experts_prompt_start: Int64 = 0
    structured_outputs: dict[str, Any] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] = {}
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    request_id: str = ""
    echo: bool = False
    prediction: Prediction | None = None


class CompletionBody(TextBody, frozen=True, kw_only=True):
    """`/v1/completions`."""

    REFUSED: ClassVar = _REFUSED_BY_BOTH | {
        "best_of": RefusedField("all samples are returned; ask for `n`", (1,)),
        "messages": RefusedField(
            "a completion has a `prompt`, and `messages` is of /v1/chat/completions",
            remedy="call that, or give a prompt",
        ),
        "suffix": RefusedField("nothing is filled in"),
    }

    prompt: Prompts | None = None
    fork: Fork | None = None
    max_tokens: Int64 = 16
    logprobs: Int64 | bool | None = None
    truncation_side: Literal["left", "right"] = "left"
    add_special_tokens: bool = True


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Whether to reason, as in the interfaces of DeepSeek, GLM and Kimi."""

    NEUTRAL: ClassVar = dict.fromkeys(
        ("clear_thinking", "keep"),
        "the chat template decides which reasoning of a history it shows",
    )

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None

    @property
    def on(self) -> bool | None:
        return None if self.type == "auto" else self.type != "disabled"


class ReasoningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat's reasoning, as in the interfaces of OpenRouter and Together."""

    NEUTRAL: ClassVar = {"summary": "the reasoning itself is returned"}

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool = False
    max_tokens: Budget | None = None


class ChatBody(TextBody, frozen=True, kw_only=True):
    """`/v1/chat/completions`."""

    NEUTRAL: ClassVar = TextBody.NEUTRAL | {
        "prompt_cache_options": "the cache decides",
        "store": "nothing is stored",
        "verbosity": VERBOSITY,
        "web_search_options": "nothing is searched, and a model may do without",
    }
    REFUSED: ClassVar = _REFUSED_BY_BOTH | {
        "add_special_tokens": RefusedField("the chat template writes them"),
        "audio": RefusedField("text alone is made"),
        "function_call": RefusedField(f"{_OLD_FORM} `tool_choice`", (*EMPTY, "none", "auto")),
        "functions": RefusedField(f"{_OLD_FORM} `tools`"),
        "modalities": RefusedField("text alone is made", (*EMPTY, ["text"])),
        "moderation": MODERATION,
        "prompt": RefusedField(
            "a chat has `messages`, and `prompt` is of /v1/completions",
            remedy="give messages, or call that",
        ),
        "stream_reasoning": RefusedField("it comes as it is made", (True,)),
        "truncation_side": RefusedField(
            "the end of a chat's prompt begins its answer", (*EMPTY, "left")
        ),
    }

    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    chat_template: str = ""
    documents: list[dict[str, Any]] = []
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    reasoning: ReasoningRequest | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @property
    def budget(self) -> tuple[str, int | None]:
        """The most tokens of reasoning, after the field that has them."""
        thinking, reasoning = self.thinking, self.reasoning
        if thinking is not None and thinking.budget_tokens is not None:
            return "thinking.budget_tokens", thinking.budget_tokens
        if reasoning is not None and reasoning.max_tokens is not None:
            return "reasoning.max_tokens", reasoning.max_tokens
        return "thinking_token_budget", self.thinking_token_budget

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning and not (self.reasoning and self.reasoning.exclude)


class GenerateBody(StreamedBody, frozen=True, kw_only=True):
    """`/inference/v1/generate`."""

    REFUSED: ClassVar = {
        "ec_transfer_params": _NOT_HANDED_OVER,
        "kv_transfer_params": _NOT_HANDED_OVER,
        "output_mode": RefusedField("answers are tokens", (*EMPTY, "tokens")),
    }

    return_weight_versions: bool = True
    token_ids: list[Int64] | None = None
    fork: Fork | None = None
    sampling_params: dict[str, Any] = {}
    features: Features | None = None
    content_parts: list[ContentPart] = []
    return_token_ids: bool = False
    request_id: str = ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name with its arguments: an object, or its JSON."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = {"parsed_arguments": _ANSWERED}

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledCustom(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool's name with its input."""

    OPEN: ClassVar = True

    name: str
    input: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, as clients' libraries hand it back."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS | dict.fromkeys(("extra_content", "index"), _ANSWERED)

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: Literal["function", "custom"] | None = None


class Thought(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning of an assistant's message, in a part or beside the content.

    Mistral's, Anthropic's and LangChain's parts have different names for the text, and so have
    LiteLLM's `thinking_blocks` and OpenRouter's `reasoning_details`. Encrypted ones have none.
    """

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS | dict.fromkeys(
        ("closed", "data", "format", "id", "index", "signature"), _ANSWERED
    )

    type: str | None = None
    thinking: str | list[TextPart] | None = None
    text: str | None = None
    reasoning: str | None = None
    summary: str | None = None

    @property
    def written(self) -> str:
        if isinstance(self.thinking, list):
            return "".join(part.text for part in self.thinking)
        return self.thinking or self.text or self.reasoning or self.summary or ""


class OpenAIMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a chat.

    Attributes:
        function_call: A tool call of OpenAI's old form, whose result is of the role "function".
        thinking_blocks: Reasoning, if none is given as a text; `reasoning_details` likewise.
    """

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARKS | {"parsed": _ANSWERED}
    REFUSED: ClassVar = {
        "audio": RefusedField("no sounds are kept; send the text that was spoken"),
    }

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    reasoning_text: str | None = None
    refusal: str | None = None
    function_call: CalledFunction | None = None
    thinking_blocks: list[Thought] | None = None
    reasoning_details: list[Thought] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize`."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    chat_template: str = ""
    tools: list[dict[str, Any]] = []
    reasoning_effort: Effort | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/detokenize`."""

    model: str = ""
    tokens: list[Int64] | None = None


class EmbeddingCommon(RequestBody, frozen=True, kw_only=True):
    """The fields of all calls that embed."""

    NEUTRAL: ClassVar = {"user": _TENANT}
    REFUSED: ClassVar = {
        "add_special_tokens": RefusedField("they are added", (True,)),
    }

    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] = "left"
    dimensions: Int64 | None = None
    pooling: PoolingKind | Literal[""] = ""
    normalize: bool | None = None


class EmbeddingBody(EmbeddingCommon, frozen=True, kw_only=True):
    """`/v1/embeddings`."""

    input: Prompts | None = None
    encoding_format: Literal["float", "base64"] = "float"


class ScoreBody(EmbeddingCommon, frozen=True, kw_only=True):
    """`/score`."""

    text_1: Prompts | None = None
    text_2: Prompts | None = None


class Document(msgspec.Struct, frozen=True):
    """A text in an object."""

    OPEN: ClassVar = True
    REFUSED: ClassVar = {"image": RefusedField("texts alone are compared")}

    text: str


class RerankBody(EmbeddingCommon, frozen=True, kw_only=True):
    """`/rerank`."""

    NEUTRAL: ClassVar = EmbeddingCommon.NEUTRAL | {
        "max_chunks_per_doc": "documents are not divided",
    }
    REFUSED: ClassVar = EmbeddingCommon.REFUSED | {
        "max_tokens_per_doc": RefusedField("documents are taken whole"),
        "rank_fields": RefusedField("a document's `text` alone is compared", (*EMPTY, ["text"])),
    }

    query: str = ""
    documents: list[str | dict[str, Any]] | None = None
    top_n: Int64 | None = None
    return_documents: bool = True


class SessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/kv_sessions/{session}`."""

    model: str = ""
    action: SessionAction | None = None
    ttl_s: float | None = None


class GeneratedTop(msgspec.Struct, frozen=True, kw_only=True):
    """A token's name, `token_id:17`, and its logprob."""

    OPEN: ClassVar = True

    token: str
    logprob: float


class GeneratedLogprob(GeneratedTop, frozen=True, kw_only=True):
    """The logprob of a token, and the likeliest ones at its place."""

    top_logprobs: list[GeneratedTop] = []


class GeneratedLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """The logprobs of a choice's tokens."""

    OPEN: ClassVar = True

    content: list[GeneratedLogprob] = []


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of an answer of `/inference/v1/generate`."""

    OPEN: ClassVar = True

    token_ids: tuple[Int64, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: GeneratedLogprobs | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of `/inference/v1/generate`."""

    OPEN: ClassVar = True

    id: str = ""
    request_id: str = ""
    system_fingerprint: str | None = None
    choices: list[GeneratedChoice] = []
    prompt_logprobs: list[dict[str, Any] | None] | None = None


_IN_ONE_PIECE = RefusedField("an answer is made in one piece; send it once it is whole")


class DerenderChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/chat/completions/derender`."""

    REFUSED: ClassVar = {
        "generate_chunk": _IN_ONE_PIECE,
        "stream": _IN_ONE_PIECE,
        "stream_state": _IN_ONE_PIECE,
    }

    model: str = ""
    generate_response: Generated = Generated()
    prompt_tokens: Int64 | None = None
    prompt_token_ids: list[Int64] | None = None
    chat_request: dict[str, Any] | None = None


class DerenderTextBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/completions/derender`."""

    REFUSED: ClassVar = DerenderChatBody.REFUSED

    model: str = ""
    generate_responses: list[Generated] = []
    prompt_tokens: list[Int64 | None] | None = None
    prompt_token_ids: list[list[Int64] | None] | None = None
    completion_request: dict[str, Any] | None = None
