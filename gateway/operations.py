"""Endpoints of the operations that `nano-inference --url` runs: `POST /admin/operations/NAME`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

import anyio
import msgspec

from ..config import Config, RequestError
from ..pipeline.client import BusClient
from ..pipeline.operations import OPERATIONS, Operation
from .api.routes import PolicyRoute
from .call import Call
from .caller import check_allowed
from .policy.audit import AuditLog, audit_change
from .server.http import (
    EventStream,
    JsonResponse,
    Response,
    SendEvent,
    connected,
    convert,
    read_object,
)
from .serving.lane_state import Readiness
from .serving.request_ids import ids_of

PATH = "/admin/operations"

_LOOK_S = 0.5


def operation_routes(
    engine: BusClient, config: Config, readiness: Readiness, audit: AuditLog | None
) -> list[PolicyRoute]:
    """Return the endpoints. `engine`: the client of the gateway or of the whole deployment.

    The body has the operation's arguments, and in `model` one of several models. The tenant is the
    caller's, as in all calls.
    """

    async def client_of(call: Call, model: str, stack: AsyncExitStack) -> BusClient:
        found = await engine.deployment.find(model) if model else ""
        check_allowed(call.caller, found or config.engine.model_name)
        if found == engine.bus.model:
            return engine
        return await stack.enter_async_context(engine.of_model(found))

    async def follow(call: Call, operation: Operation, model: str, given: Any) -> Response:
        async def send_all(results: AsyncGenerator[Any, None], send: SendEvent) -> None:
            async with aclosing(results):
                async for each in results:
                    await send(msgspec.json.encode(each))

        async def produce(send: SendEvent) -> None:
            async with AsyncExitStack() as stack:
                client = await client_of(call, model, stack)
                group = await stack.enter_async_context(anyio.create_task_group())
                group.start_soon(send_all, operation.run(client, **given), send)
                while not readiness.draining:  # noqa: ASYNC110
                    await anyio.sleep(_LOOK_S)
                group.cancel_scope.cancel()

        return EventStream(produce, config.gateway.comment_s, ids=False)

    def route(name: str, operation: Operation) -> PolicyRoute:
        async def endpoint(call: Call) -> Response:
            body = await read_object(call, config.gateway.max_body_bytes)
            model = convert(body.pop("model", ""), str, "model")
            if "tenant" in operation.arguments.__struct_fields__:
                body["tenant"] = call.tenant
            given = msgspec.structs.asdict(convert(body, operation.arguments))
            if operation.streams:
                return await follow(call, operation, model, given)
            async with AsyncExitStack() as stack:
                client = await client_of(call, model, stack)
                await stack.enter_async_context(connected(call.cancelled))
                found = await _result(call, operation, client, given)
            if operation.changes:
                audit_change(audit, call, name, model, body)
            return JsonResponse(found)

        return PolicyRoute(f"POST {PATH}/{name}", operation.scope, endpoint)

    return [route(*each) for each in OPERATIONS.items()]


async def _result(
    call: Call, operation: Operation, client: BusClient, given: dict[str, Any]
) -> Any:
    """Run an operation. The id of a request may be the caller's own name of it."""
    if isinstance(id := given.get("id"), str):
        for each in ids_of(call.caller, id)[:-1]:
            with suppress(RequestError):
                return await operation.run(client, **given | {"id": each})
    return await operation.run(client, **given)
