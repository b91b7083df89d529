"""OpenAI's `prediction`, what usage says of drafts, and chunks that have several tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncOpenAI

from nano_inference.bus.public import Completion, GenerateRequest, Output

from ...fake import Client, FakeEngine
from ...made import chunk, interleaved, whole
from .streamed import Recorded, stream_of

HELLO: Any = [{"role": "user", "content": "hello"}]
PARTS: Any = [{"type": "text", "text": "five "}, {"type": "text", "text": "six"}]


def drafted(request: GenerateRequest) -> list[Output]:
    """Return `interleaved`'s outputs, by an engine that has verified drafts."""
    *chunks, end = interleaved(request)
    assert isinstance(end, Completion)
    usage = msgspec.structs.replace(
        end.usage, accepted_prediction_tokens=5, rejected_prediction_tokens=2
    )
    return [*chunks, msgspec.structs.replace(end, usage=usage)]


def together(request: GenerateRequest) -> list[Output]:
    """Return `interleaved`'s outputs, with the first two tokens of each sample in one chunk."""
    chunks = [
        chunk(request, index, place, number)
        for place, number in ((0, 2), (2, 1))
        for index in reversed(range(request.n))
    ]
    return [*chunks, *whole(request)]


@pytest.mark.parametrize("content", ["five six", PARTS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_reaches_the_engine_and_its_usage_the_client(
    client: AsyncOpenAI, engine: FakeEngine, content: Any, stream: bool
) -> None:
    engine.outputs = drafted
    prediction = {"type": "content", "content": content}
    asked: Any = {"model": "tiny", "messages": HELLO, "prediction": prediction}
    usage: Any = None
    if stream:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(**asked, **options):
            usage = chunk.usage or usage
    else:
        usage = (await client.chat.completions.create(**asked)).usage
    assert engine.requests[0].prediction == "five six"
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (5, 2)
    assert usage.completion_tokens == 3, "rejected tokens are none of them"


@pytest.mark.parametrize(
    ("text", "outputs", "counts"),
    [
        (None, whole, None),
        (None, drafted, (5, 2)),
        ("", whole, None),
        ("", drafted, (5, 2)),
        # With a prediction that was not used.
        ("a", whole, (0, 0)),
    ],
)
async def test_usage_counts_drafts_and_predictions(
    http: Client, text: str | None, outputs: Any, counts: tuple[int, int] | None
) -> None:
    http.engine.outputs = outputs
    prediction = None if text is None else {"type": "content", "content": text}
    body = {"messages": HELLO, "prediction": prediction}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    details = answer["usage"].get("completion_tokens_details", {})
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    assert details == ({} if counts is None else dict(zip(names, counts, strict=True)))
    assert http.engine.requests[0].prediction == (text or None)


@pytest.mark.parametrize(
    ("prediction", "where"),
    [
        ("five", "prediction"),
        (["five"], "prediction"),
        ({"type": "content"}, "prediction"),
        ({"content": "five"}, "prediction"),
        ({"type": "text", "content": "five"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["five"]}, "prediction.content"),
        (
            {"type": "content", "content": [{"type": "image_url", "text": "a"}]},
            "prediction.content",
        ),
    ],
)
async def test_wrong_shapes_are_refused_by_their_place(
    client: AsyncOpenAI, engine: FakeEngine, prediction: Any, where: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model="tiny", messages=HELLO, prediction=prediction)
    assert raised.value.code == "invalid_request"
    assert (raised.value.param or "").startswith(where)
    assert not engine.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "98 +", "n": 2, "logprobs": 2, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "98 +", "n": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "n": 2}),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"logprobs": 2, "max_tokens": 3}},
        ),
    ],
)
async def test_a_stream_is_the_same_however_many_tokens_a_chunk_has(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    found = []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for outputs in (interleaved, together):
        http.engine.outputs = outputs
        answer = await http.post(path, json=body | options | {"return_weight_versions": True})
        told = Recorded(stream_of(answer))
        found.append((told.choices, told.usages))
    assert found[0] == found[1]
