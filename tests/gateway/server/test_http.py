"""Errors have one form and stable codes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from nano_inference.config import (
    BusError,
    ModelError,
    NanoInferenceError,
    RequestError,
    WeightsError,
)
from nano_inference.gateway.server.http import status_of

from ..errors import error_of
from ..fake import Client, refused


async def test_too_large_a_body_is_refused(http: Client) -> None:
    answer = await http.post("/generate", json={"text": "a" * 5000})
    assert error_of(answer, 413) == "request_too_large"
    assert not http.engine.requests


async def test_a_chunked_body_is_read_up_to_the_limit(http: Client) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield b" " * 1000

    answer = await http.post("/generate", content=endless())
    assert error_of(answer, 413) == "request_too_large"
    assert sent <= 6000


async def test_unknown_paths_and_methods(http: Client) -> None:
    assert error_of(await http.get("/nowhere"), 404) == "not_found"
    assert error_of(await http.get("/generate"), 405) == "method_not_allowed"


async def test_a_defect_is_answered_with_500(http: Client) -> None:
    http.engine.failures["flush_cache"] = ZeroDivisionError()  # type: ignore[assignment]
    assert error_of(await http.get("/flush_cache"), 500) == "internal_error"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("r"), 400),
        (RequestError("r", code="overloaded"), 429),
        (RequestError("r", code="lane_failed"), 500),
        (RequestError("r", code="expired"), 504),
        (WeightsError("w"), 400),
        (WeightsError("w", code="weights_interrupted"), 503),
        (BusError("b"), 503),
        (ModelError("m"), 500),
        (NanoInferenceError("n"), 500),
    ],
)
def test_statuses(error: NanoInferenceError, status: int) -> None:
    assert status_of(error) == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("told_s", "shown"), [(2.4, "2"), (0.2, "1"), (None, "1")])
async def test_retry_after_of_overload(
    http: Client, told_s: float | None, shown: str, stream: bool
) -> None:
    http.engine.outputs = refused("overloaded", retry_after_s=told_s)
    answer = await http.post("/generate", json={"text": "a", "stream": stream})
    assert error_of(answer, 429) == "overloaded"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == shown
