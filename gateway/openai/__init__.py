"""OpenAI's HTTP interface, with what vLLM's has beyond it; docs/openai.md lists it."""

from __future__ import annotations

from ...config import Config
from ..chat_templates import ChatTemplates
from ..kept_calls import KeptCalls
from ..model_length import ModelLength
from ..policy.routes import PolicyRoute
from ..policy.scopes import Needed
from ..submissions import Submissions
from ..words import LazyWords
from .errors import Endpoint, in_openai_words
from .fields import CallName
from .generate import GenerationCalls
from .info import InfoCalls
from .responses import ResponseCalls


def openai_routes(
    config: Config,
    words: LazyWords,
    submissions: Submissions,
    kept: KeptCalls,
    templates: ChatTemplates,
    length: ModelLength,
) -> list[PolicyRoute]:
    """Its endpoints."""
    generation = GenerationCalls(submissions, kept, config, words, templates, length)
    responses = ResponseCalls(submissions, config, words, templates, length)
    info = InfoCalls(config, words, templates, length)

    def route(
        path: str,
        endpoint: Endpoint,
        method: str,
        call: CallName = "completions",
        needed: Needed = "generate",
    ) -> PolicyRoute:
        return PolicyRoute(path, in_openai_words(endpoint, call), needed=needed, methods=[method])

    return [
        route("/v1/completions", generation.completions, "POST"),
        route("/v1/chat/completions", generation.chat, "POST", "chat"),
        route("/inference/v1/generate", generation.tokens, "POST", "generate"),
        route("/v1/streams/{stream}", generation.stream, "GET"),
        route("/v1/streams/{stream}", generation.cancel, "DELETE"),
        route("/v1/streams/{stream}/cancel", generation.cancel, "POST"),
        route("/v1/responses", responses.create, "POST", "responses"),
        route("/v1/responses/{response_id}", responses.retrieve, "GET", "responses"),
        route("/v1/responses/{response_id}", responses.delete, "DELETE", "responses"),
        route("/v1/responses/{response_id}/cancel", responses.cancel, "POST", "responses"),
        route("/v1/models", info.models, "GET", needed="read"),
        route("/v1/models/{model:path}", info.model, "GET", needed="read"),
        route("/tokenize", info.tokenize, "POST"),
        route("/detokenize", info.detokenize, "POST"),
        route("/tokenizer_info", info.tokenizer_info, "GET", needed="read"),
        route("/version", info.version, "GET", needed="nothing"),
        route("/v1/embeddings", info.refused, "POST"),
    ]


__all__ = ["openai_routes"]
