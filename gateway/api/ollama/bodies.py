"""The bodies of calls: the fields that count, and those that are known and don't."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ....config import Int64
from ...serving.fields import EMPTY, RefusedField
from ...serving.sampling_fields import OLLAMA

Role = Literal["system", "user", "assistant", "tool"]
Think = bool | Literal["low", "medium", "high", "max"]
KeepAlive = float | str

_OTHER_SAMPLER = "sample by temperature, top_k, top_p and min_p"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a Modelfile. How a model is loaded is decided by this server's settings."""

    SAMPLING: ClassVar = OLLAMA
    NEUTRAL: ClassVar = frozenset(
        {
            "draft_num_predict",
            "embedding_only",
            "f16_kv",
            "logits_all",
            "low_vram",
            "main_gpu",
            "mirostat_eta",
            "mirostat_tau",
            "num_batch",
            "num_ctx",
            "num_gpu",
            "num_keep",
            "num_thread",
            "numa",
            "penalize_newline",
            "use_mlock",
            "use_mmap",
            "vocab_only",
        }
    )
    REFUSED: ClassVar = {
        "mirostat": RefusedField(_OTHER_SAMPLER),
        "tfs_z": RefusedField(_OTHER_SAMPLER, (*EMPTY, 1)),
        "typical_p": RefusedField(_OTHER_SAMPLER, (*EMPTY, 1)),
    }

    repeat_last_n: Int64 | None = None


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all calls that generate."""

    NEUTRAL: ClassVar = frozenset({"truncate"})
    REFUSED: ClassVar = {
        "shift": RefusedField("an answer ends where the model's context is full"),
        "_debug_render_only": RefusedField("prompts are not shown"),
    }

    model: str = ""
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] = {}
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: Int64 = 0
    # Not Ollama's.
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class ChatBody(AnswerBody, frozen=True, kw_only=True):
    """`/api/chat`."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []


class GenerateBody(AnswerBody, frozen=True, kw_only=True):
    """`/api/generate`."""

    REFUSED: ClassVar = AnswerBody.REFUSED | {
        "suffix": RefusedField("send the prompt with the model's marks of a gap, and raw: true"),
        "template": RefusedField("the model's own is used; with raw: true none is"),
        "width": RefusedField("no images are made"),
        "height": RefusedField("no images are made"),
        "steps": RefusedField("no images are made"),
    }

    prompt: str = ""
    system: str = ""
    images: list[str] = []
    raw: bool = False
    context: list[Int64] = []


class EmbeddingCommon(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all calls for vectors."""

    # Options sample tokens, and none is sampled.
    NEUTRAL: ClassVar = frozenset({"keep_alive", "options"})

    model: str = ""
    # Not Ollama's.
    priority: Int64 = 0
    budget_ms: float | None = None
    cache_salt: str = ""


class EmbedBody(EmbeddingCommon, frozen=True, kw_only=True):
    """`/api/embed`."""

    input: str | list[str] = []
    truncate: bool = True
    dimensions: Int64 | None = None


class EmbeddingsBody(EmbeddingCommon, frozen=True, kw_only=True):
    """`/api/embeddings`, which came before `/api/embed`."""

    prompt: str = ""


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call about a model; `name` is the older field."""

    model: str = ""
    name: str = ""


class ShowBody(ModelBody, frozen=True, kw_only=True):
    """`/api/show`."""

    NEUTRAL: ClassVar = frozenset({"options", "system", "template", "verbose"})


class PullBody(ModelBody, frozen=True, kw_only=True):
    """`/api/pull`."""

    NEUTRAL: ClassVar = frozenset({"insecure", "password", "username"})

    stream: bool = True


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool call of the history."""

    NEUTRAL: ClassVar = frozenset({"index"})

    name: str
    arguments: dict[str, Any] = {}


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the history."""

    NEUTRAL: ClassVar = frozenset({"type"})

    function: CalledFunction
    id: str = ""


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message."""

    role: Role
    content: str = ""
    thinking: str = ""
    images: list[str] = []
    tool_calls: list[CalledTool] = []
    tool_name: str = ""
    tool_call_id: str = ""


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool."""

    NEUTRAL: ClassVar = frozenset({"items"})

    function: Function
    type: Literal["function"] = "function"


BODIES: dict[str, type[msgspec.Struct]] = {
    "chat": ChatBody,
    "generate": GenerateBody,
    "options": Options,
    "embed": EmbedBody,
    "embeddings": EmbeddingsBody,
    "show": ShowBody,
    "pull": PullBody,
    "delete": ModelBody,
}
"""The bodies, and the options in them, by the names of the document."""
