"""What all interfaces have of embeddings: a call's requests, and the vectors of its prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import anyio
import anyio.lowlevel
import msgspec

from ...bus.public import Completion, EmbedParams, GenerateRequest
from ...pipeline.scoring import EmbeddedPrompt, embed_request, embedded_prompt
from ..server.http import EngineError
from .origin import Origin
from .submissions import AT_ONCE, ENDED_EARLY, Submissions
from .words import LazyWords

T = TypeVar("T")

Prompt = str | tuple[int, ...]

# Numbers of vectors that are written, or compared, at once; more take a thread.
_SHORT = 1 << 14


class EmbedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call, but for its prompts.

    Attributes:
        id: What its requests are known by; that of one prompt, and the beginning of several.
        params: How all of them are pooled.
        priority: The engine's.
        cache_salt: The same.
        adapter: That the model has on; "" for the model alone.
    """

    id: str
    params: EmbedParams = EmbedParams()
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""

    def requests(self, prompts: Sequence[Prompt], tenant: str) -> list[GenerateRequest]:
        """What is submitted for prompts."""
        like = GenerateRequest(
            model=self.adapter,
            tenant=tenant,
            priority=self.priority,
            cache_salt=self.cache_salt,
        )
        return [
            msgspec.structs.replace(
                embed_request(prompt, self.params, like),
                request_id=self.id if len(prompts) == 1 else f"{self.id}_{place}",
            )
            for place, prompt in enumerate(prompts)
        ]


async def embed_all(
    submissions: Submissions,
    origin: Origin,
    call: EmbedCall,
    prompts: Sequence[Prompt],
    *,
    lower_first: bool = True,
) -> list[EmbeddedPrompt]:
    """The vectors of a call's prompts, in order. The first error ends the others.

    Args: `lower_first` is as for `Submissions.check_priority`.

    Raises:
        NanoInferenceError: A prompt was refused, or the engine did not do it.
    """
    requests = call.requests(prompts, origin.tenant)
    length = await submissions.length.get()
    for place, request in enumerate(requests, 1):
        submissions.check_priority(origin.caller, request, lower_first=lower_first)
        submissions.check_size(request, length)
        submissions.check_encoded(request)
        if place % AT_ONCE == 0:
            await anyio.lowlevel.checkpoint()
    embedded: dict[int, EmbeddedPrompt] = {}

    async def run(index: int, begun: bool) -> None:
        async with aclosing(submissions.outputs(origin, requests[index], begun)) as outputs:
            async for output in outputs:
                if isinstance(output, Completion):
                    embedded[index] = embedded_prompt(output)
        if embedded[index].error is not None:
            raise EngineError(ENDED_EARLY.message, code=ENDED_EARLY.code)

    await submissions.run(origin, requests, run)
    return [embedded[index] for index in range(len(requests))]


async def worked_out(
    words: LazyWords, embedded: Sequence[EmbeddedPrompt], work: Callable[[], T]
) -> T:
    """What is made of vectors, beside the event loop where they are many."""
    if sum(len(each.vector) for each in embedded) <= _SHORT:
        return work()
    return await words.beside(work)


def similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors of one size; 0 where one of them is zero."""

    def product(left: Sequence[float], right: Sequence[float]) -> float:
        return math.fsum(a * b for a, b in zip(left, right, strict=True))

    length = math.sqrt(product(one, one) * product(other, other))
    return product(one, other) / length if length else 0.0
