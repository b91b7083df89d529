"""The requests of an engine that have not ended, under two names each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from ..bus.public import Completion, CompletionSample, EmbedParams, GenerateRequest
from ..config import RequestError, SamplingParams, WeightsError
from ..config.quoting import shown
from .prompts import ArgumentError, prompt_of, token_ids_of, whole_number
from .rollouts import Prompt, RequestId, TrainingSample

if TYPE_CHECKING:
    from torch import Tensor

Params = TypeVar("Params", SamplingParams, EmbedParams)

Finished = tuple[TrainingSample, SamplingParams]
"""A sample, and how it was asked for."""


class Wanted(NamedTuple):
    """What a caller asks for: samples of a prompt, or with `embed` its vector."""

    prompt: Prompt
    params: SamplingParams | None
    num_samples: int = 1
    embed: EmbedParams | None = None
    adapter: str = ""
    prediction: Prompt | None = None


class Scorer(Protocol):
    """What a reference model is to an engine; its `score` says the rest."""

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        sampling_params: Sequence[SamplingParams],
    ) -> list[tuple[float, ...]]: ...


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


def make_request(name: str, wanted: Wanted) -> GenerateRequest:
    """What admission is given.

    Raises:
        RequestError: The prompt is none, or a parameter is of the wrong type.
    """
    prompt = prompt_of(wanted.prompt)
    if not isinstance(wanted.adapter, str):
        raise ArgumentError(
            f"adapter is {shown(wanted.adapter)}; it must be the id of a loaded adapter, or ''",
            code="unknown_model",
        )
    try:
        # A struct built with values of the wrong type is only found out here.
        params = _checked(wanted.params or SamplingParams(), SamplingParams)
        embed = None if wanted.embed is None else _checked(wanted.embed, EmbedParams)
    except (msgspec.ValidationError, TypeError) as error:
        what = "sampling_params" if wanted.embed is None else "parameters"
        raise RequestError(f"bad {what}: {error}") from None
    prediction = wanted.prediction
    if prediction is not None and not isinstance(prediction, str):
        rule, code = "a prediction is text or token ids", "invalid_prediction"
        prediction = token_ids_of(prediction, rule, code, code)
    return GenerateRequest(
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if isinstance(prompt, str) else prompt,
        sampling=params,
        n=whole_number(wanted.num_samples, "the number of samples", "invalid_n"),
        stream=False,
        request_id=name,
        model=wanted.adapter,
        embed=embed,
        prediction=prediction,
    )


def _checked(params: Params, kind: type[Params]) -> Params:
    # Else bytes would become text, in base64.
    plain = msgspec.to_builtins(params, builtin_types=(bytes, bytearray, memoryview))
    return msgspec.convert(plain, kind)


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
        adapter_version=sample.adapter_version,
        embedding=sample.embedding,
        num_draft_tokens=sample.num_draft_tokens,
        num_accepted_draft_tokens=sample.num_accepted_draft_tokens,
    )


def vectors(finished: Sequence[Finished]) -> Tensor:
    """The vectors of prompts, `[prompts, dimensions]` float32."""
    import torch

    if not finished:
        return torch.empty(0, 0)
    return torch.tensor([sample.embedding for sample, _ in finished], dtype=torch.float32)


def compare(reference: Scorer | None, finished: list[Finished]) -> list[TrainingSample]:
    """Adds what the reference model says of samples, if there is one."""
    begun = [pair for pair in finished if pair[0].completion_tokens]
    if reference is None or not begun:
        return [sample for sample, _ in finished]
    scores = reference.score(
        [sample.prompt_tokens for sample, _ in begun],
        [sample.completion_tokens for sample, _ in begun],
        [params for _, params in begun],
    )
    scores_by_id = {id(sample): score for (sample, _), score in zip(begun, scores, strict=True)}
    return [
        replace(sample, ref_logprobs=scores_by_id.get(id(sample), ())) for sample, _ in finished
    ]


def memory_released(lacks: Sequence[str]) -> WeightsError:
    """What an engine says that has no memory to run in. `lacks`: what was released."""
    return WeightsError(
        f"nothing can be generated: memory was released ({', '.join(lacks)}); "
        "call resume_memory, and after the weights were released update_weights with all of "
        "them",
        code="memory_released",
    )
