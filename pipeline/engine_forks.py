"""Forks of an engine's requests: requests that go on from a token of another one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from msgspec.structs import replace

from ..bus.public import GenerateRequest, ImageInput
from ..bus.recovery import RecoveryItem
from ..config import SamplingParams, shown
from ..stages.streaming.core import StreamingCore
from .engine_calls import one_at_a_time
from .engine_requests import ArgumentError, Finished, UnfinishedRequests, make_request, whole_number
from .rollouts import RequestId, TrainingSample


@one_at_a_time
class EngineForks(ABC):
    """The call of an engine that forks."""

    _requests: UnfinishedRequests
    _streaming: StreamingCore
    _uncollected: list[Finished]

    @abstractmethod
    def _queue(self, name: str, id: RequestId | None, request: GenerateRequest) -> list[Finished]:
        """Queue a request, or return its samples from the response cache."""

    def fork(
        self,
        parent: RequestId | TrainingSample,
        at: int,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
        *,
        sample_index: int = 0,
        request_id: RequestId | None = None,
        adapter: str | None = None,
    ) -> RequestId:
        """Queue a request that goes on after a token of another one; return its id. docs/forks.md.

        Its prompt is the other request's and the first tokens of its sample, whose KV it shares.

        Args:
            parent: The id of an unfinished request, or a finished sample.
            at: Number of leading tokens of the sample, at most as many as it has by now.
            sampling_params, num_samples, request_id: As in `add_request`.
            sample_index: The sample of an unfinished request.
            adapter: As in `generate`; None for the parent's.

        Raises:
            RequestError: `unknown_request`: no unfinished request has this id. `invalid_fork`: the
                sample has fewer tokens. Or the request is refused.
        """
        if request_id is not None:
            self._requests.check_id(request_id)
        at = whole_number(at, "at", "invalid_fork")
        if isinstance(parent, TrainingSample):
            prompt, token_ids = parent.prompt_tokens, parent.completion_tokens
            recipe = parent.recipe
            own, images = ("", ()) if recipe is None else (recipe.adapter, recipe.images)
        else:
            prompt, token_ids, own, images = self._unfinished(parent, sample_index)
        if not 0 <= at <= len(token_ids):
            raise ArgumentError(
                f"fork can't be used: at is {shown(at)}, and the sample has {len(token_ids)} "
                "tokens so far",
                code="invalid_fork",
            )
        adapter = own if adapter is None else adapter
        path = (*prompt, *token_ids[:at])
        request = make_request(path, sampling_params, num_samples, adapter=adapter)
        request = replace(request, images=tuple(ImageInput(id=id) for id in images))
        name = self._requests.new_name()
        request_id = name if request_id is None else request_id
        self._uncollected += self._queue(name, request_id, request)
        return request_id

    def _unfinished(
        self, parent: RequestId, sample_index: int
    ) -> tuple[Sequence[int], Sequence[int], str, Sequence[str]]:
        """Return prompt, sampled tokens, adapter and image ids of an unfinished request."""
        name = self._requests.name_of(parent)
        if name is None:
            raise ArgumentError(
                f"no unfinished request has the id {shown(parent)}; fork its sample instead",
                code="unknown_request",
            )
        admitted = self._requests[name].accepted.admitted
        if not 0 <= sample_index < len(admitted.sequences):
            raise ArgumentError(
                f"fork can't be used: sample_index is {shown(sample_index)}, and the request has "
                f"{len(admitted.sequences)} samples",
                code="invalid_fork",
            )
        samples = self._streaming.recovered(RecoveryItem(name, name, name)).samples
        tokens = {sample.sample_index: sample.token_ids for sample in samples}
        found = tokens.get(sample_index, ())
        return admitted.prompt.token_ids, found, admitted.info.adapter, admitted.prompt.media
