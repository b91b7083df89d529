"""Pages of Anthropic's lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....config import shown
from ...call import Call
from ...server.http import FieldError, convert, field_error


class _Page(msgspec.Struct, frozen=True):
    """The page of a query; Anthropic's default and limit."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str = ""
    before_id: str = ""


def paged(found: Sequence[dict[str, Any]], call: Call) -> dict[str, Any]:
    """Return the page of a list that a call's query names.

    Raises:
        FieldError: The query is invalid, or the page's first or last object does not exist.
    """
    page, ids = _read(call), [each["id"] for each in found]
    if page.after_id and page.before_id:
        raise FieldError("after_id and before_id are both there; give one", param="before_id")
    if page.before_id:
        end = _place(ids, page.before_id, "before_id")
        first = max(0, end - page.limit)
    else:
        first = _place(ids, page.after_id, "after_id") + 1 if page.after_id else 0
        end = first + page.limit
    chosen = found[first:end]
    return {
        "data": chosen,
        "has_more": first > 0 if page.before_id else end < len(ids),
        "first_id": chosen[0]["id"] if chosen else None,
        "last_id": chosen[-1]["id"] if chosen else None,
    }


def _read(call: Call) -> _Page:
    given: dict[str, Any] = dict(call.query)
    limit = given.get("limit", "")
    if limit.isascii() and limit.isdecimal() and len(limit) < 9:
        given["limit"] = int(limit)
    return convert(given, _Page)


def _place(ids: Sequence[str], id: str, param: str) -> int:
    if id not in ids:
        raise field_error(param, f"is {shown(id)}", remedy="give an id of this list")
    return ids.index(id)
