"""`/v1/completions`: prompts of all kinds, echo, and logprobs in its own shape."""

from __future__ import annotations

from typing import Any

import pytest

from ...fake import Client, poster, report
from ...made import LOGPROBS, TEXTS

PATH = "/v1/completions"
TEXT = "".join(TEXTS)


posted = poster(PATH, {"prompt": "98 +"})


async def test_an_answer_has_openai_s_fields(http: Client) -> None:
    answer = await posted(http)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    null = ("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids")
    written = {"index": 0, "text": TEXT, "finish_reason": "stop"}
    assert answer["choices"] == [written | dict.fromkeys(null)]
    (request,) = http.engine.requests
    assert (request.prompt, request.sampling.max_tokens) == ("98 +", 16)


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([3, 4], [(3, 4)]),
        ([[3], [4, 5]], [(3,), (4, 5)]),
        (["a", [3]], ["a", (3,)]),
    ],
)
async def test_prompts_of_all_kinds(http: Client, prompt: Any, sent: list[Any]) -> None:
    answer = await posted(http, prompt=prompt, n=2)
    assert [each["index"] for each in answer["choices"]] == list(range(2 * len(sent)))
    by_id = sorted(http.engine.requests, key=lambda request: request.request_id)
    assert [each.prompt or each.prompt_token_ids for each in by_id] == sent
    assert answer["usage"]["completion_tokens"] == 6 * len(sent)
    assert answer["usage"]["prompt_tokens"] == 4 * len(sent)


@pytest.mark.parametrize("top", [0, 2])
async def test_logprobs_name_the_likeliest_and_the_token_itself(http: Client, top: int) -> None:
    found = (await posted(http, logprobs=top))["choices"][0]["logprobs"]
    assert found["token_logprobs"] == list(LOGPROBS)
    assert [len(each) for each in found["top_logprobs"]] == [max(1, top)] * 3
    for token, logprob, tops in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        # As lm-evaluation-harness finds out what is greedy.
        assert tops[token] == logprob == max(tops.values())
    assert found["text_offset"][0] == 0
    assert found["text_offset"] == sorted(found["text_offset"])


async def test_echo_puts_the_prompt_before_the_text(http: Client) -> None:
    assert (await posted(http, echo=True))["choices"][0]["text"] == f"98 +{TEXT}"
    prompt = list((await http.post("/tokenize", json={"prompt": "98 +"})).json()["tokens"])
    answer = await posted(http, prompt=prompt, echo=True)
    assert answer["choices"][0]["text"] == f"98 +{TEXT}"


async def test_echo_with_logprobs_scores_the_prompt(http: Client) -> None:
    (choice,) = (await posted(http, echo=True, logprobs=1))["choices"]
    (request,) = http.engine.requests
    assert request.sampling.prompt_logprobs == 1
    found, size = choice["logprobs"], len(request.prompt_token_ids or ())
    assert size == 3
    assert all(len(column) == size + 3 for column in found.values())
    assert found["token_logprobs"] == [None, -2.0, -3.0, *LOGPROBS]
    assert found["top_logprobs"][0] is None
    # The token itself and the one that was likelier.
    assert sorted(found["top_logprobs"][1].values()) == [-2.0, -0.125]
    assert found["text_offset"][size] == len("98 +")
    assert choice["text"] == f"98 +{TEXT}"


async def test_a_prompt_is_scored_without_a_token(http: Client) -> None:
    answer = await posted(http, echo=True, logprobs=0, max_tokens=0, return_token_ids=True)
    (choice,) = answer["choices"]
    assert http.engine.requests[0].sampling.max_tokens == 1
    assert (choice["text"], choice["finish_reason"]) == ("98 +", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -3.0]
    assert choice["token_ids"] == []
    assert choice["prompt_token_ids"] == list(http.engine.requests[0].prompt_token_ids or ())
    assert answer["usage"]["completion_tokens"] == 0


async def test_a_text_that_takes_no_tokenizer_is_left_to_the_engine(http: Client) -> None:
    await posted(http, temperature=0)
    assert http.engine.requests[0].prompt == "98 +"


async def test_tokens_and_back(http: Client) -> None:
    text = "98 + 25 = 東京<|im_end|>"
    found = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    back = await http.post("/detokenize", json={"tokens": found["tokens"]})
    assert back.json() == {"prompt": text}


async def test_tokenizer_info(http: Client) -> None:
    found = (await http.get("/tokenizer_info")).json()
    assert found["eos_token"] == "<|endoftext|>"
    assert found["bos_token"] is None
    assert "add_generation_prompt" in found["chat_template"]
    assert found["model_max_length"] == 2048


async def test_a_conversation_s_tokens_are_those_of_its_prompt(http: Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    found = (await http.post("/tokenize", json=body)).json()["tokens"]
    await http.post("/v1/chat/completions", json=body)
    assert tuple(found) == http.engine.requests[0].prompt_token_ids


async def test_the_models(http: Client) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 2048)
    assert (await http.get("/v1/models/tiny")).json() == model
    for name in ("other", "a/b"):
        answer = await http.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
    assert (await http.get("/version")).json()["version"]


async def test_models_have_the_bytes_of_a_sequences_recurrent_state(http: Client) -> None:
    http.engine.stage_reports = [
        report(
            stage="executor",
            load={"state_bytes": 2048, "quantization": "int8", "kv_token_bytes": 66},
        )
    ]
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["state_bytes"], model["quantization"]) == (2048, "int8")
    assert model["kv_token_bytes"] == 66


async def test_models_name_the_owners_of_experts(http: Client) -> None:
    http.engine.stage_reports = [report(stage="executor", load={"expert_owners": "1,0,0,1"})]
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["expert_owners"] == [1, 0, 0, 1]
    assert (await http.get("/v1/models/tiny")).json() == model
