"""The request of a fork of an engine's request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..bus.public import GenerateRequest, ImageInput
from ..bus.recovery import RecoveryItem
from ..config import SamplingParams, shown
from ..stages.streaming.core import StreamingCore
from .engine_requests import ArgumentError, UnfinishedRequests, make_request, whole_number
from .rollouts import RequestId, TrainingSample


class _Parent(NamedTuple):
    """Prompt and sampled tokens so far, adapter, and ids of the images of a parent."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    adapter: str
    images: Sequence[str]


def forked_request(
    requests: UnfinishedRequests,
    streaming: StreamingCore,
    about: tuple[RequestId | TrainingSample, int, int, str | None],
    sampling_params: SamplingParams | None,
    num_samples: int,
) -> GenerateRequest:
    """Return the request of a fork.

    Args:
        requests, streaming: The engine's.
        about: `parent`, `at`, `sample_index` and `adapter` of `InferenceEngine.fork`, with its
            other arguments and its errors.
    """
    given, at, sample_index, adapter = about
    at = whole_number(at, "at", "invalid_fork")
    if isinstance(given, TrainingSample):
        recipe = given.recipe
        own = ("", ()) if recipe is None else (recipe.adapter, recipe.images)
        parent = _Parent(given.prompt_tokens, given.completion_tokens, *own)
    else:
        parent = _unfinished(requests, streaming, given, sample_index)
    if not 0 <= at <= len(parent.token_ids):
        raise ArgumentError(
            f"fork can't be used: at is {shown(at)}, and the sample has {len(parent.token_ids)} "
            "tokens so far; choose a position up to there",
            code="invalid_fork",
        )
    request = make_request(
        (*parent.prompt, *parent.token_ids[:at]),
        sampling_params,
        num_samples,
        adapter=parent.adapter if adapter is None else adapter,
    )
    return replace(request, images=tuple(ImageInput(id=id) for id in parent.images))


def _unfinished(
    requests: UnfinishedRequests, streaming: StreamingCore, id: RequestId, sample_index: int
) -> _Parent:
    name = requests.name_of(id)
    if name is None:
        raise ArgumentError(
            f"no unfinished request has the id {shown(id)}; fork its sample instead",
            code="unknown_request",
        )
    admitted = requests[name].accepted.admitted
    if not 0 <= sample_index < len(admitted.sequences):
        raise ArgumentError(
            f"fork can't be used: sample_index is {shown(sample_index)}, and the request has "
            f"{len(admitted.sequences)} samples; choose one below that",
            code="invalid_fork",
        )
    samples = streaming.recovered(RecoveryItem(name, name, name)).samples
    tokens = {sample.sample_index: sample.token_ids for sample in samples}
    about = admitted.prompt.token_ids, tokens.get(sample_index, ()), admitted.info.adapter
    return _Parent(*about, admitted.prompt.media)
