"""`POST /v1/replay/{id}`: a request computed again and compared; docs/replay.md."""

from __future__ import annotations

import uuid
from copy import copy
from functools import partial

import msgspec
from msgspec.structs import replace

from ...bus.public import Completion, ErrorInfo, GenerateRequest
from ...config import ModelError, NanoInferenceError, RequestError
from ...pipeline.replay import PRIORITY, check_replayable, replay, request_of, unknown
from ..call import Account, Call
from ..caller import may, may_use
from ..policy.guardrail import text_of
from ..server.http import JsonResponse, Response, connected
from ..serving.request_ids import ids_of, name_of
from ..serving.services import Services

_MOST_BYTES = 1 << 12


class ReplayCalls:
    """The endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def replay(self, call: Call) -> Response:
        """Compute the requests of a call again, at the present weights, and compare.

        The replay is a call of the caller: its policy, limits and fairness apply.
        """
        id = call.params["id"]
        call.session = ""  # a replay is no turn
        call.begin()
        found = await self._recorded(id, call)
        if not found:
            raise unknown(id)
        results = []
        await call.read(_MOST_BYTES)  # of no use, but `connected` needs all of it
        async with connected(call.cancelled):
            for recorded in found:
                like = GenerateRequest(tenant=call.tenant, priority=PRIORITY, model=recorded.model)
                before = await prompt_of(self._services, recorded)
                run = _Run(self._services, call, before)
                # The replay will be cut as well.
                request = request_of(recorded, check_replayable(recorded), like)
                found_then = await delivered(self._services, call, request, recorded, before)
                result = await replay(run, found_then, like)
                name = name_of(call.caller, result.request_id)
                results.append(replace(result, request_id=name))
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

    async def _recorded(self, id: str, call: Call) -> list[Completion]:
        """Return what is recorded of the request or call that a caller means, if it may replay it;
        see `ids_of`."""
        results = self._services.client.bus.results
        for each in ids_of(call.caller, id):
            # Without a search of the results stream, which would take longer the more it holds.
            recorded = await results.recorded(each, search=False)
            if found := [each for each in recorded if _is_own(each, call)]:
                return found
        return []


async def prompt_of(services: Services, recorded: Completion) -> str:
    """Return the prompt's text; "" without a tokenizer."""
    try:
        tokenizer = await services.tokenizer.get()
    except ModelError:
        return ""
    token_ids = recorded.prompt_token_ids or ()
    asked = GenerateRequest(prompt_token_ids=token_ids)
    return await services.tokenizer.process(len(token_ids), partial(text_of, asked, tokenizer))


async def delivered(
    services: Services, call: Call, request: GenerateRequest, recorded: Completion, before: str
) -> Completion:
    """Return a recorded completion as the guardrail lets it leave: without the tokens that no
    client got.

    Args:
        request: The request that it answers.
        before: The prompt, in which a match of the guardrail may begin.
    """
    # What is filtered again counts nowhere.
    apart = copy(call)
    apart.account = Account()
    filtered = await services.submissions.filtered_end(apart, request, recorded, before)
    assert isinstance(filtered, Completion), "a terminal message stays one"
    return filtered


def _is_own(recorded: Completion, call: Call) -> bool:
    """Return whether a caller may replay a request: of its tenant, or with the scope "admin"."""
    caller, recipe = call.caller, recorded.recipe
    if not may_use(caller, recorded.model):
        return False
    if may(caller.scopes, "admin"):
        return True
    return recipe is not None and recipe.tenant == call.tenant


class _Run:
    """Runs the requests of a replay as a call's."""

    def __init__(self, services: Services, call: Call, before: str) -> None:
        """`before`: the prompt, in which a match of the guardrail may begin."""
        self._services, self._call, self._before = services, call, before
        self._first = True

    async def __call__(self, request: GenerateRequest) -> Completion:
        request = replace(request, request_id=f"replay-{uuid.uuid4().hex}")
        first, self._first = self._first, False
        try:
            (completion,) = await self._services.submissions.run(
                self._call, [request], before=lambda index: self._before
            )
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
