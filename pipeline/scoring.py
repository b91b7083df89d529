"""Scoring: how likely a model finds completions that are given to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec

from ..bus.public import Completion, GenerateRequest
from ..config import RequestError, SamplingParams

AT_A_TIME = 256
"""Requests of one call that are under way."""


class ScoredCompletion(msgspec.Struct, frozen=True):
    """What the weights in place make of a completion that was given.

    Attributes:
        logprobs: `[completion]`, float32, by the weights in place.
        ref_logprobs: `[completion]`, by the reference model; None where there is none.
        weight_version: Of the weights in place.
    """

    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int


def scoring_params(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[SamplingParams]:
    """The sampling parameters of the requests that score completions.

    Each such request has prompt and completion together as its prompt and asks for its logprobs.
    It has to sample one token, which is not used.

    Raises:
        ValueError: There are not as many completions or parameters as prompts, or one is empty.
    """
    if len(prompts) != len(completions) or not all(completions):
        raise ValueError("give one completion for each prompt, with at least one token")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    if len(sampling_params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(sampling_params)} sampling_params")
    return [
        SamplingParams(
            max_tokens=1, ignore_eos=True, temperature=params.temperature, prompt_logprobs=0
        )
        for params in sampling_params
    ]


async def score_by(
    complete: Callable[[GenerateRequest], Awaitable[Completion]],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    like: GenerateRequest,
) -> list[ScoredCompletion]:
    """Scores each completion with a request of its own, as `BusClient.score` promises.

    Args:
        complete: Gives a request's terminal message.
    """
    params = scoring_params(prompts, completions, sampling_params)
    requests = [
        msgspec.structs.replace(
            like,
            request_id="",
            prompt=None,
            messages=None,
            prompt_token_ids=(*map(int, prompt), *map(int, completion)),
            n=1,
            sampling=sampling,
            stream=False,
        )
        for prompt, completion, sampling in zip(prompts, completions, params, strict=True)
    ]
    answers = await complete_all(complete, requests)
    return [
        scored_completion(completion, len(own))
        for completion, own in zip(answers, completions, strict=True)
    ]


async def complete_all(
    complete: Callable[[GenerateRequest], Awaitable[Completion]],
    requests: Sequence[GenerateRequest],
    *,
    return_errors: bool = False,
) -> list[Completion]:
    """The terminal messages of requests, in order; some are under way at a time.

    Args:
        complete: Gives one.
        requests: All of them.
        return_errors: Whether those that did not end well are among them.

    Raises:
        RequestError: One did not end well, and is not to be returned; the others are cancelled.
    """
    places = asyncio.Semaphore(AT_A_TIME)

    async def complete_one(request: GenerateRequest) -> Completion:
        async with places:
            completion = await complete(request)
        if completion.error is not None and not return_errors:
            raise RequestError(completion.error.message, code=completion.error.code)
        return completion

    tasks = [asyncio.ensure_future(complete_one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def scored_completion(completion: Completion, num_tokens: int) -> ScoredCompletion:
    """What the answer to a scoring request says of its last tokens, which were given to it."""
    logprobs, ref_logprobs = completion.prompt_logprobs, completion.prompt_ref_logprobs
    return ScoredCompletion(
        # Only the first token of a prompt has none.
        cast(tuple[float, ...], (logprobs or ())[-num_tokens:]),
        None if ref_logprobs is None else cast(tuple[float, ...], ref_logprobs[-num_tokens:]),
        completion.samples[0].weight_version,
    )
