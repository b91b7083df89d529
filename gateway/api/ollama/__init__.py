"""Ollama's HTTP interface; docs/ollama.md lists it."""

from __future__ import annotations

from ...serving.services import Services
from ..routes import PolicyRoute
from .embeddings import EmbeddingCalls
from .errors import is_called, respond
from .generate import AnswerCalls
from .models import Entry, ModelCalls, model_routes
from .requests import untagged


def ollama_routes(services: Services, models: ModelCalls) -> list[PolicyRoute]:
    """Return the endpoints."""
    answers, embeddings = AnswerCalls(services, models), EmbeddingCalls(services)
    return [
        PolicyRoute("POST /api/chat", "generate", answers.chat),
        PolicyRoute("POST /api/generate", "generate", answers.generate),
        PolicyRoute("POST /api/embed", "generate", embeddings.embed),
        PolicyRoute("POST /api/embeddings", "generate", embeddings.embeddings),
        PolicyRoute("POST /api/show", "read", models.show),
        *model_routes(models.manager),
    ]


__all__ = [
    "Entry",
    "ModelCalls",
    "is_called",
    "model_routes",
    "ollama_routes",
    "respond",
    "untagged",
]
