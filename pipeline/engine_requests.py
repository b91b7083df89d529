"""Requests of `InferenceEngine`: what callers pass, what admission takes, and the samples."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec

from ..bus.public import Completion, CompletionSample, EmbedParams, GenerateRequest
from ..config import RequestError, SamplingParams, shown
from .prompts import ArgumentError, prompt_of, token_ids_of, whole_number
from .rollouts import Prompt, RequestId, TrainingSample

Params = TypeVar("Params", SamplingParams, EmbedParams)

Finished = tuple[TrainingSample, SamplingParams]
"""A sample and the parameters of its request."""


class Unfinished(NamedTuple):
    """An unfinished request; its samples carry `request_id`."""

    prompt: tuple[int, ...]
    params: SamplingParams
    request_id: RequestId | None


class UnfinishedRequests:
    """Unfinished requests by the engine's own names, and the names by the callers' ids.

    Names count up, and seeds are made of names: callers' ids have no influence on sampling.
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
        """Return a name that is not in use as an id, so that it can serve as one."""
        self._last += 1
        while (name := f"engine-{self._last}") in self._names:
            self._last += 1
        return name

    def name_of(self, request_id: RequestId) -> str | None:
        """Return the name of an unfinished request."""
        return self._names.get(request_id)

    def check_id(self, request_id: RequestId) -> None:
        """Raise RequestError for an id of another type, or of an unfinished request."""
        # bool is a subclass of int.
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
        """Add an admitted request."""
        self._by_name[name] = request
        if request.request_id is not None:
            self._names[request.request_id] = name

    def pop(self, name: str) -> Unfinished:
        """Remove a finished request; its id is free again."""
        request = self._by_name.pop(name)
        if request.request_id is not None:
            del self._names[request.request_id]
        return request


def make_request(
    prompt: Prompt,
    params: SamplingParams | None = None,
    num_samples: int = 1,
    *,
    embed: EmbedParams | None = None,
    adapter: str = "",
    prediction: Prompt | None = None,
) -> GenerateRequest:
    """Return the request for samples of a prompt, or with `embed` for its vector.

    Raises:
        RequestError: An argument is of the wrong type.
    """
    prompt = prompt_of(prompt)
    if not isinstance(adapter, str):
        raise ArgumentError(
            f"adapter is {shown(adapter)}; it must be the id of a loaded adapter, or ''",
            code="unknown_model",
        )
    try:
        sampling = _checked(params or SamplingParams(), SamplingParams)
        embed = None if embed is None else _checked(embed, EmbedParams)
    except (msgspec.ValidationError, TypeError) as error:
        name = "sampling_params" if embed is None else "parameters"
        raise RequestError(f"bad {name}: {error}") from None
    if prediction is not None and not isinstance(prediction, str):
        rule, code = "a prediction is text or token ids", "invalid_prediction"
        prediction = token_ids_of(prediction, rule, code, code)
    return GenerateRequest(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if isinstance(prompt, str) else prompt,
        sampling=sampling,
        n=whole_number(num_samples, "the number of samples", "invalid_n"),
        stream=False,
        model=adapter,
        embed=embed,
        prediction=prediction,
    )


def _checked(params: Params, kind: type[Params]) -> Params:
    """Check the types of fields, which a struct's constructor does not."""
    # Without builtin_types bytes would become base64 text.
    plain = msgspec.to_builtins(params, builtin_types=(bytes, bytearray, memoryview))
    return msgspec.convert(plain, kind)


def make_sample(
    request: Unfinished, completion: Completion, sample: CompletionSample
) -> TrainingSample:
    """Return one sample of a finished request."""
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
        adapter_version=sample.adapter_version,
        embedding=sample.embedding,
        num_draft_tokens=sample.num_draft_tokens,
        num_accepted_draft_tokens=sample.num_accepted_draft_tokens,
    )
