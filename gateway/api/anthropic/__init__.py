"""Anthropic's HTTP interface, as far as it is about text; docs/anthropic.md lists it."""

from __future__ import annotations

from ....config import Config
from ...policy.chain import PolicyRoute
from ...server.callers import Endpoint
from ...serving.chat_templates import ChatTemplates
from ...serving.lane_state import ServedModels
from ...serving.submissions import Submissions
from ...serving.words import LazyWords
from .errors import ERRORS, is_called, respond
from .generate import MessageCalls
from .models import model_routes


def anthropic_routes(
    config: Config,
    words: LazyWords,
    submissions: Submissions,
    templates: ChatTemplates,
    served: ServedModels,
) -> list[PolicyRoute]:
    """Its endpoints."""
    calls = MessageCalls(submissions, config, words, templates, served)

    def route(path: str, endpoint: Endpoint) -> PolicyRoute:
        return PolicyRoute(path, endpoint, needed="generate", methods=["POST"], middleware=[ERRORS])

    return [
        route("/v1/messages", calls.messages),
        route("/v1/messages/count_tokens", calls.count_tokens),
    ]


__all__ = ["anthropic_routes", "is_called", "model_routes", "respond"]
