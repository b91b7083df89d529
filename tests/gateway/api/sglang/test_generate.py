"""`/generate` and `/encode`: order of answers, streams, and clients that leave."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nano_inference.bus.public import EmbedParams, GenerateRequest, Output

from ...errors import error_of
from ...fake import Client, FakeEngine, app_of, chunk, completion, data_of, http_of, refused, sample
from ...made import embedded


def spelled(request: GenerateRequest) -> list[Output]:
    """The prompt's ids, one by one."""
    token_ids = request.prompt_token_ids or ()
    chunks = [
        chunk(request, (token_id,), f"<{token_id}>", token_offset=place)
        for place, token_id in enumerate(token_ids)
    ]
    text = "".join(f"<{token_id}>" for token_id in token_ids)
    return [*chunks, completion(request, sample(token_ids, text=text))]


def hanging(request: GenerateRequest) -> list[Output]:
    return spelled(request)[:1]


async def test_one_prompt_one_object(http: Client) -> None:
    http.engine.outputs = spelled
    answer = (await http.post("/generate", json={"input_ids": [3, 4]})).json()
    assert (answer["text"], answer["output_ids"]) == ("<3><4>", [3, 4])


async def test_a_batch_is_answered_in_order(http: Client) -> None:
    http.engine.outputs = spelled
    answer = await http.post("/generate", json={"input_ids": [[3], [4], [5]]})
    assert [each["text"] for each in answer.json()] == ["<3>", "<4>", "<5>"]


async def test_samples_are_in_order(http: Client) -> None:
    body = {"text": ["a", "b"], "rid": ["r", "s"], "sampling_params": {"n": 2}}
    answer = (await http.post("/generate", json=body)).json()
    assert [each["meta_info"]["id"] for each in answer] == ["r_0", "r_1", "s_0", "s_1"]


async def test_one_refusal_ends_a_batch(http: Client) -> None:
    no = refused("invalid_token_ids")
    http.engine.outputs = lambda request: (
        no(request) if request.request_id == "s" else hanging(request)
    )
    answer = await http.post("/generate", json={"input_ids": [[3], [4]], "rid": ["r", "s"]})
    assert error_of(answer, 400) == "invalid_token_ids"
    assert http.engine.left == ["r"]


async def test_a_stream(http: Client) -> None:
    http.engine.outputs = spelled
    answer = await http.post("/generate", json={"input_ids": [3, 4], "stream": True})
    found = data_of(answer)
    assert [event["text"] for event in found] == ["<3>", "<3><4>", "<3><4>"]
    reasons = [event["meta_info"]["finish_reason"] for event in found]
    assert reasons == [None, None, {"type": "length", "length": 2}]
    assert all("index" not in event for event in found)
    assert http.engine.requests[0].stream


async def test_events_of_a_batch_have_an_index(http: Client) -> None:
    http.engine.outputs = spelled
    answer = await http.post("/generate", json={"input_ids": [[3], [4, 5]], "stream": True})
    last = {event["index"]: event["text"] for event in data_of(answer)}
    assert last == {0: "<3>", 1: "<4><5>"}


async def test_a_refusal_before_the_first_event_of_a_stream_has_its_status(http: Client) -> None:
    http.engine.outputs = refused("invalid_top_p", "too high")
    answer = await http.post("/generate", json={"text": "a", "stream": True})
    assert error_of(answer, 400) == "invalid_top_p"


async def test_an_error_after_events_is_the_streams_last_event(http: Client) -> None:
    no = refused("invalid_top_p", "too high")
    http.engine.outputs = lambda request: [*hanging(request), *no(request)]
    answer = await http.post("/generate", json={"input_ids": [3], "stream": True})
    first, event = data_of(answer)
    assert first["text"] == "<3>"
    assert event["error"] == {
        "message": "too high",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_top_p",
    }


async def test_scores_are_one_event(http: Client) -> None:
    http.engine.outputs = spelled
    body = {"input_ids": [3, 4], "stream": True, "sampling_params": {"max_new_tokens": 0}}
    (event,) = data_of(await http.post("/generate", json=body))
    assert event["output_ids"] == []


async def test_a_prompt_as_text_is_sent_as_tokens_when_they_are_shown(http: Client) -> None:
    body = {"text": "98 +", "return_logprob": True, "logprob_start_len": 0}
    assert (await http.post("/generate", json=body)).status_code == 200
    (request,) = http.engine.requests
    assert request.prompt is None
    assert len(request.prompt_token_ids or ()) == 3


async def test_without_a_tokenizer_only_that_is_refused_which_takes_one(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with http_of(app_of(engine, {"engine.model_path": str(tmp_path)})) as http:
        assert (await http.post("/generate", json={"text": "a"})).status_code == 200
        body = {"text": "a", "sampling_params": {"stop": "b"}}
        assert error_of(await http.post("/generate", json=body), 400) == "unsupported"


async def test_abort_finds_a_batch_by_the_id_of_the_whole(http: Client) -> None:
    http.engine.outputs = hanging
    body = {"input_ids": [[3], [4]], "rid": "r"}
    generating = asyncio.create_task(http.post("/generate", json=body))
    await http.engine.until(lambda: len(http.engine.requests) == 2)
    assert (await http.post("/abort_request", json={"rid": "r"})).status_code == 200
    cancelled = [given["request_id"] for name, given in http.engine.calls if name == "cancel"]
    assert cancelled == ["r", "r_0", "r_1"]
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)


# --- /encode --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "vectors"),
    [
        ({"text": "abc"}, [3, -0.5, 294]),
        ({"text": ["abc", "de"]}, [[3, -0.5, 294], [2, -0.5, 201]]),
        ({"input_ids": [1, 2]}, [2, -0.5, 3]),
        ({"input_ids": [[1, 2], [3]]}, [[2, -0.5, 3], [1, -0.5, 3]]),
    ],
)
async def test_a_text_has_an_object_and_a_list_has_a_list(
    body: dict[str, Any], vectors: list[Any], http: Client
) -> None:
    http.engine.outputs = embedded
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
