"""Embeddings of all interfaces: a call's requests, and the vectors of its prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ...bus.public import Completion, EmbedParams, GenerateRequest, Output
from ...config import RequestError
from ...pipeline.scoring import EmbeddedPrompt, embed_request, embedded_prompt
from ..call import Call
from ..server.http import EngineError, Response, connected
from .prepared import check_request, truncated
from .services import Services
from .submissions import ENDED_EARLY
from .times import call_usage

Prompt = str | tuple[int, ...]

# Numbers of a vector that are written in the time of a listed token.
_NUMBERS = 4


class EmbedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call without its prompts.

    Attributes:
        id: The id of a single request, or the prefix of several.
        params: The pooling of the prompts.
        priority: The engine's priority.
        cache_salt: The engine's cache salt.
        adapter: "" for the model alone.
        model: The model's name as the client wrote it.
        budget_ms: The client's budget.
        lower_first: As for `Submissions.check_priority`.
        truncation: The most tokens of a prompt, as of `truncated`; None for those of the model.
        truncation_side: Likewise.
    """

    id: str
    params: EmbedParams = EmbedParams()
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    model: str = ""
    budget_ms: float | None = None
    lower_first: bool = True
    truncation: int | None = None
    truncation_side: Literal["left", "right"] = "left"

    def requests(self, prompts: Sequence[Prompt], tenant: str) -> list[GenerateRequest]:
        """Return the requests for prompts."""
        like = GenerateRequest(
            model=self.adapter, tenant=tenant, priority=self.priority, cache_salt=self.cache_salt
        )
        return [
            msgspec.structs.replace(
                embed_request(prompt, self.params, like),
                request_id=self.id if len(prompts) == 1 else f"{self.id}_{place}",
            )
            for place, prompt in enumerate(prompts)
        ]


async def embed_all(
    services: Services, call: Call, wanted: EmbedCall, prompts: Sequence[Prompt]
) -> list[EmbeddedPrompt]:
    """Return the vectors of a call's prompts, in order. The first error ends the others.

    Raises:
        NanoInferenceError: A prompt was refused, or the engine has failed.
    """
    if (most := wanted.truncation) is not None:
        side = wanted.truncation_side
        prompts = [await truncated(services, each, most, side=side) for each in prompts]
    requests = wanted.requests(prompts, call.tenant)
    for request in requests:
        services.submissions.check_priority(
            call.caller, request.priority, lower_first=wanted.lower_first
        )
        await check_request(services, request)

    async def take(index: int, output: Output) -> None:
        if isinstance(output, Completion) and output.error is not None:
            raise EngineError(ENDED_EARLY.message, code=ENDED_EARLY.code)

    return list(map(embedded_prompt, await services.submissions.run(call, requests, take)))


async def answer_embedded(
    call: Call,
    services: Services,
    wanted: EmbedCall,
    prompts: Sequence[Prompt],
    write: Callable[[list[EmbeddedPrompt], dict[str, Any]], Any],
) -> Response:
    """Embed the prompts of a call, and answer with the JSON of what `write` returns.

    Args:
        write: Called with the vectors, and the fields of usage with the call's time.

    Raises:
        NanoInferenceError: As `embed_all`; too_many_prompts.
    """
    most = services.config.gateway.max_prompts
    if len(prompts) > most:
        raise RequestError(
            f"the call has {len(prompts)} inputs, and {most} are taken (gateway.max_prompts); "
            "send several calls",
            code="too_many_prompts",
        )
    call.begin(wanted.budget_ms, wanted.model)
    async with connected(call.cancelled):
        embedded = await embed_all(services, call, wanted, prompts)

        def written() -> bytes:
            return msgspec.json.encode(write(embedded, call_usage(call.account)))

        numbers = sum(len(each.vector) for each in embedded)
        body = await services.tokenizer.process(numbers // _NUMBERS, written)
        return Response(body, media_type="application/json")


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine similarity of two vectors of one size; 0 if one of them is zero."""

    def product(left: Sequence[float], right: Sequence[float]) -> float:
        return math.fsum(a * b for a, b in zip(left, right, strict=True))

    length = math.sqrt(product(one, one) * product(other, other))
    return product(one, other) / length if length else 0.0
