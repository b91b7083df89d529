"""Which model a call is for, and handing it on."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from ...config import NanoInferenceError
from ..policy.caller import caller_of
from ..policy.models import check_allowed
from ..probes import PROBES
from ..server.calls import arrival_of
from ..server.http import BODY, MODEL, NAMED_MODEL, decode_object, read_body
from .model_app import ModelApp
from .models import Models

_ABORT = "/abort_request"

_WITHOUT_LANES = (
    "/v1/streams/",
    "/v1/responses/",
    "/v1/models",
    "/v2",
    "/version",
    "/tokenizer_info",
    _ABORT,
)
"""How paths of calls begin that can be answered of a model that is not loaded, or that say so
themselves."""

_CONTINUING = ("last-event-id", "idempotency-key")
"""Headers of calls that may have been begun before, while the model was loaded."""

_WITHOUT_BODY = ("GET", "HEAD", "DELETE")

_UNREAD = ("/update_weights_from_tensor",)
"""Calls whose bodies are too large to be looked through here: the address or the query names the
model."""


class Names(NamedTuple):
    """What a body says of its model, "" where it says nothing."""

    model: str = ""
    previous_response_id: str = ""


class _Fields(msgspec.Struct):
    # As they stand there: what is no text may be large.
    model: msgspec.Raw = msgspec.Raw(b'""')
    previous_response_id: msgspec.Raw = msgspec.Raw(b'""')


class Handed(Response):
    """A call that a model's application answers."""

    def __init__(self, app: ModelApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await hand_over(self._app, scope, receive, send)


async def hand_over(app: ModelApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Has a model's application answer a call, in whose account and state it then stands."""
    scope.setdefault("state", {})[MODEL] = app.id
    arrival_of(Request(scope)).account.model = app.id
    with app.entered():
        await app.app(scope, receive, send)


class OfModel(BaseRoute):
    """Takes what came by a model's own address, whatever it is."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if NAMED_MODEL in scope.get("state", {}) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, request = scope["state"][NAMED_MODEL], Request(scope)
        try:
            app = await model_for(self._models, request, name)
        except NanoInferenceError:
            # Which models there are, and how they are, is not for whoever asks.
            await request.app.state.chain.enter(request, "read")
            app = await model_for(self._models, request, name)
        await hand_over(app, scope, receive, send)


class Dispatch:
    """Finds the model of calls that came to the gateway as a whole."""

    def __init__(self, models: Models, max_body_bytes: int) -> None:
        self._models = models
        self._max_body_bytes = max_body_bytes

    async def by_body(self, request: Request) -> Response:
        """Hands a call to the model that its body names, or its query, or else the default."""
        names = await self._names(request)
        name = names.model or request.query_params.get("model", "")
        request.scope["state"][NAMED_MODEL] = name
        if names.previous_response_id and not name:
            return Handed(await self._models.of_call(names.previous_response_id))
        return Handed(await model_for(self._models, request, name))

    async def by_id(self, request: Request) -> Response:
        """Hands a call about another call to the model of that."""
        params = request.path_params
        call_id = params.get("stream") or params["response_id"]
        return Handed(await self._models.of_call(call_id))

    async def abort(self, request: Request) -> Response:
        """Hands it to the model that has the request here, unless it names one."""
        body = await read_body(request, self._max_body_bytes)
        request.scope["state"][BODY] = body
        found = decode_object(body)
        name, rid = found.get("model") or request.query_params.get("model", ""), found.get("rid")
        if name or not isinstance(rid, str) or not rid:
            return Handed(await self._models.find(name if isinstance(name, str) else ""))
        here = [app for app in self._models.apps if app.interfaces.submissions.has(rid)]
        if len(here) == 1:
            return Handed(here[0])
        if "weights" not in caller_of(request).scopes:
            return Handed(await self._models.find())
        # Only the lanes of its model know it, which another gateway has asked.
        allowed = caller_of(request).models
        for app in self._models.apps:
            if app.record.state != "unloaded" and (allowed is None or app.id in allowed):
                await app.interfaces.submissions.abort(rid)
        return Response()

    async def _names(self, request: Request) -> Names:
        if request.method in _WITHOUT_BODY or request.url.path in _UNREAD:
            return Names()
        body = await read_body(request, self._max_body_bytes)
        # Whoever answers need not wait for it.
        request.scope["state"][BODY] = body
        return names_of(body)


async def model_for(models: Models, request: Request, name: str) -> ModelApp:
    """The model of a name. Of what a caller may not use he is told nothing.

    Raises:
        RequestError: As `Models.loaded`, and for a model that is not for this caller.
    """
    caller = caller_of(request)
    try:
        app = await models.find(name)
    except NanoInferenceError:
        check_allowed(caller, name)
        raise
    if needs_lanes(request.scope):
        if app.trouble():
            check_allowed(caller, app.id)
        app = await models.loaded(name)
    return app


def names_of(body: bytes) -> Names:
    """What a body says of its model. What can't be read is refused by whoever answers, in its own
    words."""
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (ValueError, RecursionError):
        return Names()
    return Names(_text(fields.model), _text(fields.previous_response_id))


def _text(raw: msgspec.Raw) -> str:
    """A value as text; "" of any other."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (ValueError, RecursionError):
        return ""


def needs_lanes(scope: Scope) -> bool:
    """Whether a call can be answered only by a model that is loaded."""
    path: str = scope["path"]
    if path in PROBES or path.startswith(_WITHOUT_LANES):
        return False
    return not any(name.decode("latin-1") in _CONTINUING for name, _ in scope["headers"])
