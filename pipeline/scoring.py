"""Scoring: how likely a model finds completions that are given to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import msgspec

from ..bus.public import Completion, GenerateRequest
from ..config import RequestError, SamplingParams, shown
from .prompts import ArgumentError, check_prompts, params_of_all, token_ids_of

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


def params_to_score(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, number: int
) -> list[SamplingParams]:
    """The sampling parameters of `number` requests that score completions.

    Each such request has prompt and completion together as its prompt and asks for its logprobs.
    It has to sample one token, which is not used.

    Raises:
        RequestError: There are not as many parameters as prompts, or one is no SamplingParams.
    """
    params = params_of_all(sampling_params, number)
    if wrong := [each for each in params if not isinstance(each, SamplingParams)]:
        raise ArgumentError(f"sampling_params holds {shown(wrong[0])}; give SamplingParams")
    return [
        SamplingParams(
            max_tokens=1, ignore_eos=True, temperature=each.temperature, prompt_logprobs=0
        )
        for each in params
    ]


def token_ids_to_score(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the token ids of prompts and of their completions.

    Raises:
        RequestError: A prompt or completion is not a list of token ids, a completion is empty, or
            there are not as many completions as prompts.
    """
    what, code = "is token ids where a completion is scored", "invalid_prompt"
    of_prompts = [token_ids_of(each, f"a prompt {what}", code) for each in check_prompts(prompts)]
    of_completions = [
        token_ids_of(each, f"a completion {what}", code)
        for each in check_prompts(completions, "completions")
    ]
    if len(of_prompts) != len(of_completions) or not all(of_completions):
        raise ArgumentError(
            f"{len(of_prompts)} prompts and {len(of_completions)} completions, of which "
            f"{of_completions.count(())} are empty; give one completion for each prompt, with at "
            "least one token"
        )
    return of_prompts, of_completions


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
    prompts, completions = token_ids_to_score(prompts, completions)
    params = params_to_score(sampling_params, len(prompts))
    requests = [
        msgspec.structs.replace(
            like,
            request_id="",
            prompt=None,
            messages=None,
            prompt_token_ids=(*prompt, *completion),
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
