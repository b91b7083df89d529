"""Anthropic's HTTP interface, as far as it is about text; docs/anthropic.md lists it."""

from __future__ import annotations

from ...serving.services import Services
from ..routes import PolicyRoute
from .batches import batch_routes
from .errors import is_called, respond
from .generate import MessageCalls
from .models import model_routes


def anthropic_routes(services: Services) -> list[PolicyRoute]:
    """Return the endpoints."""
    calls = MessageCalls(services)
    return [
        PolicyRoute("POST /v1/messages", "generate", calls.messages),
        PolicyRoute("POST /v1/messages/count_tokens", "generate", calls.count_tokens),
        PolicyRoute("POST /v1/messages/render", "generate", calls.render),
    ]


__all__ = ["anthropic_routes", "batch_routes", "is_called", "model_routes", "respond"]
