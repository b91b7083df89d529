"""Which fields of a body count: SGLang has many more than we have anything for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from ...config import RequestError, field_name, nearest
from ..http import convert

T = TypeVar("T")

Body = dict[str, Any]


def read_fields(body: Body, kind: type[T], ignored: Collection[str] = (), what: str = "") -> T:
    """The fields of `kind`, a struct, from a body that may have others.

    A field in `ignored` says nothing that would change an answer. Any other field that we don't
    know is taken only when it asks for nothing: null, false, 0 or empty.

    Raises:
        RequestError: A field of the wrong type, or one that asks for what is not there.
    """
    known: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    for name, value in body.items():
        if name not in known and name not in ignored and value:
            raise RequestError(
                f"{what}{field_name(name)} is not supported here{nearest(name, known)}; leave it "
                "out, or give null",
                code="unsupported",
            )
    # An explicit null is a default.
    found = {name: body[name] for name in known if body.get(name) is not None}
    return convert(found, kind, what or "the body")
