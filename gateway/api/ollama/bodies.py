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

_LOADING = (
    *("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap"),
    *("use_mlock", "vocab_only", "logits_all", "embedding_only"),
)
_STAYS = "a model stays loaded by the server's settings"
_OTHER_SAMPLER = "sample by temperature, top_k, top_p and min_p"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a Modelfile. How a model is loaded is decided by this server's settings."""

    SAMPLING: ClassVar = OLLAMA
    NEUTRAL: ClassVar = {
        "num_ctx": "the context is that of the server; a prompt that is too long for it is refused",
        "num_keep": "no context is shifted",
        "draft_num_predict": "drafts change no token",
        "penalize_newline": "Ollama ignores it, too",
        **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "of mirostat"),
        **dict.fromkeys(_LOADING, "the server's settings decide how a model runs"),
    }
    REFUSED: ClassVar = {
        "mirostat": RefusedField(_OTHER_SAMPLER),
        "tfs_z": RefusedField(_OTHER_SAMPLER, (*EMPTY, 1)),
        "typical_p": RefusedField(_OTHER_SAMPLER, (*EMPTY, 1)),
    }

    repeat_last_n: Int64 | None = None


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all calls that generate."""

    NEUTRAL: ClassVar = {"truncate": "prompts are taken whole; one that is too long is refused"}
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

    NEUTRAL: ClassVar = {"keep_alive": _STAYS, "options": "no token is sampled"}

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

    NEUTRAL: ClassVar = {
        "verbose": "vocabularies are not listed",
        **dict.fromkeys(("options", "system", "template"), "they are of a call, not of the model"),
    }


class PullBody(ModelBody, frozen=True, kw_only=True):
    """`/api/pull`."""

    NEUTRAL: ClassVar = dict.fromkeys(("insecure", "password", "username"), "nothing is downloaded")

    stream: bool = True


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a tool call of the history."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = {"index": "calls are in order"}

    name: str
    arguments: dict[str, Any] = {}


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the history."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = {"type": "all are functions"}

    function: CalledFunction
    id: str = ""


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message."""

    OPEN: ClassVar = True

    role: Role
    content: str = ""
    thinking: str = ""
    images: list[str] = []
    tool_calls: list[CalledTool] = []
    tool_name: str = ""
    tool_call_id: str = ""


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    OPEN: ClassVar = True

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool."""

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = {"items": "the function's schema says it"}

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
