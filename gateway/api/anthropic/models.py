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


<<<<<<< HEAD
def _read_page(call: Call) -> _Page:
    """Raises FieldError."""
    given: dict[str, Any] = dict(call.query)
    limit = given.get("limit", "")
    if limit.isascii() and limit.isdecimal() and len(limit) < 9:
        given["limit"] = int(limit)
    return convert(given, _Page)


def _listed(cards: Sequence[Card], page: _Page) -> dict[str, Any]:
    """Return a page of models.

    Raises:
        FieldError: The page's first or last model does not exist.
    """
    ids = [card["id"] for card in cards]
    if page.after_id and page.before_id:
        raise FieldError("after_id and before_id are both there; give one", param="before_id")
    if page.before_id:
        end = _place(ids, page.before_id, "before_id")
        first = max(0, end - page.limit)
    else:
        first = _place(ids, page.after_id, "after_id") + 1 if page.after_id else 0
        end = first + page.limit
    chosen = cards[first:end]
    return {
        "data": [_told(card) for card in chosen],
        "has_more": first > 0 if page.before_id else end < len(ids),
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }


def _place(ids: Sequence[str], id: str, param: str) -> int:
    if id not in ids:
        raise field_error(
            param,
            f"is {shown(id)}, and there is no such model",
            remedy="list them by GET /v1/models",
        )
    return ids.index(id)


=======
>>>>>>> batches
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
