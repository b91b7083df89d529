"""`POST /v1/replay/{id}`: a request computed again and compared; docs/replay.md."""

from __future__ import annotations

import uuid

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ...bus.public import Completion, ErrorInfo, GenerateRequest
from ...config import NanoInferenceError, RequestError
from ...pipeline.replay import PRIORITY, replay, unknown
from ..policy.caller import may_use
from ..policy.document import may
from ..server.http import JsonResponse, connected, read_body
from .origin import Origin, origin_of
from .services import Services

_MOST_BYTES = 1 << 12


class ReplayCalls:
    """The endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def replay(self, request: Request) -> Response:
        """Compute the requests of a call again, at the present weights, and compare.

        The replay is a call of the caller: its policy, limits and fairness apply.
        """
        id, origin = request.path_params["id"], origin_of(request, None)
        found = [each for each in await self._recorded(id) if _is_own(each, origin)]
        if not found:
            raise unknown(id)
        results = []
        await read_body(request, _MOST_BYTES)  # of no use, but `connected` needs all of it
        async with connected(request.receive):
            for recorded in found:
                like = GenerateRequest(
                    tenant=origin.tenant, priority=PRIORITY, model=recorded.model
                )
                results.append(await replay(_Run(self._services, origin), recorded, like))
        differing = [each for each in results if each.verdict == "different"]
        first, *_ = [*differing, *results]
        answer = {
            "id": id,
            "object": "replay",
            "verdict": first.verdict,
            "summary": first.summary,
            "reasons": first.reasons,
            "requests": results,
        }
        return JsonResponse(msgspec.to_builtins(answer))

    async def _recorded(self, id: str) -> list[Completion]:
        # Without a search of the results stream, which would take longer the more it holds.
        return await self._services.engine.bus.results.recorded(id, search=False)


def _is_own(recorded: Completion, origin: Origin) -> bool:
    """Return whether a caller may replay a request: of its tenant, or with the scope "admin"."""
    caller, recipe = origin.caller, recorded.recipe
    if not may_use(caller, recorded.model):
        return False
    if may(caller.scopes, "admin"):
        return True
    return recipe is not None and recipe.tenant == origin.tenant


class _Run:
    """Runs the requests of a replay as a call's."""

    def __init__(self, services: Services, origin: Origin) -> None:
        self._services, self._origin = services, origin
        self._first = True

    async def __call__(self, request: GenerateRequest) -> Completion:
        request = replace(request, request_id=f"replay-{uuid.uuid4().hex}")
        first, self._first = self._first, False
        try:
            (completion,) = await self._services.submissions.run(self._origin, [request])
        except NanoInferenceError as error:
            if first:
                raise
            # A guardrail may refuse the recorded tokens as a prompt.
            info = ErrorInfo(code=error.code, message=error.message)
            return Completion(
                request_id=request.request_id, entry_id="", status="error", error=info
            )
        if completion.error is not None:
            raise RequestError(completion.error.message, code=completion.error.code)
        return completion
