"""The response cache: cached responses are delivered, and new ones returned to be kept."""

from __future__ import annotations

from ....bus.control import Cancel
from ....bus.messages import StoredResponse, StoredSample
from ....bus.parts.responses import ResponseCaching
from ..deliveries import Deliveries, Ending
from ..samples import RequestState, Sample
from . import Part

SERVED_TOKENS = 16
"""Tokens in a chunk of a cached response: clients limit the length of a line of a stream."""


class Responses(Part):
    """Delivers cached responses, and returns responses for the cache."""

    def opened(self, request: RequestState, deliveries: Deliveries) -> None:
        """Deliver a response from the cache, as a step's tokens are delivered."""
        caching = ResponseCaching.find(request.info.parts)
        if caching is None or (response := caching.response) is None:
            return
        info = request.info
        request.first_token_ns = request.last_token_ns = deliveries.now_ns
        request.first_step_end_ns = info.admitted_ns
        request.cached_tokens = info.n * len(info.prompt_token_ids)
        for index, stored in enumerate(response.samples):
            sample = request.add(index)
            sample.set_adapter(response.adapter_version)
            sample.columns = {name: [*values] for name, values in stored.columns}
            for first in range(0, len(stored.token_ids), SERVED_TOKENS):
                text = _repeat(sample, stored, first, response.weight_version)
                if info.stream:
                    deliveries.add(info.request_id, sample.chunk(first, text))

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        if request is None or (caching := ResponseCaching.find(request.info.parts)) is None:
            return
        if caching.response is not None:
            tokens = sum(len(sample.token_ids) for sample in request.samples.values())
            ending.usage["cached_completion_tokens"] = tokens
        elif caching.generation:
            ending.response = _stored(request, caching.generation)


def _repeat(sample: Sample, stored: StoredSample, start: int, weight_version: int) -> str:
    """Add `SERVED_TOKENS` tokens of a stored sample; return their text."""
    last, text = len(stored.token_ids) - 1, ""
    for place in range(start, min(start + SERVED_TOKENS, last + 1)):
        text += sample.advance(
            stored.token_ids[place],
            stored.logprobs[place],
            stored.finish_reason if place == last else "",
            weight_version,
            stored.top_logprobs[place] if stored.top_logprobs else (),
        )
    return text


def _stored(request: RequestState, generation: int) -> StoredResponse | None:
    """Return the response for the cache; None if a part of it can't be kept.

    A request that was cut short has an aborted sample, or one that has not begun.
    """
    samples = [sample for _, sample in sorted(request.samples.items())]
    stored = [each for each in map(_stored_sample, samples) if each is not None]
    versions = {(sample.weight_version, sample.adapter_version) for sample in samples}
    if request.restored or len(versions) != 1 or len(stored) != request.info.n:
        return None
    return StoredResponse(tuple(stored), *versions.pop(), generation)


def _stored_sample(sample: Sample) -> StoredSample | None:
    """Return a finished sample for the cache; None if it was cut short, or several versions of
    weights or adapter made it."""
    reason = sample.finish_reason
    changed = (
        len(sample.weight_versions) > 1 or sample.adapter_version != sample.first_adapter_version
    )
    if changed or reason is None or reason == "abort" or reason == "content_filter":
        return None
    tops = tuple(tuple((top.token_id, top.logprob) for top in at) for at in sample.top_logprobs)
    tokens = tuple(sample.token_ids), tuple(sample.logprobs)
    columns = tuple(sample.columns_of(0).items())
    return StoredSample(*tokens, tops, "" if sample.ended_by_text else reason, columns)
