"""The bodies of calls: the fields that count, and those that are known and don't."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ....bus.public import KVSession, SessionAction
from ....config import MAX_INT64, Int64, PoolingKind
from ...serving.fields import EMPTY, RefusedField
from ...serving.sampling_fields import REFUSED, TEXT_SAMPLING, SamplingBody

CallName = Literal[
    "completions",
    "chat",
    "responses",
    "generate",
    "sampling_params",
    "tokenize",
    "detokenize",
    "embeddings",
    "score",
    "rerank",
    "kv_sessions",
]
"""`sampling_params` are a field of `generate`, with fields of its own."""

Role = Literal["system", "developer", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
"""Tokens of reasoning."""
Prompts = str | list[str | Int64 | list[Int64]]
CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Neutral: prefixes are cached without them."""

_NEUTRAL = frozenset(
    {
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "spaces_between_special_tokens",
        "user",
    }
)
_REFUSED = REFUSED | {
    "include_stop_str_in_output": RefusedField("the text ends before it"),
    "skip_special_tokens": RefusedField("they are left out of the text", (True,)),
}
_REFUSED_BY_BOTH = _REFUSED | {
    "length_penalty": RefusedField("of beams", (1,)),
    "service_tier": RefusedField("there is one; `priority` says more", (*EMPTY, "auto", "default")),
    "use_beam_search": RefusedField("samples are drawn"),
}
_VERBOSITY = RefusedField("the template's variables are given by name", (*EMPTY, "medium"))
_CHAT_TEMPLATE = RefusedField("the model's own is used")
_OLD_FORM = "answers would have to be of the old form; give"
_NOT_HANDED_OVER = RefusedField("nothing is handed to other servers")


class StreamOptions(msgspec.Struct, frozen=True):
    """Additions to a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # Padding of chunks, against observers of their sizes.
    include_obfuscation: bool | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a text, as clients write it, or hand back what a server has answered."""

    NEUTRAL: ClassVar = CACHE_MARKS | {"annotations", "id", "index", "logprobs"}

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(msgspec.Struct, frozen=True):
    """An image's URL. A model has one resolution, so that `detail` changes nothing."""

    NEUTRAL: ClassVar = frozenset({"detail"})

    url: str


class ImageUrlPart(msgspec.Struct, frozen=True):
    """An image in a message of a chat, or of a response (`input_image`)."""

    NEUTRAL: ClassVar = CACHE_MARKS | {"detail"}
    REFUSED: ClassVar = {"file_id": RefusedField("no files are kept; give an image_url")}

    type: Literal["image_url", "input_image"]
    image_url: str | ImageUrl

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class RefusalPart(msgspec.Struct, frozen=True):
    """A part of a message that was refused."""

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


class TextBody(StreamedBody, frozen=True, kw_only=True):
    """The fields that completions and chats have."""

    SAMPLING: ClassVar = TEXT_SAMPLING
    NEUTRAL: ClassVar = _NEUTRAL | {"metadata"}

    n: Int64 = 1
    prompt_logprobs: Int64 | None = None
    structured_outputs: dict[str, Any] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] = {}
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prediction: Prediction | None = None


class CompletionBody(TextBody, frozen=True, kw_only=True):
    """`/v1/completions`."""

    REFUSED: ClassVar = _REFUSED_BY_BOTH | {
        "best_of": RefusedField("all samples are returned; ask for `n`", (1,)),
        "suffix": RefusedField("nothing is filled in"),
    }

    prompt: Prompts | None = None
    max_tokens: Int64 = 16
    echo: bool = False
    logprobs: Int64 | None = None


class ChatBody(TextBody, frozen=True, kw_only=True):
    """`/v1/chat/completions`."""

    REFUSED: ClassVar = _REFUSED_BY_BOTH | {
        "audio": RefusedField("text alone is made"),
        "chat_template": _CHAT_TEMPLATE,
        "documents": RefusedField("give them in `chat_template_kwargs` or in messages"),
        "function_call": RefusedField(f"{_OLD_FORM} `tool_choice`", (*EMPTY, "none", "auto")),
        "functions": RefusedField(f"{_OLD_FORM} `tools`"),
        "modalities": RefusedField("text alone is made", (*EMPTY, ["text"])),
        "store": RefusedField("nothing is stored"),
        "stream_reasoning": RefusedField("it comes as it is made", (True,)),
        "verbosity": _VERBOSITY,
        "web_search_options": RefusedField("nothing is searched"),
    }

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
    thinking_token_budget: Budget | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True


class GenerateBody(StreamedBody, frozen=True, kw_only=True):
    """`/inference/v1/generate`."""

    REFUSED: ClassVar = {
        "ec_transfer_params": _NOT_HANDED_OVER,
        "features": RefusedField("there are no images or sounds"),
        "kv_transfer_params": _NOT_HANDED_OVER,
    }

    token_ids: list[Int64] | None = None
    sampling_params: dict[str, Any] = {}
    request_id: str = ""


class TextOptions(msgspec.Struct, frozen=True):
    """Options of a response's text."""

    NEUTRAL: ClassVar = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    """Options of a response's stream, whose last event has the usage anyway."""

    include_obfuscation: bool | None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A response's reasoning. There are no summaries: the reasoning itself is returned."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class NamedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A stored conversation."""

    id: str


class ResponseBody(RequestBody, frozen=True, kw_only=True):
    """`/v1/responses`."""

    SAMPLING: ClassVar = TEXT_SAMPLING
    NEUTRAL: ClassVar = _NEUTRAL | {
        "client_metadata",
        "max_tool_calls",
        "prompt_cache_options",
        "service_tier",
    }
    REFUSED: ClassVar = _REFUSED | {
        "background_options": RefusedField("there is one speed; `priority` says more"),
        "context_management": RefusedField("prompts are taken whole"),
        "moderation": RefusedField("nothing is judged"),
        "prompt": RefusedField("there are no prompts by name; send `input`"),
        "verbosity": _VERBOSITY,
    }

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
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: Budget | None = None

    @property
    def conversation_id(self) -> str:
        """The id of its conversation; "" for none."""
        given = self.conversation
        return given.id if isinstance(given, NamedConversation) else given or ""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function's name with its arguments: an object, or its JSON."""

    NEUTRAL: ClassVar = frozenset({"parsed_arguments"})

    name: str
    arguments: str | dict[str, Any] | None = None


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, as clients' libraries hand it back."""

    NEUTRAL: ClassVar = CACHE_MARKS | {"extra_content", "index"}

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OpenAIMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a chat."""

    # `parsed` is an addition of OpenAI's library to our messages.
    NEUTRAL: ClassVar = CACHE_MARKS | {"parsed"}

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/tokenize`."""

    REFUSED: ClassVar = {"chat_template": _CHAT_TEMPLATE}

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
    """`/detokenize`."""

    model: str = ""
    tokens: list[Int64] | None = None


class EmbeddingCommon(RequestBody, frozen=True, kw_only=True):
    """The fields of all calls that embed."""

    NEUTRAL: ClassVar = frozenset({"user"})
    REFUSED: ClassVar = {
        "add_special_tokens": RefusedField("they are added", (True,)),
        "truncate_prompt_tokens": REFUSED["truncate_prompt_tokens"],
    }

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

    text: str


class RerankBody(EmbeddingCommon, frozen=True, kw_only=True):
    """`/rerank`."""

    query: str = ""
    documents: list[str | dict[str, Any]] | None = None
    top_n: Int64 | None = None
    return_documents: bool = True


class SessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """`/v1/kv_sessions/{session}`."""

    model: str = ""
    action: SessionAction | None = None
    ttl_s: float | None = None


BODIES: dict[CallName, type[msgspec.Struct]] = {
    "completions": CompletionBody,
    "chat": ChatBody,
    "responses": ResponseBody,
    "generate": GenerateBody,
    "sampling_params": SamplingBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "embeddings": EmbeddingBody,
    "score": ScoreBody,
    "rerank": RerankBody,
    "kv_sessions": SessionBody,
}
