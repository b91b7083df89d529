"""Requests of Python callers: for completions, their logprobs, and the vectors of prompts."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..bus import Bus
from ..bus.codec import written_id
from ..bus.public import (
    DEFAULT_TENANT,
    Completion,
    EmbedParams,
    ErrorInfo,
    Fork,
    GenerateRequest,
    Output,
)
from ..bus.targets import Logprobs, target_array
from ..config import RequestError, SamplingParams
from .engine_requests import (
    check_prompts,
    params_of_targets,
    params_to_score,
    prompt_fields,
    prompt_of,
    token_ids_to_score,
)
from .replay import PRIORITY, Replay, replay, unknown
from .rollouts import Prompt

if TYPE_CHECKING:
    from .token_tree import TokenTree

AT_A_TIME = 256
"""Most requests of one call in flight."""

Request = GenerateRequest | dict[str, Any]


class ScoredCompletion(msgspec.Struct, frozen=True):
    """The logprobs of a given completion.

    Attributes:
        logprobs: `[completion]`, float32, by the current weights.
        ref_logprobs: `[completion]`, by the reference model; None without one.
        weight_version: Version of the current weights.
    """

    logprobs: tuple[float, ...]
    ref_logprobs: tuple[float, ...] | None
    weight_version: int


async def complete_all(
    complete: Callable[[GenerateRequest], Awaitable[Completion]],
    requests: Sequence[GenerateRequest],
    *,
    return_errors: bool = False,
) -> list[Completion]:
    """Return the terminal messages of requests in order, with up to `AT_A_TIME` in flight.

    Args:
        complete: Returns a request's terminal message.
        requests: The requests.
        return_errors: Whether to return failed requests, too.

    Raises:
        RequestError: A request failed without `return_errors`; the others are cancelled.
    """
    slots = asyncio.Semaphore(AT_A_TIME)

    async def complete_one(request: GenerateRequest) -> Completion:
        async with slots:
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
    """Return the logprobs of the last tokens of a scoring request's prompt."""
    logprobs, ref_logprobs = completion.prompt_logprobs, completion.prompt_ref_logprobs
    return ScoredCompletion(
        # Only the first token of a prompt has no logprob.
        cast(tuple[float, ...], (logprobs or ())[-num_tokens:]),
        None if ref_logprobs is None else cast(tuple[float, ...], ref_logprobs[-num_tokens:]),
        completion.samples[0].weight_version,
    )


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


def embed_request(prompt: Prompt, params: EmbedParams, like: GenerateRequest) -> GenerateRequest:
    """Return the request for one prompt's vector. Raises RequestError for an invalid prompt."""
    return msgspec.structs.replace(_alone(like, prompt_of(prompt), SamplingParams()), embed=params)


def _alone(
    like: GenerateRequest, prompt: str | tuple[int, ...], sampling: SamplingParams
) -> GenerateRequest:
    """Return the request for one prompt, with the tenant and so on of another request."""
    return msgspec.structs.replace(
        like,
        request_id="",
        messages=None,
        n=1,
        sampling=sampling,
        stream=False,
        **prompt_fields(prompt),
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


class Submitter(ABC):
    """Completes, scores, embeds and replays with requests of its own `submit` and `publish`.

    Attributes:
        bus: The bus, whose results streams have finished requests.
    """

    bus: Bus

    @abstractmethod
    async def publish(self, request: Request | bytes) -> str:
        """Publish a request without waiting for its output; return its entry's id."""

    @abstractmethod
    def submit(self, request: Request | bytes) -> AsyncGenerator[Output, None]:
        """Publish a request and yield its output: chunks, then one Completion.

        A refused request gives a Completion with an error. A caller that stops before the end
        cancels the request.

        Args:
            request: A GenerateRequest, the same as a dict, or its JSON.
        """

    async def submit_once(self, request: Request | bytes) -> AsyncGenerator[Output, None]:
        """Yield the outputs of a request from the first one on, computed once for each request id,
        however often and from wherever it is submitted.

        The request goes on when the caller stops. While its outputs are kept, a request of the same
        id gets them, even if it differs otherwise (docs/durable.md).

        Raises:
            RequestError: invalid_request_id: the request has no id.
        """
        if not (request_id := written_id(request)):
            raise RequestError(
                "a request that is computed once needs a request_id, such as the ids of a workflow "
                "and of its step; give it one, or call submit",
                code="invalid_request_id",
            )
        follow = self.bus.results.follow
        # Of two entries with one id the second is refused.
        for entry_id in (await self.publish(request), ""):
            followed = follow(request_id, entry_id, just_published=bool(entry_id), keep=True)
            async with aclosing(followed) as outputs:
                async for output in outputs:
                    if entry_id and is_duplicate(output):
                        break
                    yield output
                else:
                    return

    async def complete(self, request: Request | bytes) -> Completion:
        """Publish a request and return its terminal message."""
        return await _end_of(self.submit(request))

    async def complete_once(self, request: Request | bytes) -> Completion:
        """Return a request's terminal message, computed once; as `submit_once`."""
        return await _end_of(self.submit_once(request))

    async def fork(
        self,
        request_id: str,
        at: int,
        *,
        sample_index: int = 0,
        like: GenerateRequest = GenerateRequest(),  # noqa: B008  (it is frozen)
    ) -> Completion:
        """Go on after a token of another request; return the terminal message. docs/forks.md.

        Its prompt is the other request's and the first tokens of its sample, whose KV it shares.
        For its chunks, `submit` a request with the field `fork`.

        Args:
            request_id: The other request, running or ended, of the same tenant and model.
            at: Number of leading tokens of its sample; a fork of a running one waits for them.
            sample_index: The sample.
            like: A request with all else: sampling, n, tenant, and so on.
        """
        fork = Fork(request_id=request_id, at=at, sample_index=sample_index)
        return await self.complete(msgspec.structs.replace(like, fork=fork))

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        like: GenerateRequest = GenerateRequest(),  # noqa: B008  (it is frozen)
    ) -> list[ScoredCompletion]:
        """Return the logprobs of completions by the current weights and the reference model.

        Each is a request of its own, and the numbers are those of `InferenceEngine.score`.

        Args:
            prompts: Token ids.
            completions: Token ids, at least one for each prompt.
            sampling_params: One for all, or one for each; only the temperature counts.
            like: A request with the tenant, priority, budget_ns, model and cache_salt to use.

        Raises:
            RequestError: A request failed, and the others are cancelled; or the numbers of prompts
                and completions differ, or a completion is empty.
        """
        prompts, completions = token_ids_to_score(prompts, completions)
        params = params_to_score(sampling_params, prompts)
        requests = [
            _alone(like, (*prompt, *completion), sampling)
            for prompt, completion, sampling in zip(prompts, completions, params, strict=True)
        ]
        answers = await complete_all(self.complete, requests)
        return [
            scored_completion(answer, len(completion))
            for answer, completion in zip(answers, completions, strict=True)
        ]

    async def score_targets(
        self,
        prompts: Sequence[Sequence[int]],
        targets: Sequence[Sequence[Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        like: GenerateRequest = GenerateRequest(),  # noqa: B008  (it is frozen)
    ) -> list[Logprobs]:
        """Return the logprobs of given token ids at the last positions of prompts.

        Each prompt is a request of its own. Arguments and numbers are those of
        `InferenceEngine.score_targets`; `like` as for `score`.

        Raises:
            RequestError: A request failed, and the others are cancelled; or an argument is refused.
        """
        prompts = check_prompts(prompts)
        params = params_of_targets(sampling_params, prompts, targets)
        requests = [
            _alone(like, prompt_of(prompt), own)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        answers = await complete_all(self.complete, requests)
        return [
            target_array(own.prompt_logprob_token_ids or (), each.prompt_token_id_logprobs or b"")
            for own, each in zip(params, answers, strict=True)
        ]

    async def embed(
        self,
        prompts: Sequence[Prompt],
        params: EmbedParams = EmbedParams(),  # noqa: B008  (it is frozen)
        *,
        return_errors: bool = False,
        like: GenerateRequest = GenerateRequest(),  # noqa: B008  (it is frozen)
    ) -> list[EmbeddedPrompt]:
        """Return the vectors of prompts, in order.

        Each is a request of its own, and the numbers are those of `InferenceEngine.embed`.

        Args:
            prompts: Texts, or token ids.
            params: Pooling and dimensions.
            return_errors: Whether a failed request gives a result with `error`, and the others go
                on.
            like: As for `score`.

        Raises:
            RequestError: A request failed without `return_errors`; the others are cancelled.
        """
        requests = [embed_request(prompt, params, like) for prompt in check_prompts(prompts)]
        answers = await complete_all(self.complete, requests, return_errors=return_errors)
        return [embedded_prompt(answer) for answer in answers]

    async def recorded(self, id: str) -> list[Completion]:
        """Return the terminal messages that the bus has under an id.

        Args:
            id: Id of a request, an entry or a trace; or of a call over HTTP, which may have made
                several requests.

        Raises:
            RequestError: `unknown_request`: there is none, or none any more.
            BusError: The bus can't be reached.
        """
        found = await self.bus.results.recorded(id)
        if not found:
            raise unknown(id)
        return found

    async def replay(
        self,
        recorded: Completion,
        *,
        like: GenerateRequest = GenerateRequest(priority=PRIORITY),  # noqa: B008  (it is frozen)
        at: int | None = None,
    ) -> Replay:
        """Compute a finished request again at the present weights, and compare.

        Args:
            recorded: Its terminal message, as `complete` and `recorded` return it.
            like: A request with the tenant, priority and budget_ns to use.
            at: The version that the present weights have in the record; None for their own number.

        Raises:
            RequestError: `not_replayable`: the record lacks what is needed. Or the replay was
                refused or has failed: the code is that of its error.
        """
        if not like.model:
            like = msgspec.structs.replace(like, model=recorded.model)
        return await replay(self.complete, recorded, like, at)

    async def token_tree(self, session: str, *, tenant: str = DEFAULT_TENANT) -> TokenTree:
        """Return the token tree of a session: all that its requests have rendered and sampled.

        Each request is in it by the time that its terminal message is read. docs/token-tree.md.

        Args:
            session: The id that its requests have in `session`.
            tenant: The tenant of its requests.

        Raises:
            RequestError: `unknown_session`: no turn of it was kept, or it was deleted or expired.
            BusError: The bus can't be reached.
        """
        from .token_tree import read_tree

        return await read_tree(self.bus.store.trees, tenant, session)

    async def delete_session(self, session: str, *, tenant: str = DEFAULT_TENANT) -> bool:
        """Delete the token tree of a session; return whether there was one.

        Raises BusError: The bus can't be reached.
        """
        return await self.bus.store.trees.drop(tenant, session)


async def _end_of(outputs: AsyncGenerator[Output, None]) -> Completion:
    async with aclosing(outputs):
        async for output in outputs:
            if isinstance(output, Completion):
                return output
    raise AssertionError("the output ended without a terminal message")


def is_duplicate(output: Output) -> bool:
    """Return whether an output refuses an entry because another one has its request's id."""
    error = output.error if isinstance(output, Completion) else None
    return error is not None and error.code == "duplicate_request"
