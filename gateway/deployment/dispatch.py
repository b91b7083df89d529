"""Find the model of a call, and hand the call to the model's application."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ...config import NanoInferenceError
from ..api import ollama
from ..call import Call
from ..caller import check_allowed
from ..server.http import NAMED_MODEL, Response, call_of, decode_object
from ..server.limits import PROBES
from .models import ModelApp, Models

PREFIX = "/models/"
ABORT = "/abort_request"

_WITHOUT_LANES = (
    "/v1/streams",
    "/v1/responses/",
    "/v1/conversations",
    "/v1/models",
    "/v2",
    "/version",
    "/tokenizer_info",
    *("/api/show", "/api/pull", "/api/delete"),
    ABORT,
)
"""Path prefixes of calls that a model answers even when it isn't loaded."""

_CONTINUING = (b"last-event-id", b"idempotency-key")
"""Headers of calls that may have begun while the model was loaded."""

_WITHOUT_BODY = ("GET", "HEAD", "DELETE")

_UNREAD = ("/update_weights_from_tensor",)
"""Calls with bodies too large to search: the address or the query names the model."""


class Entrance:
    """ASGI: strip `/models/{id}` from a path, so that all other layers see an interface's path."""

    def __init__(self, app: ASGIApp, names: Callable[[], Collection[str]]) -> None:
        """`names`: returns the names of all models."""
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if path.startswith(PREFIX):
            name, path = split(path, self._names())
            if path:
                state = {**scope.get("state", {}), NAMED_MODEL: name}
                scope = {**scope, "path": path, "raw_path": path.encode(), "state": state}
        await self._app(scope, receive, send)


def split(path: str, names: Collection[str]) -> tuple[str, str]:
    """Split a path into the model's name and the interface's path, "" if there is none.

    The longest known name wins; without a known name, the first part is the name.
    """
    rest = path.removeprefix(PREFIX)
    end = len(rest)
    while (end := rest.rfind("/", 0, end)) > 0:
        if rest[:end] in names:
            return rest[:end], rest[end:]
    name, slash, behind = rest.partition("/")
    return name, slash + behind


class Names(NamedTuple):
    """The fields of a body that identify its model; "" for a missing one. `name`: Ollama's older
    field for `model`."""

    model: str = ""
    previous_response_id: str = ""
    name: str = ""


class _Fields(msgspec.Struct):
    # Undecoded, since a value that is no text may be large.
    model: msgspec.Raw = msgspec.Raw(b'""')
    previous_response_id: msgspec.Raw = msgspec.Raw(b'""')
    name: msgspec.Raw = msgspec.Raw(b'""')


class ForwardedResponse(Response):
    """A response by a model's application, which then counts the call as its own."""

    def __init__(self, app: ModelApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._entered(call_of(scope)):
            await self._app.app(scope, receive, send)

    async def to_own(self, call: Call) -> Response:
        """Return the model's response to a call of the gateway itself."""
        with self._entered(call):
            return await self._app.app.response_to(call, call.body or b"")

    @contextmanager
    def _entered(self, call: Call) -> Iterator[None]:
        call.model = call.account.model = self._app.id
        with self._app.entered():
            yield


class ModelPathRoute(BaseRoute):
    """Matches every call that came by a model's own address."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if NAMED_MODEL in scope.get("state", {}) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = call_of(scope)
        name = call.named_model
        try:
            app = await model_for(self._models, call, name)
        except NanoInferenceError:
            # Only a caller that may read gets the list of models, and their state.
            await scope["app"].chain.enter(call, "read")
            app = await model_for(self._models, call, name)
        await ForwardedResponse(app)(scope, receive, send)


class ModelDispatch:
    """Hands calls without a model's own address to their models."""

    def __init__(self, models: Models, max_body_bytes: int) -> None:
        self._models = models
        self._max_body_bytes = max_body_bytes

    async def by_body(self, call: Call) -> Response:
        """Hand a call to the model named by its body or query, or else to the default."""
        names = Names()
        if call.method not in _WITHOUT_BODY and call.path not in _UNREAD:
            names = names_of(await self._read(call))
        name = names.model or call.query.get("model", "")
        if ollama.is_called(call):
            name = ollama.untagged(name or names.name, self._models.names())
        call.named_model = name
        if names.previous_response_id and not name:
            return ForwardedResponse(await self._models.of_call(names.previous_response_id))
        return ForwardedResponse(await model_for(self._models, call, name))

    async def by_id(self, call: Call) -> Response:
        """Hand a call about another call to the other call's model."""
        params = call.params
        call_id = params.get("stream") or params.get("response_id")
        return ForwardedResponse(
            await self._models.of_call(call_id or await self._models.keyed(call))
        )

    async def abort(self, call: Call) -> Response:
        """Hand an abort to the named model, or to the one with this request."""
        found = decode_object(await self._read(call))
        name: Any = found.get("model") or call.query.get("model", "")
        rid = found.get("rid")
        if name or not isinstance(rid, str) or not rid:
            return ForwardedResponse(await self._models.find(name if isinstance(name, str) else ""))
        caller = call.caller
        here = [app for app in self._models.apps if app.interfaces.submissions.has(caller, rid)]
        if len(here) == 1:
            return ForwardedResponse(here[0])
        if "weights" not in caller.scopes:
            return ForwardedResponse(await self._models.find())
        # Another gateway submitted it, so that only the lanes of its model can find it.
        allowed = caller.models
        for app in self._models.apps:
            if app.record.state != "unloaded" and (allowed is None or app.id in allowed):
                await app.interfaces.submissions.abort(caller, rid)
        return Response()

    async def _read(self, call: Call) -> bytes:
        # Kept for the endpoint that the call is handed to.
        call.body = body = await call.read(self._max_body_bytes)
        return body


async def model_for(models: Models, call: Call, name: str) -> ModelApp:
    """Return the model of a name. Models that the caller may not use look missing.

    Raises:
        RequestError: As `Models.loaded`; model_not_found also for a model not for this caller.
    """
    caller = call.caller
    try:
        app = await models.find(name)
    except NanoInferenceError:
        check_allowed(caller, name)
        raise
    if _needs_lanes(call):
        if app.trouble():
            check_allowed(caller, app.id)
        app = await models.loaded(name)
    return app


def names_of(body: bytes) -> Names:
    """Return the names in a body; none if it is malformed, which the endpoint then refuses."""
    try:
        fields = msgspec.json.decode(body, type=_Fields)
    except (ValueError, RecursionError):
        return Names()
    return Names(*map(_text, (fields.model, fields.previous_response_id, fields.name)))


def _text(raw: msgspec.Raw) -> str:
    """Return a text value; "" for any other."""
    try:
        return msgspec.json.decode(raw, type=str)
    except (ValueError, RecursionError):
        return ""


def _needs_lanes(call: Call) -> bool:
    """Return whether only a loaded model can answer a call."""
    if call.path in PROBES or call.path.startswith(_WITHOUT_LANES):
        return False
    return not any(name in _CONTINUING for name, _ in call.headers)
