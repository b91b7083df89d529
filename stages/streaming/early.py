"""Steps that arrive before the RequestOpened of their request."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from ...bus.entries import entry_key
from ...bus.steps import StartedSequence
from .step import Step


@dataclass(slots=True)
class _EarlyRequest:
    """A request that has begun and is not open yet.

    Attributes:
        seq_ids: Its sequences so far.
        steps: Its shares of their steps.
    """

    request_id: str
    seq_ids: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)


class EarlySteps:
    """Shares of steps by request, until the request is opened or the epoch ends."""

    def __init__(self) -> None:
        self._requests: dict[str, _EarlyRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: str) -> bool:
        return key in self._requests

    def hold(
        self, step: Step, is_open: Callable[[StartedSequence], bool], ended: Container[str]
    ) -> None:
        """Keep a step's share of each request that is not open and not in `ended`.

        A sequence of an unknown request that has generated already was preempted, unless another
        replica has handed it over: its request has ended, or its steps are kept already.
        """
        for started in step.started:
            key = entry_key(started.entry_id, started.request_id)
            if is_open(started) or key in ended:
                continue
            if not started.num_generated or started.handed_over:
                self._requests.setdefault(key, _EarlyRequest(started.request_id))
            if (early := self._requests.get(key)) is not None:
                early.seq_ids.add(started.seq_id)
        for early in self._requests.values():
            if step.concerns(early.seq_ids) or step.ends(early.request_id):
                early.steps.append(step.share(early.seq_ids, early.request_id))

    def pop(self, key: str) -> list[Step]:
        """Return the steps of a request, and drop it."""
        early = self._requests.pop(key, None)
        return early.steps if early is not None else []

    def clear(self) -> None:
        """Drop all steps."""
        self._requests.clear()
