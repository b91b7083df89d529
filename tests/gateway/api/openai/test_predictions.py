"""OpenAI's `prediction`, what usage says of drafts, and chunks that have several tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from httpx import AsyncClient
from openai import AsyncOpenAI

from nano_inference.bus.public import Completion, CompletionChunk, GenerateRequest, Output

from ...fake import FakeEngine
from ...made import interleaved, whole
from .streamed import Recorded, response_events, stream_of

HELLO: Any = [{"role": "user", "content": "hello"}]
PARTS: Any = [{"type": "text", "text": "five "}, {"type": "text", "text": "six"}]


def drafted(request: GenerateRequest) -> list[Output]:
    """As `interleaved`, by an engine that has verified drafts."""
    *chunks, end = interleaved(request)
    assert isinstance(end, Completion)
    usage = msgspec.structs.replace(
        end.usage, accepted_prediction_tokens=5, rejected_prediction_tokens=2
    )
    return [*chunks, msgspec.structs.replace(end, usage=usage)]


def together(request: GenerateRequest) -> list[Output]:
    """As `interleaved`, with the first two tokens of each sample in one chunk."""
    *chunks, end = interleaved(request)
    found: list[Output] = []
    begun: dict[int, CompletionChunk] = {}
    for chunk in chunks:
        assert isinstance(chunk, CompletionChunk)
        if chunk.token_offset == 0:
            begun[chunk.sample_index] = chunk
            continue
        if chunk.token_offset == 1:
            first = begun[chunk.sample_index]
            tops = (first.top_logprobs or ()) + (chunk.top_logprobs or ())
            chunk = msgspec.structs.replace(
                first,
                token_ids=first.token_ids + chunk.token_ids,
                logprobs=first.logprobs + chunk.logprobs,
                text=first.text + chunk.text,
                top_logprobs=tops or None,
            )
        found.append(chunk)
    return [*found, end]


@pytest.mark.parametrize(("content", "text"), [("five six", "five six"), (PARTS, "five six")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_reaches_the_engine_and_its_usage_the_client(
    client: AsyncOpenAI, engine: FakeEngine, content: Any, text: str, stream: bool
) -> None:
    engine.outputs = drafted
    prediction: Any = {"type": "content", "content": content}
    create = client.chat.completions.create
    if stream:
        usage = None
        async for chunk in await create(
            model="tiny",
            messages=HELLO,
            prediction=prediction,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
    else:
        answer = await create(model="tiny", messages=HELLO, prediction=prediction)
        usage = answer.usage
    assert engine.requests[0].prediction == text
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == 5
    assert details.rejected_prediction_tokens == 2
    assert usage.completion_tokens == 3, "what was rejected is none of them"


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}])
async def test_draft_usage_without_a_prediction(
    http: AsyncClient, engine: FakeEngine, prediction: Any
) -> None:
    body = {"messages": HELLO, "prediction": prediction}
    for outputs, told in ((whole, None), (drafted, {"accepted": 5, "rejected": 2})):
        engine.outputs = outputs
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        details = answer["usage"].get("completion_tokens_details", {})
        found = {
            name: details[f"{name}_prediction_tokens"]
            for name in ("accepted", "rejected")
            if f"{name}_prediction_tokens" in details
        }
        assert found == (told or {})
    assert all(request.prediction is None for request in engine.requests)


async def test_an_unused_prediction_has_usage_of_zero(
    http: AsyncClient, engine: FakeEngine
) -> None:
    engine.outputs = whole
    body = {"messages": HELLO, "prediction": {"type": "content", "content": "a"}}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)


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


async def test_draft_counts_have_sglang_s_names(http: AsyncClient, engine: FakeEngine) -> None:
    def outputs(request: GenerateRequest) -> list[Output]:
        (end,) = whole(request)
        assert isinstance(end, Completion)
        (sample,) = end.samples
        sample = msgspec.structs.replace(sample, num_draft_tokens=8, num_accepted_draft_tokens=6)
        return [msgspec.structs.replace(end, samples=(sample,))]

    engine.outputs = outputs
    meta = (await http.post("/generate", json={"text": "a"})).json()["meta_info"]
    assert (meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (8, 6)
    assert meta["spec_accept_rate"] == 0.75
    engine.outputs = whole
    meta = (await http.post("/generate", json={"text": "a"})).json()["meta_info"]
    assert not [name for name in meta if name.startswith("spec_")]


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
    http: AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    found = []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for outputs in (interleaved, together):
        engine.outputs = outputs
        answer = await http.post(path, json=body | options | {"return_weight_versions": True})
        told = Recorded(stream_of(answer))
        found.append((told.choices, told.usages))
    assert found[0] == found[1]


async def test_a_response_is_the_same_however_many_tokens_a_chunk_has(
    http: AsyncClient, engine: FakeEngine
) -> None:
    body = {"input": "a", "stream": True, "include": ["message.output_text.logprobs"]}
    ends = []
    for outputs in (interleaved, together):
        engine.outputs = outputs
        *events, end = response_events(await http.post("/v1/responses", json=body))
        deltas = [each for each in events if each["type"] == "response.output_text.delta"]
        text = "".join(each["delta"] for each in deltas)
        logprobs = [entry for each in deltas for entry in each["logprobs"]]
        (item,) = end["response"]["output"]
        assert text == item["content"][0]["text"]
        assert logprobs == item["content"][0]["logprobs"]
        ends.append((text, logprobs, end["response"]["usage"]))
    assert ends[0] == ends[1]
