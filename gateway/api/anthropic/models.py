"""`/v1/models` for Anthropic's clients, which send their interface's version with each call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from ...call import Call
from ...caller import Caller
from ...server.http import JsonResponse, Response
from ..routes import PolicyRoute, RouteFor
from .errors import MODELS, has_version, named
from .pages import paged
from .requests import check_version

Card = dict[str, Any]
"""A model's card in OpenAI's form, with `id`, `created` and `max_model_len`."""


def model_routes(
    cards: Callable[[Caller], Awaitable[list[Card]]], card: Callable[[Call], Awaitable[Card]]
) -> list[PolicyRoute]:
    """Return the endpoints, which stand before those of OpenAI.

    Args:
        cards: Returns the cards of all models that a caller may use.
        card: Returns the card of the model in a call's path.
    """

    async def listed(call: Call) -> Response:
        check_version(call)
        page = paged([_told(each) for each in await cards(call.caller)], call)
        return named(call, JsonResponse(page))

    async def model(call: Call) -> Response:
        check_version(call)
        return named(call, JsonResponse(_told(await card(call))))

    return [
        RouteFor(f"GET {MODELS}", "read", listed, has_version),
        RouteFor(f"GET {MODELS}/{{model:path}}", "read", model, has_version),
    ]


def _told(card: Card) -> dict[str, Any]:
    created = datetime.fromtimestamp(card["created"], UTC)
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        # Prompt and answer together have as many.
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }
