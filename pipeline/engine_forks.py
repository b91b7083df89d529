"""Requests of an engine that go on from a token of another one, or begin anew."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..bus.public import GenerateRequest
from ..bus.recovery import RecoveredSample
from ..config import SamplingParams
from ..stages.admission.core import AdmissionCore
from ..stages.batching import BatchingCore
from ..stages.streaming.core import StreamingCore
from ..stages.streaming.deliveries import Deliveries
from .engine_calls import one_at_a_time
from .engine_requests import Finished, UnfinishedRequests
from .rollouts import RequestId, TrainingSample


@one_at_a_time
class EngineForks(ABC):
    """The call of an engine that forks, and its retracted samples."""

    _admission: AdmissionCore
    _batching: BatchingCore
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
        from .forks import forked_request

        if request_id is not None:
            self._requests.check_id(request_id)
        about = parent, at, sample_index, adapter
        request = forked_request(
            self._requests, self._streaming, about, sampling_params, num_samples
        )
        name = self._requests.new_name()
        request_id = name if request_id is None else request_id
        self._uncollected += self._queue(name, request_id, request)
        return request_id

    def _begin_anew(self, deliveries: Deliveries) -> None:
        """Queue retracted samples again."""
        for key, indices in deliveries.retracted.items():
            admitted = self._requests[key].accepted.admitted
            samples = [
                RecoveredSample(spec.sample_index, (), spec.sample_index not in indices)
                for spec in admitted.sequences
            ]
            self._batching.add(self._admission.resumed(admitted, samples))
