"""`POST /v1/requests`: a request as on the bus, and its outputs; docs/redis.md has their fields."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ...bus.codec import decode_request, encode_output
from ...bus.entries import Malformed
from ...bus.public import GenerateRequest, Output
from ...config import NanoInferenceError, RequestError
from ..call import Call
from ..server.http import (
    EngineError,
    EventStream,
    Response,
    SendEvent,
    connected,
    error_body,
    status_of,
)
from ..serving.begun_calls import BodyCall, keyed
from ..serving.model_names import adapter_of
from ..serving.prepared import check_request
from ..serving.request_ids import bus_id, name_of, named
from ..serving.services import Services

_NS_OF_MS = 1_000_000


class RequestCalls:
    """The endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, call: Call) -> Response:
        """Run a request. Each event is one of its outputs; the last one is its Completion, or an
        error in OpenAI's form. With `stream: false`, the answer is its Completion.

        The tenant is the caller's. Ids are the caller's own names, as in all calls. A call that
        comes again with its idempotency key gets all outputs from the first one on.
        """
        services, gateway = self._services, self._services.config.gateway
        most = gateway.max_body_bytes
        found = decode_request(await call.read(most), "json", most)
        if isinstance(found, Malformed):
            raise RequestError(found.message, code=found.code)
        budget_ns = found.budget_ns
        call.begin(None if budget_ns is None else budget_ns / _NS_OF_MS, found.model)
        await services.served.check(found.model, call.caller)
        services.submissions.check_priority(call.caller, found.priority, lower_first=False)
        named = await check_request(services, self._named(call, found))
        begun = await services.keyed.begin(call, keyed(call, found), [named])
        (request,) = begun.requests
        if not request.stream or request.embed is not None:
            return await self._whole(call, begun)

        async def produce(send: SendEvent) -> None:
            sent = False

            async def take(index: int, output: Output) -> None:
                nonlocal sent
                sent = True
                await send(_encoded(call, output))

            try:
                async with begun.attach() as attachment:
                    await services.submissions.run(call, [request], take, attachment)
            except EngineError as error:
                if error.completion is not None:
                    await take(0, error.completion)
                elif sent:
                    await send(msgspec.json.encode(error_body(error)))
                else:
                    raise
            except NanoInferenceError as error:
                if not sent:
                    raise
                await send(msgspec.json.encode(error_body(error)))

        return EventStream(produce, gateway.comment_s, ids=False)

    async def _whole(self, call: Call, begun: BodyCall) -> Response:
        status, run = 200, self._services.submissions.run
        async with connected(call.cancelled):
            try:
                async with begun.attach() as attachment:
                    (end,) = await run(call, begun.requests, attachment=attachment)
            except EngineError as error:
                if error.completion is None:
                    raise
                end, status = error.completion, status_of(error)
        return Response(_encoded(call, end), status, media_type="application/json")

    def _named(self, call: Call, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the caller's tenant, and with ids as they are on the bus."""
        fork = request.fork
        if fork is not None:
            fork = replace(fork, request_id=bus_id(call.caller, fork.request_id))
        return replace(
            request,
            request_id=bus_id(call.caller, named(request.request_id, "request_id")),
            model=adapter_of(request.model, self._services.config),
            tenant=call.tenant,
            fork=fork,
        )


def _encoded(call: Call, output: Output) -> bytes:
    """Return an output as JSON, with the caller's name of its request."""
    return encode_output(replace(output, request_id=name_of(call.caller, output.request_id)))
