"""Accounts of time: instants before admission took a request."""

from __future__ import annotations

from ....bus.entries import RequestEntry
from ....bus.messages import Prompt
from ....bus.parts.accounts import RequestTimes
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest
from ....config import SamplingParams
from . import Part


class Accounts(Part):
    """Sends the time in the queue to streaming."""

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> RequestTimes | None:
        if entry.queued_ns or entry.waited_ns:
            return RequestTimes(entry.queued_ns, entry.waited_ns)
        return None
