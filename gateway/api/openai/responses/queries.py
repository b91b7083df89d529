"""What is asked of a stored response, in the query of a URL."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

from starlette.requests import Request

from .....config import field_name, shown
from ....server.http import FieldError
from .events import NOTHING
from .items import MOST_LISTED

_TRUE, _FALSE = ("true", "True", "1"), ("", "false", "False", "0")
_HARMLESS = frozenset({"include", "include[]", "include_obfuscation"})
_DEFAULT_LISTED = 20
_MOST_DIGITS = 9


class Retrieval(NamedTuple):
    """How a response is to be told: in one piece, or as a stream, from behind an event on."""

    stream: bool
    after: int


class Page(NamedTuple):
    """Which items are to be listed."""

    order: Literal["asc", "desc"]
    after: str | None
    limit: int


def read_retrieval(request: Request) -> Retrieval:
    """Raises FieldError for a parameter that is not known, or can't be obeyed."""
    given = _known(request, ("stream", "starting_after"))
    stream, after = given.get("stream", ""), given.get("starting_after", "")
    if stream not in (*_TRUE, *_FALSE):
        raise FieldError(f"stream is {shown(stream)}; it may be true or false", param="stream")
    if after and stream not in _TRUE:
        raise FieldError("starting_after takes stream=true", param="starting_after")
    number = _number(after, "starting_after") if after else NOTHING
    return Retrieval(stream in _TRUE, number)


def read_page(request: Request) -> Page:
    """Raises FieldError as `read_retrieval` does."""
    given = _known(request, ("order", "after", "limit"))
    order = given.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise FieldError(f"order is {shown(order)}; it may be asc or desc", param="order")
    limit = _number(given.get("limit") or str(_DEFAULT_LISTED), "limit")
    if not 1 <= limit <= MOST_LISTED:
        raise FieldError(f"limit is {limit}; it may be 1 to {MOST_LISTED}", param="limit")
    return Page(cast(Literal["asc", "desc"], order), given.get("after") or None, limit)


def _known(request: Request, names: tuple[str, ...]) -> dict[str, str]:
    for name, value in request.query_params.items():
        if name not in names and name not in _HARMLESS and value not in _FALSE:
            param = field_name(name)
            raise FieldError(
                f"{param} is not known here; leave it out", param=param, code="unsupported"
            )
    return dict(request.query_params)


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise FieldError(f"{name} is {shown(text)}; it must be a number", param=name)
    return int(text)
