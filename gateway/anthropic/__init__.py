"""Anthropic's HTTP interface, as far as it is about text; docs/anthropic.md lists it."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware

from ...config import Config
from ..callers import Endpoint
from ..chat_templates import ChatTemplates
from ..policy.routes import PolicyRoute
from ..served import ServedModels
from ..submissions import Submissions
from ..words import LazyWords
from .errors import answer_error, is_called, respond
from .generate import MessageCalls


def anthropic_routes(
    config: Config,
    words: LazyWords,
    submissions: Submissions,
    templates: ChatTemplates,
    served: ServedModels,
) -> list[PolicyRoute]:
    """Its endpoints."""
    calls = MessageCalls(submissions, config, words, templates, served)
    # Their errors, those of a stream that has not begun included, have a shape of their own.
    errors = Middleware(ExceptionMiddleware, handlers={Exception: answer_error})

    def route(path: str, endpoint: Endpoint) -> PolicyRoute:
        return PolicyRoute(path, endpoint, needed="generate", methods=["POST"], middleware=[errors])

    return [
        route("/v1/messages", calls.messages),
        route("/v1/messages/count_tokens", calls.count_tokens),
    ]


__all__ = ["anthropic_routes", "is_called", "respond"]
