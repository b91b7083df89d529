"""`/encode` answers as SGLang does."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.public import EmbedParams, GenerateRequest, Output, Usage

from ...fake import Client, FakeEngine, completion, sample


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(embedded)


def embedded(request: GenerateRequest) -> list[Output]:
    size = float(len(request.prompt_token_ids or request.prompt or ()))
    vector = sample((), text="", logprobs=(), finish_reason="stop", embedding=(size, 0.5))
    return [completion(request, vector, usage=Usage(prompt_tokens=3))]


@pytest.mark.parametrize(
    ("body", "vectors"),
    [
        ({"text": "abc"}, [3, 0.5]),
        ({"text": ["abc", "de"]}, [[3, 0.5], [2, 0.5]]),
        ({"input_ids": [1, 2]}, [2, 0.5]),
        ({"input_ids": [[1, 2], [3]]}, [[2, 0.5], [1, 0.5]]),
    ],
)
async def test_a_text_has_an_object_and_a_list_has_a_list(
    body: dict[str, Any], vectors: list[Any], http: Client
) -> None:
    answer = await http.post(
        "/encode", json=body | {"rid": "mine", "dimensions": 2, "priority": -3}
    )
    found = answer.json()
    several = isinstance(found, list)
    told = found if several else [found]
    assert [each["embedding"] for each in told] == (vectors if several else [vectors])
    assert [each["meta_info"]["id"] for each in told] == [
        request.request_id for request in http.engine.requests
    ]
    assert http.engine.requests[0].embed == EmbedParams(dimensions=2)
    assert (http.engine.requests[0].priority, told[0]["meta_info"]["prompt_tokens"]) == (-3, 3)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_prompt"),
        ({"text": "a", "input_ids": [1]}, "invalid_prompt"),
        ({"text": []}, "empty_prompt"),
        ({"input_ids": []}, "empty_prompt"),
        ({"input_ids": [[1], 2]}, "invalid_request"),
        ({"text": "a", "image_data": "b"}, "unsupported"),
        ({"text": "a", "dimensions": "x"}, "invalid_request"),
    ],
)
async def test_a_bad_call_is_refused(body: dict[str, Any], code: str, http: Client) -> None:
    answer = await http.post("/encode", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert not http.engine.requests
