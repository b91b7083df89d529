"""`GET /v1/results`: the results of any number of requests on one connection; docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import msgspec
from msgspec.structs import replace

from ...bus.channel import EndedStream
from ...bus.codec import encode_output
from ...bus.public import Completion, GenerateRequest
from ...config import BusError, NanoInferenceError, RequestError, shown
from ...pipeline.client import BusClient
from ...pipeline.replay import request_of
from ...pipeline.scoring import is_duplicate
from ..call import Call
from ..caller import may_use
from ..server.http import Response, SendEvent, error_body, status_of
from ..server.websocket import SocketStream
from ..serving.begun_calls import last_event_id
from ..serving.lane_state import Readiness
from ..serving.request_ids import bus_id, mark_of, name_of
from ..serving.services import Services
from .replays import delivered, prompt_of
from .routes import PolicyRoute

PATH = "/v1/results"

_LOOK_S = 0.5

IsWanted = Callable[[Completion], bool]


class ResultCalls:
    """The endpoint, for one model or a deployment of several."""

    def __init__(
        self,
        client: BusClient,
        comment_s: float,
        readiness: Readiness,
        services: Callable[[], Sequence[Services]],
    ) -> None:
        """Args:
        client: The client of the gateway or of the whole deployment.
        comment_s: `gateway.comment_s`.
        services: Returns those of each loaded model.
        """
        self._client = client
        self._comment_s = comment_s
        self._readiness = readiness
        self._services = services

    def routes(self) -> list[PolicyRoute]:
        """Return the route."""
        return [PolicyRoute(f"GET {PATH}", "generate", self.follow)]

    async def follow(self, call: Call) -> Response:
        """Send each result of the caller's tenant that is wanted, as it comes, over SSE or as the
        messages of a WebSocket."""
        call.begin()
        is_wanted = wanted_by(call)
        # The latter is what a browser's EventSource sends by itself.
        after = last_event_id(call) or call.query.get("after", "")

        async def produce(send: SendEvent) -> None:
            results = await self._client.bus.results.ended(after)
            async with aclosing(results), anyio.create_task_group() as group:
                group.start_soon(self._end_when_draining, group.cancel_scope)
                await self._send_all(call, results, is_wanted, send)
                group.cancel_scope.cancel()

        return SocketStream(produce, self._comment_s)

    async def _end_when_draining(self, scope: anyio.CancelScope) -> None:
        while not self._readiness.draining:  # noqa: ASYNC110
            await anyio.sleep(_LOOK_S)
        scope.cancel()

    async def _send_all(
        self, call: Call, results: EndedStream, is_wanted: IsWanted, send: SendEvent
    ) -> None:
        """Send the position at which results begin, then each result, then perhaps an error."""
        await _send(send, "open", results.position)
        try:
            async for completion in results:
                if is_wanted(completion):
                    found = await self._filtered(call, completion)
                    name = name_of(call.caller, found.request_id)
                    result = msgspec.Raw(encode_output(replace(found, request_id=name)))
                    await _send(send, "result", results.position, result=result)
        except NanoInferenceError as error:
            body = {"type": "error", "status": status_of(error), **error_body(error)}
            await send(msgspec.json.encode(body), name="error")

    async def _filtered(self, call: Call, completion: Completion) -> Completion:
        """Return a completion as the policy lets its tokens leave."""
        if not completion.samples or not any(each.chain.filters for each in self._services()):
            return completion
        if (services := await self._services_of(completion.model)) is None:
            raise BusError(
                f"a result is of {shown(completion.model)}, which this gateway doesn't serve now, "
                "so the policy's filters of its answers can't run; load it, and follow on from the "
                "last position",
                code="model_not_loaded",
            )
        like = GenerateRequest(
            tenant=call.tenant, model=completion.model, n=len(completion.samples)
        )
        if completion.recipe is not None:
            like = request_of(completion, completion.recipe, like)
        before = await prompt_of(services, completion)
        return await delivered(services, call, like, completion, before)

    async def _services_of(self, model: str) -> Services | None:
        """Return the services of the model that has a name, or an adapter of this name."""
        for each in self._services():
            engine = each.config.engine
            names = {engine.model_name, *engine.model_aliases}
            if model in names or model in {one.id for one in await each.served.adapters()}:
                return each
        return None


async def _send(send: SendEvent, kind: str, position: str, **fields: Any) -> None:
    data = msgspec.json.encode({"type": kind, "position": position, **fields})
    await send(data, position, name=kind)


def wanted_by(call: Call) -> IsWanted:
    """Return the check whether a completion is of the caller's tenant and has the id's prefix, or
    the tag, that its query names.

    Raises:
        RequestError: invalid_results: not one of them is named.
    """
    prefix, tag = call.query.get("prefix"), call.query.get("tag")
    if (prefix is None) == (tag is None):
        raise RequestError(
            "give one of ?prefix=, which begins the ids of the wanted requests, and ?tag=, which "
            "their calls had in the header X-Request-Tag",
            code="invalid_results",
        )
    caller, tenant = call.caller, call.tenant
    own, begins = bus_id(caller, ""), bus_id(caller, prefix or "")
    mark = "" if tag is None else mark_of(tenant, tag)

    def is_wanted(completion: Completion) -> bool:
        id, recipe = completion.request_id, completion.recipe
        if (recipe is not None and recipe.tenant != tenant) or is_duplicate(completion):
            return False
        if completion.model and not may_use(caller, completion.model):
            return False
        if mark:
            # Ids with a slash were named by the tenant before it, and may have any mark in them.
            return mark in id and ("/" not in id or id.startswith(own))
        return id.startswith(begins)

    return is_wanted
