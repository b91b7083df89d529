"""What admission measures of requests: constraints, and experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...bus.channel import RequestEntry
from ...bus.public import GenerateRequest
from ...config import Constraint
from ...telemetry import instruments, names, now_ns
from ...text.grammar import kind_of
from ..actor import Actor


def count_constraint(stage: Actor, entry: RequestEntry, error: str = "") -> None:
    """An entry is let in, or refused for its constraint with a code; one without is not counted."""
    request = entry.request
    if isinstance(request, GenerateRequest) and request.sampling.constraint is not None:
        kind = kind_of(request.sampling.constraint)
        labels = {names.CONSTRAINT: kind, names.ERROR_TYPE: error}
        stage.metrics.record(instruments.CONSTRAINTS, 1, labels)


def count_moe(stage: Actor, model: str, number: int) -> None:
    """So many requests of a model with experts are let in."""
    stage.metrics.record(instruments.MOE_REQUESTS, number, {names.REQUEST_MODEL: model})


@contextmanager
def compiling(stage: Actor, constraint: Constraint) -> Iterator[None]:
    """A constraint is compiled within; any thread may do it."""
    start_ns = now_ns()
    try:
        yield
    finally:
        labels = {names.CONSTRAINT: kind_of(constraint)}
        stage.metrics.record(instruments.CONSTRAINT_COMPILE, (now_ns() - start_ns) / 1e9, labels)
