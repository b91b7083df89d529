"""`generate` and `generate_stream`: models of text, called with plain JSON."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ....config import GatewayConfig, NanoInferenceError
from ....kserve.tensors import InferRequest, InferResponse
from ...policy.caller import caller_of
from ...server.http import EventStream, JsonResponse, SendEvent, read_object, while_connected
from ...serving.origin import Origin, origin_of, tenant_of
from .generate_fields import generate_json, read_generate
from .http_errors import error_body
from .http_info import named
from .service import InferenceService


class GenerateCalls:
    """The endpoints."""

    def __init__(self, service: InferenceService, config: GatewayConfig) -> None:
        self._service = service
        self._config = config

    async def generate(self, request: Request) -> Response:
        """Calls a model, which answers once."""
        origin, asked = await self._read(request)

        async def work() -> Response:
            return JsonResponse(generate_json(await self._service.infer_once(origin, asked)))

        return await while_connected(request.receive, work)

    async def generate_stream(self, request: Request) -> Response:
        """Calls a model; each of its answers is an event."""
        origin, asked = await self._read(request)

        async def produce(send: SendEvent) -> None:
            async def respond(response: InferResponse) -> None:
                await send(msgspec.json.encode(generate_json(response)))

            try:
                await self._service.infer(origin, asked, respond, many=True)
            except NanoInferenceError as error:
                if not stream.committed:
                    raise
                await send(msgspec.json.encode(error_body(error)))

        stream = EventStream(produce, self._config.comment_s)
        return stream

    async def _read(self, request: Request) -> tuple[Origin, InferRequest]:
        name, version = named(request)
        spec = self._service.spec(name, version, caller_of(request))
        origin = origin_of(request, tenant_of(request), None, name)
        body = await read_object(request, self._config.max_body_bytes)
        return origin, read_generate(spec, version, body)
