"""Embedding: the vectors of prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ..bus.public import Completion, EmbedParams, ErrorInfo, GenerateRequest
from ..config import SamplingParams
from .prompts import check_prompts, prompt_of
from .rollouts import Prompt
from .scoring import complete_all


class EmbeddedPrompt(msgspec.Struct, frozen=True):
    """What became of a prompt.

    Attributes:
        vector: `[dimensions]`, float32; empty where there is an error.
        prompt_tokens: How many tokens the prompt has.
        weight_version: Of the weights that made the vector.
        error: Why there is none.
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
    """Embeds each prompt with a request of its own, as `BusClient.embed` promises.

    Args:
        complete: Gives a request's terminal message.
    """
    requests = [embed_request(prompt, params, like) for prompt in check_prompts(prompts)]
    answers = await complete_all(complete, requests, return_errors=return_errors)
    return [embedded_prompt(completion) for completion in answers]


def embed_request(prompt: Prompt, params: EmbedParams, like: GenerateRequest) -> GenerateRequest:
    """The request for one prompt's vector. Raises RequestError: the prompt is none."""
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
    """What the answer to such a request says."""
    sample = completion.samples[0] if completion.samples else None
    vector = sample.embedding if sample is not None else None
    return EmbeddedPrompt(
        vector or (),
        completion.usage.prompt_tokens,
        sample.weight_version if sample is not None else 0,
        completion.error,
    )
