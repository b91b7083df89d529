"""What there is and how it is, over HTTP."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....config import BusError, RequestError
from ....kserve.tensors import ModelSpec
from ...policy.caller import caller_of
from ...server.http import JsonResponse, read_object
from ...serving.fields import read_part
from ...serving.lane_state import Readiness
from .descriptions import config_json, index_json, metadata_json
from .http_errors import CODE_HEADER
from .shared import SERVER_NAME, VERSION, KServe
from .statistics import statistics_json

# By the protocol 4xx is "no"; a client may take 5xx for something else.
_NOT_READY = 400


class _IndexBody(msgspec.Struct):
    ready: bool = False


class InfoCalls:
    """The endpoints."""

    def __init__(self, kserve: KServe, readiness: Readiness, max_body_bytes: int) -> None:
        """Args: what is served, whether requests are taken, and the most that a body may have."""
        self._service = kserve.service
        self._extensions = kserve.extensions
        self._readiness = readiness
        self._max_body_bytes = max_body_bytes

    async def live(self, request: Request) -> Response:
        """Whether the event loop turns."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """Whether requests shall be sent here."""
        try:
            reason = await self._readiness.trouble()
        except BusError as error:
            reason = error.message
        return _readiness(reason)

    async def model_ready(self, request: Request) -> Response:
        """Whether a request to a model would be served."""
        name, version = named(request)
        try:
            self._service.spec(name, version)
            state, *_ = await self._service.states([name])
        except (BusError, RequestError) as error:
            return _readiness(error.message)
        return _readiness(state.reason)

    async def server(self, request: Request) -> Response:
        """What serves, and what of the protocol it knows."""
        told = {"name": SERVER_NAME, "version": VERSION, "extensions": self._extensions}
        return JsonResponse(told)

    async def metadata(self, request: Request) -> Response:
        """What a model takes and gives."""
        return JsonResponse(metadata_json(self._spec(request)))

    async def config(self, request: Request) -> Response:
        """A model's configuration."""
        return JsonResponse(config_json(self._spec(request)))

    async def statistics(self, request: Request) -> Response:
        """How often a model was called, or each of them, and how long it took."""
        told = statistics_json(self._service, *named(request), caller_of(request))
        return JsonResponse(told)

    async def index(self, request: Request) -> Response:
        """Which models there are, and how each is; on demand only those that are ready."""
        body = read_part(await read_object(request, self._max_body_bytes), _IndexBody)
        names = [each.name for each in self._service.specs(caller=caller_of(request))]
        states = await self._service.states(names)
        return JsonResponse(index_json(each for each in states if each.ready or not body.ready))

    def _spec(self, request: Request) -> ModelSpec:
        return self._service.spec(*named(request), caller_of(request))


def named(request: Request) -> tuple[str, str]:
    """The model that a path names, and the version; "" where it names none."""
    return request.path_params.get("model", ""), request.path_params.get("version", "")


def _readiness(reason: str) -> Response:
    if not reason:
        return Response()
    return JsonResponse({"error": reason}, _NOT_READY, {CODE_HEADER: "not_ready"})
