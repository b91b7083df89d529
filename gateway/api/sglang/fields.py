"""Which fields of a body count: SGLang has many more than we have anything for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from starlette.requests import Request

from ....config import Config, RequestError, field_name, nearest
from ...server.http import NAMED_MODEL, convert, read_object
from ...serving.fields import adapter_of, read_part
from ...serving.lane_state import unknown_model

T = TypeVar("T")

Body = dict[str, Any]

_MODEL = "model"


async def read_sglang_object(request: Request, config: Config) -> Body:
    """The body of a call, but for the model that it is for: of several models SGLang knows
    nothing, so here this may be said in any call.

    Raises:
        RequestError: malformed, request_too_large; unknown_model.
    """
    body = await read_object(request, config.gateway.max_body_bytes)
    if model := body.pop(_MODEL, None):
        model = convert(model, str, _MODEL)
        if name := adapter_of(model, config):
            raise unknown_model(name, config.engine.model_name)
        request.scope.setdefault("state", {})[NAMED_MODEL] = model
    return body


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
    return read_part(found, kind, what.rstrip("."))
