"""How often each model was called, and how long it took: what ModelStatistics tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...config import NanoInferenceError
from ...telemetry import now_ns


class Durations:
    """How often something happened, and how long it took altogether."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        """It took so long once more."""
        self.count += 1
        self.ns += max(0, ns)


class ModelStatistics:
    """Of one model, since the gateway has begun.

    Attributes:
        success: Calls that ended well, from their arrival to their end.
        fail: Calls that did not.
        queue: Of those that ended well, the time before their first token was begun.
        compute: The time after that.
        last_ns: When the last one arrived, since the Unix epoch; 0 before the first.
    """

    __slots__ = ("compute", "fail", "last_ns", "queue", "success")

    def __init__(self) -> None:
        self.success = Durations()
        self.fail = Durations()
        self.queue = Durations()
        self.compute = Durations()
        self.last_ns = 0


class Statistics:
    """Of all models of a gateway."""

    def __init__(self) -> None:
        self._models: dict[str, ModelStatistics] = {}

    def model(self, name: str) -> ModelStatistics:
        """A model's."""
        return self._models.setdefault(name, ModelStatistics())

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Counts a call of a model."""
        found, begun_ns = self.model(name), now_ns()
        found.last_ns = begun_ns
        try:
            yield
        except NanoInferenceError:
            found.fail.add(now_ns() - begun_ns)
            raise
        found.success.add(now_ns() - begun_ns)
