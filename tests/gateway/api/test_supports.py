"""Log S and sampling masks in the answers of each interface, whole and streamed."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from itertools import pairwise
from typing import Any

import pytest

from ..fake import Client, FakeEngine, app_of, http_of
from ..made import LOGPROBS, SUPPORT_IDS, SUPPORTS, interleaved
from .openai.streamed import choices, events

MASKS = [list(ids) for ids in SUPPORT_IDS]
LIMITED = {"top_p": 0.9, "return_sampling_mask": True}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [7, 8], "logprobs": 0, "n": 2, **LIMITED}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 2, **LIMITED},
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [7, 8], "sampling_params": {"logprobs": 0, "n": 2, **LIMITED}},
    ),
]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(interleaved)


def log_s_of(logprobs: dict[str, Any]) -> list[float]:
    if "content" in logprobs:
        return [each["support_logprob"] for each in logprobs["content"]]
    found: list[float] = logprobs["support_logprobs"]
    return found


@pytest.mark.parametrize(
    ("path", "body"), CALLS, ids=lambda each: each if str(each) == each else ""
)
async def test_choices_have_them_whole_and_in_pieces(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    whole = (await http.post(path, json=body)).json()["choices"]
    for choice in whole:
        assert choice["sampling_mask"] == MASKS
        assert log_s_of(choice["logprobs"]) == list(SUPPORTS)
    sent = events(await http.post(path, json=body | {"stream": True}))
    for index in (0, 1):
        pieces = [each for each in choices(sent, index) if each["logprobs"]]
        assert [mask for each in pieces for mask in each["sampling_mask"]] == MASKS
        assert [log_s for each in pieces for log_s in log_s_of(each["logprobs"])] == [*SUPPORTS]


async def test_without_limits_and_masks_there_are_no_fields(http: Client) -> None:
    for path, body in CALLS:
        plain = {name: each for name, each in body.items() if name not in LIMITED}
        if "sampling_params" in plain:
            plain["sampling_params"] = {"logprobs": 0}
        (choice, *_) = (await http.post(path, json=plain)).json()["choices"]
        assert "sampling_mask" not in choice
        assert "support_logprob" not in str(choice)


async def test_a_setting_returns_masks_to_clients_of_vllm(engine: FakeEngine) -> None:
    """There the server decides. Calls without limits have no support to speak of."""
    async with http_of(app_of(engine, {"gateway.return_sampling_mask": True})) as http:
        for params, masks in (({"top_k": 5}, MASKS), ({}, None)):
            body = {"token_ids": [7], "sampling_params": params}
            answer = (await http.post("/inference/v1/generate", json=body)).json()
            assert answer["choices"][0].get("sampling_mask") == masks


@pytest.mark.parametrize("stream", [False, True])
async def test_slime_s_arrays_and_the_logprobs_of_the_support(http: Client, stream: bool) -> None:
    params: dict[str, Any] = {"top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}
    body = {"input_ids": [7, 8], "sampling_params": params, "return_logprob": True}
    answer = await http.post("/generate", json=body | {"stream": stream})
    if stream:
        *_, last, _, _ = answer.text.split("\n\n")
        meta = json.loads(last.removeprefix("data: "))["meta_info"]
    else:
        meta = answer.json()["meta_info"]
    arrays = [meta["top_p_token_ids"], meta["top_p_token_offsets"]]
    ids, offsets = (struct.unpack(f"<{len(each) // 4}i", each) for each in map(b64decode, arrays))
    assert [list(ids[a:b]) for a, b in pairwise(offsets)] == MASKS
    assert meta["output_support_logprobs"] == list(SUPPORTS)
    within = [each[0] for each in meta["output_token_logprobs"]]
    assert within == [p - s for p, s in zip(LOGPROBS, SUPPORTS, strict=True)]


async def test_forced_tokens_reach_the_engine(http: Client, engine: FakeEngine) -> None:
    """By the same name everywhere."""
    forced = {"forced_tokens": [3, 4]}
    for path, body in CALLS[:2]:
        await http.post(path, json=body | forced)
    await http.post(CALLS[2][0], json={"token_ids": [7], "sampling_params": forced})
    await http.post("/generate", json={"input_ids": [7], "sampling_params": forced})
    assert [each.sampling.forced_tokens for each in engine.requests] == [(3, 4)] * 4
