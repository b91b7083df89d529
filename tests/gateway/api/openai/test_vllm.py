"""Fields of vLLM's calls and answers, beyond OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.public import GenerateRequest, Output

from ...errors import code_of
from ...fake import Client, completion, data_of, poster, sample
from ...saying import Model

SETTINGS = {"gateway.message_format": "off"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
complete = poster(COMPLETIONS, {"prompt": "98 + 25 ="})
chat = poster(CHAT, HELLO)


def tokens_of(http: Client) -> tuple[int, ...]:
    """The prompt of the last request."""
    return http.engine.requests[-1].prompt_token_ids or ()


async def test_a_prompt_is_cut_to_its_last_tokens(http: Client) -> None:
    await complete(http, truncate_prompt_tokens=3)
    whole = tokens_of(http)
    assert len(whole) == 3
    await complete(http, prompt=[5, 6, 7, 8], truncate_prompt_tokens=2)
    assert tokens_of(http) == (7, 8)
    await complete(http, prompt=[5, 6, 7], truncate_prompt_tokens=2, truncation_side="right")
    assert tokens_of(http) == (5, 6)
    await chat(http)
    rendered = tokens_of(http)
    await chat(http, truncate_prompt_tokens=2)
    assert tokens_of(http) == rendered[-2:]
    answer = await http.post(COMPLETIONS, json={"prompt": "a", "truncate_prompt_tokens": 0})
    assert code_of(answer, 400) == "empty_prompt"


async def test_a_prompt_beyond_the_model_s_length_is_cut_to_what_is_left(http: Client) -> None:
    long = [5] * 3000
    await complete(http, prompt=long, truncate_prompt_tokens=-1, max_tokens=48)
    assert len(tokens_of(http)) == 2000
    text = {"messages": [{"role": "user", "content": "a " * 3000}]}
    await chat(http, **text, truncate_prompt_tokens=-1, max_tokens=48)
    assert len(tokens_of(http)) == 2000


@pytest.mark.parametrize(("given", "tops"), [(True, 1), (False, None), (2, 2)])
async def test_logprobs_of_completions_may_be_true(
    http: Client, given: Any, tops: int | None
) -> None:
    choice = (await complete(http, logprobs=given))["choices"][0]
    assert (choice["logprobs"] is None) == (tops is None)
    assert http.engine.requests[-1].sampling.logprobs == (tops or 0)


async def test_echo_of_a_chat_is_the_text_that_it_continues(http: Client, model: Model) -> None:
    model.says(" blue.")
    turns = [*HELLO["messages"], {"role": "assistant", "content": "The sky is"}]
    fields = {"messages": turns, "continue_final_message": True, "echo": True}
    choice = (await chat(http, **fields))["choices"][0]
    assert choice["message"]["content"] == "The sky is blue."
    events = data_of(await http.post(CHAT, json=HELLO | fields | {"stream": True}))
    deltas = [each["choices"][0]["delta"].get("content") or "" for each in events]
    assert "".join(deltas) == "The sky is blue."
    own = (await chat(http, echo=True))["choices"][0]
    assert own["message"]["content"] == " blue."


async def test_the_name_of_a_call_is_repeated(http: Client) -> None:
    answers = [await complete(http, request_id="mine"), await chat(http, request_id="mine")]
    assert [each["request_id"] for each in answers] == ["mine", "mine"]
    assert [each["id"] for each in answers] == [each.request_id for each in http.engine.requests]


async def test_a_text_without_special_tokens_says_so_to_the_engine(http: Client) -> None:
    await complete(http, add_special_tokens=False)
    assert http.engine.requests[-1].add_special_tokens is False


async def test_documents_are_a_variable_of_the_template(http: Client) -> None:
    """The model's template doesn't read them."""
    answer = await http.post(CHAT, json=HELLO | {"documents": [{"text": "b"}]})
    assert code_of(answer, 400) == "unsupported"
    assert "documents" in answer.text


@pytest.mark.parametrize(
    ("ended", "fields", "reason"),
    [
        ({"token_ids": (5, 6)}, {"stop_token_ids": [6]}, 6),
        ({"token_ids": (5, 6)}, {"stop_token_ids": [7]}, None),
        ({"finish_reason": "length"}, {"stop_token_ids": [6]}, None),
    ],
)
async def test_the_reason_of_a_stop_is_the_caller_s_own(
    http: Client, ended: dict[str, Any], fields: dict[str, Any], reason: Any
) -> None:
    def outputs(request: GenerateRequest) -> list[Output]:
        return [completion(request, sample(**{"finish_reason": "stop"} | ended))]

    http.engine.outputs = outputs
    choice = (await complete(http, **fields))["choices"][0]
    assert choice["stop_reason"] == reason


async def test_what_vllm_writes_as_null_is_there(http: Client) -> None:
    """Its clients read attributes, which OpenAI's library has for fields of the answer alone."""
    for answer in (await complete(http), await chat(http)):
        for name in ("service_tier", "kv_transfer_params", "ec_transfer_params"):
            assert answer[name] is None
        choice = answer["choices"][0]
        assert choice["stop_reason"] is choice["token_ids"] is None
        of_prompt = choice if "text" in choice else answer
        assert of_prompt["prompt_logprobs"] is of_prompt["prompt_token_ids"] is None
