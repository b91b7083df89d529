"""Forks: requests that go on from a token of another request."""

from __future__ import annotations

from typing import ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.entries import RequestEntry
from ....bus.messages import Prompt
from ....bus.parts.forks import ForkedAt
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest
from ....config import RequestError, SamplingParams, shown
from . import Part


class Forks(Part):
    """Checks forks before their prompt is known, and sends where they began to streaming."""

    fields: ClassVar = ("fork",)

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        """Raises RequestError: invalid_fork."""
        fork, wrong = request.fork, ""
        assert fork is not None
        prompts = ("prompt", "prompt_token_ids", "messages", "images")
        given = [name for name in prompts if getattr(request, name) not in (None, ())]
        if given:
            wrong = (
                f"its prompt and images are the other request's; leave out {' and '.join(given)}"
            )
        elif not fork.request_id or fork.request_id == request.request_id:
            wrong = "request_id must be that of another request"
        elif fork.at < 0:
            wrong = f"at is {shown(fork.at)}; it must be 0 or more"
        elif fork.sample_index < 0:
            wrong = f"sample_index is {shown(fork.sample_index)}; it must be 0 or more"
        if wrong:
            raise invalid_fork(wrong)

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> ForkedAt | None:
        return None if entry.origin is None else ForkedAt(entry.origin)


def invalid_fork(wrong: str) -> RequestError:
    """Return the refusal of a fork."""
    return RequestError(f"fork can't be used: {wrong}", code="invalid_fork")
