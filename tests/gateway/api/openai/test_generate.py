"""`/inference/v1/generate`: tokens in, tokens out."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nano_inference.bus.public import GenerateRequest, Output, RoutedExperts

from ...fake import Client, FakeEngine, app_of, completion, http_of, poster
from ...made import LOGPROBS, TOKENS, told
from .streamed import Recorded, events, stream_of
from .test_refusals import refusal

PATH = "/inference/v1/generate"
TOLD = {"token_ids": list(TOKENS)}


SETTINGS = {"gateway.max_body_bytes": 100_000}

posted = poster(PATH, {"token_ids": [7, 8, 9]})


async def test_an_answer_has_vllm_s_fields(http: Client) -> None:
    answer = await posted(http, request_id="mine")
    assert answer["request_id"] == "mine"
    assert answer["model"] == "tiny"
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    choice = {"index": 0, "logprobs": None, "finish_reason": "stop", "weight_versions": spans}
    assert answer["choices"] == [choice | TOLD]
    assert "prompt_token_ids" not in answer
    assert answer["usage"]["total_tokens"] == 4 + 3
    (request,) = http.engine.requests
    # A name may be anybody's; the id is nobody else's.
    assert answer["id"] == request.request_id != "mine"
    assert request.prompt_token_ids == (7, 8, 9)
    assert request.prompt is None


async def test_without_a_name_each_has_a_new_one(http: Client) -> None:
    first, second = await posted(http), await posted(http)
    assert first["request_id"] != second["request_id"]
    assert (first["request_id"], second["request_id"]) == (first["id"], second["id"])


async def test_logprobs_name_tokens_by_their_ids(http: Client) -> None:
    answer = await posted(http, sampling_params={"logprobs": 2, "prompt_logprobs": 1})
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entries] == [f"token_id:{token}" for token in TOKENS]
    assert [each["token_id"] for each in entries] == [*TOKENS]
    assert [each["logprob"] for each in entries] == list(LOGPROBS)
    assert [len(each["top_logprobs"]) for each in entries] == [2, 2, 2]
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert [set(place) for place in rest] == [{"8", "9"}, {"9"}]


async def test_logprobs_of_targets_are_an_array(http: Client) -> None:
    asked = {"prompt_logprob_token_ids": [[4, -1, 5], [6]]}
    inf = -np.inf
    answer = await posted(http, sampling_params=asked)
    found = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert (found.dtype, found.tolist()) == (np.float32, [[-0.5, inf, -1.5], [-2.5, inf, inf]])
    completion = await http.post("/v1/completions", json={"prompt": [7, 8, 9]} | asked)
    (choice,) = completion.json()["choices"]
    assert choice["prompt_token_id_logprobs"] == answer["prompt_token_id_logprobs"]
    body = {"token_ids": [7, 8, 9], "sampling_params": asked, "stream": True}
    assert refusal(await http.post(PATH, json=body))[0] == "invalid_request"


async def test_routed_experts_are_an_array(http: Client, engine: FakeEngine) -> None:
    def outputs(request: GenerateRequest) -> list[Output]:
        own = tuple(bytes([token, 0]) for token in TOKENS)
        sample = msgspec.structs.replace(told(request, 0), routed_experts=own)
        prompt = RoutedExperts(first=0, layers=1, top_k=1, data=bytes([1, 0, 2, 0]))
        return [completion(request, sample, prompt_routed_experts=prompt)]

    engine.outputs = outputs
    asked = {"return_routed_experts": True}
    (choice,) = (await posted(http, sampling_params=asked))["choices"]
    found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert found.tolist() == [[[each]] for each in (1, 2, *TOKENS)]
    body = {"token_ids": [7, 8, 9], "sampling_params": asked, "stream": True}
    assert refusal(await http.post(PATH, json=body))[0] == "invalid_request"


async def test_a_stream_is_the_answer_in_pieces(http: Client) -> None:
    asked: dict[str, Any] = {"sampling_params": {"n": 2, "logprobs": 1}, "request_id": "mine"}
    answer = await posted(http, **asked)
    more = {"stream": True, "stream_options": {"include_usage": True}}
    sent = await http.post(PATH, json={"token_ids": [7, 8, 9]} | asked | more)
    assert {chunk["request_id"] for chunk in events(sent)[:-1]} == {"mine"}
    told = Recorded(stream_of(sent))
    assert told.usages == [answer["usage"]]
    for index, whole in enumerate(answer["choices"]):
        found = told.choices[index]
        assert found["tokens"] == whole["token_ids"]
        assert found["logprobs"] == whole["logprobs"]["content"]
        assert (found["reasons"], found["versions"]) == (["stop"], [("3", 0), ("3", 1), ("4", 2)])


async def test_the_prompt_is_shown_on_request_once(http: Client) -> None:
    shown = {"prompt_token_ids": [7, 8, 9], "mm_placeholders": None}
    answer = await posted(http, return_token_ids=True)
    assert {name: answer[name] for name in shown} == shown
    body = {"token_ids": [7, 8, 9], "return_token_ids": True, "stream": True}
    first, *others, _ = events(await http.post(PATH, json=body))
    assert {name: first[name] for name in shown} == shown
    assert not any("prompt_token_ids" in chunk for chunk in others)


async def test_generation_from_tokens_needs_no_tokenizer(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with http_of(app_of(engine, {"engine.model_path": str(tmp_path)})) as http:
        await posted(http, sampling_params={"logprobs": 1})
        body = {"token_ids": [7], "sampling_params": {"prompt_logprobs": 1}}
        assert refusal(await http.post(PATH, json=body))[0] == "unsupported"
