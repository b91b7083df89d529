"""Embedding: requests for the vectors of prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ..bus.public import Completion, EmbedParams, ErrorInfo, GenerateRequest
from ..config import SamplingParams
from .prompts import check_prompts, prompt_of
from .rollouts import Prompt
from .scoring import complete_all


class EmbeddedPrompt(msgspec.Struct, frozen=True):
    """The vector of a prompt, or an error.

    Attributes:
        vector: `[dimensions]`, float32; empty with an error.
        prompt_tokens: Number of tokens of the prompt.
        weight_version: Version of the weights.
        error: The error, if it failed.
    """

    vector: tuple[float, ...]
    prompt_tokens: int
    weight_version: int
    error: ErrorInfo | None = None


async def embed_by(
    complete: Callable[[GenerateRequest], Awaitable[Completion]],
    prompts: Sequence[Prompt],
    params: EmbedParams,
    like: GenerateRequest,
    *,
    return_errors: bool,
) -> list[EmbeddedPrompt]:
    """Embed each prompt with a request of its own, as `BusClient.embed` promises.

    `complete` returns a request's terminal message.
    """
    requests = [embed_request(prompt, params, like) for prompt in check_prompts(prompts)]
    answers = await complete_all(complete, requests, return_errors=return_errors)
    return [embedded_prompt(completion) for completion in answers]


def embed_request(prompt: Prompt, params: EmbedParams, like: GenerateRequest) -> GenerateRequest:
    """Return the request for one prompt's vector. Raises RequestError for an invalid prompt."""
    prompt = prompt_of(prompt)
    is_text = isinstance(prompt, str)
    return msgspec.structs.replace(
        like,
        request_id="",
        prompt=prompt if is_text else None,
        messages=None,
        prompt_token_ids=None if is_text else prompt,
        n=1,
        sampling=SamplingParams(),
        stream=False,
        embed=params,
    )


def embedded_prompt(completion: Completion) -> EmbeddedPrompt:
    """Return the result of such a request."""
    sample = completion.samples[0] if completion.samples else None
    vector = sample.embedding if sample is not None else None
    return EmbeddedPrompt(
        vector or (),
        completion.usage.prompt_tokens,
        sample.weight_version if sample is not None else 0,
        completion.error,
    )
