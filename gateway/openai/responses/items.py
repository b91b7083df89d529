"""Items of a conversation: as they come, are kept and listed, and as templates read them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Literal

from ....config import shown
from ...chat_templates import Turn
from ...http import FieldError
from ..bodies import Message
from ..messages import turn_of

Item = dict[str, Any]
"""A message with an id, whose content is a list of parts."""

MOST_LISTED = 100
"""Items of one page."""

_LONGEST_ID = 128
# Of a message that was an answer; they say nothing to a template.
_LEFT_OUT = frozenset({"id", "status", "phase", "type"})


def items_of(given: str | list[dict[str, Any]] | None) -> list[Item]:
    """The items of a body's `input`.

    Raises:
        FieldError: There is none, one is no message, or holds what is not text.
    """
    if not given:
        raise FieldError("input is empty; give a text or messages", param="input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_item(message, f"input[{place}]") for place, message in enumerate(messages)]


def answered(output: Iterable[dict[str, Any]]) -> list[Item]:
    """The items of a response's `output`, for whoever goes on with the conversation."""
    return [_kept(message) for message in output]


def turns_of(items: Iterable[Item]) -> list[Turn]:
    """What a template is given of items that were looked at."""
    return [turn_of(_message(item), "input") for item in items]


def page_of(
    items: list[Item], order: Literal["asc", "desc"], after: str | None, limit: int
) -> dict[str, Any]:
    """A part of them as OpenAI's lists are.

    Raises:
        FieldError: There is no item `after` which more are wanted.
    """
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise FieldError(f"after: there is no item {shown(after)} here", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }


def _item(given: dict[str, Any], where: str) -> Item:
    kind = given.get("type") or "message"
    if kind != "message":
        raise FieldError(
            f"{where}: an item of type {shown(kind)} is not supported here; send messages",
            param=where,
            code="unsupported",
        )
    turn_of(_message(given), where)
    return _kept(given)


def _kept(given: dict[str, Any]) -> Item:
    """A message that was looked at, without what says nothing."""
    name = given.get("id")
    known = isinstance(name, str) and 0 < len(name) <= _LONGEST_ID
    item: Item = {
        "id": name if known else f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "status": "completed",
    }
    item |= {each: given[each] for each in Message.__struct_fields__ if given.get(each) is not None}
    content = item.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    item["content"] = [_part(part, item["role"]) for part in parts]
    return item


def _part(part: dict[str, Any], role: str) -> dict[str, Any]:
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["refusal"]}
    if role == "assistant":
        return {"type": "output_text", "text": part["text"], "annotations": []}
    return {"type": "input_text", "text": part["text"]}


def _message(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in _LEFT_OUT}
