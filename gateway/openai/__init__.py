"""OpenAI's HTTP interface, with what vLLM's has beyond it; docs/openai.md lists it."""

from __future__ import annotations

from starlette.routing import Route

from ...config import Config
from ..chat_templates import ChatTemplates
from ..kept_calls import KeptCalls
from ..submissions import Submissions
from ..words import LazyWords
from .errors import Endpoint, in_openai_words
from .generate import GenerationCalls
from .info import InfoCalls


def openai_routes(
    config: Config, words: LazyWords, submissions: Submissions, kept: KeptCalls
) -> list[Route]:
    """Its endpoints."""
    templates = ChatTemplates(words, config.engine.max_model_len, config.gateway.template_timeout_s)
    generation = GenerationCalls(submissions, kept, config, words, templates)
    info = InfoCalls(config, words, templates)

    def route(path: str, endpoint: Endpoint, method: str, *, chat: bool = False) -> Route:
        return Route(path, in_openai_words(endpoint, chat=chat), methods=[method])

    return [
        route("/v1/completions", generation.completions, "POST"),
        route("/v1/chat/completions", generation.chat, "POST", chat=True),
        route("/v1/streams/{stream}", generation.stream, "GET"),
        route("/v1/streams/{stream}", generation.cancel, "DELETE"),
        route("/v1/streams/{stream}/cancel", generation.cancel, "POST"),
        route("/v1/models", info.models, "GET"),
        route("/v1/models/{model:path}", info.model, "GET"),
        route("/tokenize", info.tokenize, "POST"),
        route("/detokenize", info.detokenize, "POST"),
        route("/tokenizer_info", info.tokenizer_info, "GET"),
        route("/version", info.version, "GET"),
        route("/v1/embeddings", info.refused, "POST"),
    ]


__all__ = ["openai_routes"]
