"""`/v1/chat/completions`: from messages to a prompt, and from samples to choices."""

from __future__ import annotations

from typing import Any

import pytest

from ...fake import Client, completion, poster, refused
from ...made import LOGPROBS, TEXTS, TOKENS, told
from ...sampled import WORDS
from ...serving.test_lane_state import OWN

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "How much is 6 + 6?"}]


posted = poster(PATH, {"messages": HELLO})


async def prompt_of(http: Client, **fields: Any) -> str:
    """The text that the engine is asked to continue."""
    await posted(http, **fields)
    return WORDS.text(http.engine.requests[-1].prompt_token_ids or (), skip_special=False)


async def test_an_answer_has_openai_s_fields(http: Client) -> None:
    answer = await posted(http, model="tiny")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["id"] == http.engine.requests[0].request_id
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert answer["created"] > 1_600_000_000
    assert answer["system_fingerprint"] == "weights-3"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "".join(TEXTS),
                "refusal": None,
                "reasoning_content": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_cached_tokens_are_at_most_the_prompt(http: Client) -> None:
    usage = (await posted(http, n=3))["usage"]
    assert usage["completion_tokens"] == 9
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_messages_go_through_the_model_s_template(http: Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": " "}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": "tool", "content": "T", "tool_call_id": "c"},
    ]
    assert await prompt_of(http, messages=messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nno<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_result_of_no_call_is_refused(http: Client) -> None:
    for path in (PATH, "/tokenize"):
        result = {"role": "tool", "content": "T", "tool_call_id": "c"}
        answer = await http.post(path, json={"messages": [*HELLO, result]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (
            400,
            "invalid_messages",
            "messages[1].tool_call_id",
        )


async def test_a_developer_message_is_a_system_message_to_templates_without_developers(
    http: Client,
) -> None:
    prompt = await prompt_of(http, messages=[{"role": "developer", "content": "D"}])
    assert prompt.startswith("<|im_start|>system\nD")


async def test_the_last_message_is_continued(http: Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    prompt = await prompt_of(http, messages=messages, continue_final_message=True)
    assert prompt.endswith("<|im_start|>assistant\nIt is")


async def test_add_generation_prompt_false_begins_no_turn(http: Client) -> None:
    prompt = await prompt_of(http, add_generation_prompt=False)
    assert prompt.endswith("<|im_end|>\n")


async def test_max_tokens_default_to_the_rest_of_the_context(http: Client) -> None:
    await posted(http)
    await posted(http, max_tokens=3)
    await posted(http, max_completion_tokens=4)
    told_tokens = [request.sampling.max_tokens for request in http.engine.requests]
    assert told_tokens == [OWN, 3, 4]


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_logprobs_with_and_without_the_likeliest(http: Client, top: int | None) -> None:
    answer = await posted(http, logprobs=True, top_logprobs=top)
    found = answer["choices"][0]["logprobs"]
    assert set(found) == {"content", "refusal"}
    assert [each["logprob"] for each in found["content"]] == list(LOGPROBS)
    for entry in found["content"]:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == (top or 0)
        if top:
            assert entry["top_logprobs"][0]["token"] == entry["token"]


async def test_logprobs_can_name_tokens_by_id(http: Client) -> None:
    answer = await posted(http, logprobs=True, return_tokens_as_token_ids=True)
    named = [each["token"] for each in answer["choices"][0]["logprobs"]["content"]]
    assert named == [f"token_id:{token_id}" for token_id in TOKENS]


async def test_tokens_versions_and_scores_of_the_prompt(http: Client) -> None:
    answer = await posted(
        http, return_token_ids=True, return_weight_versions=True, prompt_logprobs=1
    )
    (choice,) = answer["choices"]
    prompt = http.engine.requests[0].prompt_token_ids or ()
    assert answer["prompt_token_ids"] == list(prompt)
    assert choice["token_ids"] == list(TOKENS)
    assert choice["weight_versions"] == [
        {"version": 3, "start": 0, "end": 2},
        {"version": 4, "start": 2, "end": 3},
    ]
    first, second, *_ = answer["prompt_logprobs"]
    assert first is None
    assert second["9"] == {
        "logprob": -0.125,
        "rank": 1,
        "decoded_token": second["9"]["decoded_token"],
    }
    assert second[str(prompt[1])]["logprob"] == -2.0
    assert second[str(prompt[1])]["rank"] is None


async def test_an_aborted_answer_has_its_text_so_far(http: Client) -> None:
    http.engine.outputs = lambda request: [
        completion(request, told(request, 0, "abort"), status="cancelled")
    ]
    (choice,) = (await posted(http))["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["message"]["content"] == "".join(TEXTS)


@pytest.mark.parametrize(
    ("code", "status", "shown", "param"),
    [
        ("unknown_model", 404, "model_not_found", "model"),
        ("prompt_too_long", 400, "context_length_exceeded", "messages"),
        ("invalid_logprobs", 400, "invalid_logprobs", "top_logprobs"),
        ("invalid_top_p", 400, "invalid_top_p", "top_p"),
        ("invalid_tenant", 400, "invalid_tenant", None),
        ("overloaded", 429, "overloaded", None),
        ("shutting_down", 503, "shutting_down", None),
        ("expired", 504, "expired", None),
        ("internal_error", 500, "internal_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_have_openai_s_codes(
    http: Client, code: str, status: int, shown: str, param: str | None, stream: bool
) -> None:
    http.engine.outputs = refused(code)
    answer = await http.post(PATH, json={"messages": HELLO, "stream": stream})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (shown, param)
    assert ("retry-after" in answer.headers) == (status == 429)
    # What has used up its time would only do so again.
    assert answer.headers.get("x-should-retry") == ("false" if code == "expired" else None)
