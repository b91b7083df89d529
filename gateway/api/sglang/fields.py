"""SGLang's bodies."""

from __future__ import annotations

from starlette.requests import Request

from ....config import Config
from ...server.http import NAMED_MODEL, convert, read_object
from ...serving.fields import Body, adapter_of
from ...serving.lane_state import unknown_model

_MODEL = "model"


async def read_sglang_object(request: Request, config: Config) -> Body:
    """Return the body of a call, without its model. SGLang serves one model, so here any call may
    have that field.

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
