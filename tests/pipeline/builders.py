"""Shared parts of the tests: requests, ends of streams, expected errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from nano_inference import Completion, InferenceEngine, TrainingSample
from nano_inference.bus.public import Output


def refused(kind: type[Exception], code: str, match: str | None = None) -> Any:
    """As `pytest.raises`, for an error with this code."""
    return pytest.raises(kind, match=match, check=lambda error: error.code == code)  # type: ignore[attr-defined]


def error_code(completion: Completion) -> str:
    """Return the code of a completion's error, which it must have."""
    assert completion.error is not None
    return completion.error.code


async def end_of(outputs: AsyncIterator[Output]) -> Completion:
    """Read a stream to its end and return its terminal message."""
    *_, last = [output async for output in outputs]
    assert isinstance(last, Completion)
    return last


def finish(engine: InferenceEngine) -> list[TrainingSample]:
    """Step an engine until nothing is pending, and return all samples."""
    samples: list[TrainingSample] = []
    while engine.has_pending():
        samples += engine.step()
    return samples
