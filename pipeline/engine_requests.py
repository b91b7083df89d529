"""The requests of an engine that have not ended, under two names each."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..bus.public import Completion, CompletionSample, GenerateRequest
from ..config import RequestError, SamplingParams
from ..config.quoting import shown
from .rollouts import Prompt, RequestId, TrainingSample


class Unfinished(NamedTuple):
    """A request that waits or is under way; `request_id` is what its samples carry."""

    prompt: tuple[int, ...]
    params: SamplingParams
    request_id: RequestId | None


class UnfinishedRequests:
    """Knows them by the engine's own names, which count up, and by the ids that callers know.

    Seeds are made of names, so which ids a caller chooses has no influence on them.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Unfinished] = {}
        self._names: dict[RequestId, str] = {}
        self._last = 0

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def new_name(self) -> str:
        """A name that is nobody's id, so that it can serve as one, too."""
        self._last += 1
        while (name := f"engine-{self._last}") in self._names:
            self._last += 1
        return name

    def name_of(self, request_id: RequestId) -> str | None:
        """The name of an unfinished request."""
        return self._names.get(request_id)

    def check_id(self, request_id: RequestId) -> None:
        """Whether a request may have this id.

        Raises:
            RequestError: It is no text and no integer, or an unfinished request has it.
        """
        # Python takes True for 1.
        if isinstance(request_id, bool) or not isinstance(request_id, str | int):
            raise RequestError(
                f"a request_id is text or an integer, not {type(request_id).__name__}",
                code="invalid_request_id",
            )
        if request_id in self._names:
            raise RequestError(
                f"request {shown(request_id)} is not finished; choose another request_id, or none",
                code="duplicate_request",
            )

    def add(self, name: str, request: Unfinished) -> None:
        """A request has been let in."""
        self._by_name[name] = request
        if request.request_id is not None:
            self._names[request.request_id] = name

    def pop(self, name: str) -> Unfinished:
        """A request has ended; its id is free again."""
        request = self._by_name.pop(name)
        if request.request_id is not None:
            del self._names[request.request_id]
        return request


def make_request(
    name: str, prompt: Prompt, params: SamplingParams | None, num_samples: int
) -> GenerateRequest:
    """What admission is given.

    Raises:
        RequestError: A parameter is of the wrong type.
    """
    try:
        # A struct built with values of the wrong type is only found out here.
        params = msgspec.convert(msgspec.to_builtins(params or SamplingParams()), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"bad sampling_params: {error}") from None
    return GenerateRequest(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if isinstance(prompt, str) else tuple(map(int, prompt)),
        sampling=params,
        n=num_samples,
        stream=False,
        request_id=name,
    )


def make_sample(
    request: Unfinished, completion: Completion, sample: CompletionSample
) -> TrainingSample:
    """One of a request's samples, as trainers get it."""
    return TrainingSample(
        prompt_tokens=request.prompt,
        completion_tokens=sample.token_ids,
        logprobs=sample.logprobs,
        ref_logprobs=None,
        weight_version=sample.weight_version,
        finish_reason=sample.finish_reason,
        weight_versions=sample.weight_versions,
        top_logprobs=sample.top_logprobs,
        prompt_logprobs=completion.prompt_logprobs,
        prompt_top_logprobs=completion.prompt_top_logprobs,
        request_id=request.request_id,
    )
