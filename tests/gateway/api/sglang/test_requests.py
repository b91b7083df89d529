"""The fields of SGLang's body reach the engine; unsupported fields are refused."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.config import RequestError, SamplingParams
from nano_inference.gateway.api.sglang.requests import PromptCall, read_call

from ...errors import invalid

MOST = 100


def one(**body: Any) -> PromptCall:
    (wanted,), batch = read({"text": "a"} | body)
    assert not batch
    return wanted


def read(body: dict[str, Any]) -> tuple[list[PromptCall], bool]:
    """The prompts, and whether the answer is a list."""
    call = read_call(body, MOST)
    return list(call.prompts), call.batch


def sampling(**params: Any) -> SamplingParams:
    return one(sampling_params=params).request.sampling


def test_defaults_are_those_of_sglang() -> None:
    wanted = one()
    assert wanted.request.sampling == SamplingParams(max_tokens=128)
    assert wanted.id
    assert (wanted.request.n, wanted.logprobs, wanted.plain_text) == (1, False, True)
    assert one(sampling_params={"stop": None, "temperature": None}).request.sampling == (
        SamplingParams(max_tokens=128)
    )


@pytest.mark.parametrize("top_k", [-1, 1 << 30])
def test_all_tokens(top_k: int) -> None:
    assert sampling(top_k=top_k).top_k == 0


def test_nearly_no_temperature_is_greedy() -> None:
    assert sampling(temperature=1e-7).temperature == 0


def test_one_stop_string_or_several() -> None:
    assert sampling(stop="x").stop == ("x",)
    assert sampling(stop=[]).stop == sampling(stop="").stop == ()


def test_no_new_tokens_is_scoring() -> None:
    wanted = one(sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
    assert wanted.scores_only
    assert wanted.request.sampling.max_tokens == 1
    assert wanted.request.sampling.prompt_logprobs == 0


def test_logprobs_of_the_prompt_are_computed_only_when_shown() -> None:
    assert one(logprob_start_len=0).request.sampling.prompt_logprobs is None
    assert one(return_logprob=True, top_logprobs_num=3).request.sampling.prompt_logprobs is None
    wanted = one(return_logprob=True, top_logprobs_num=3, logprob_start_len=5)
    assert wanted.request.sampling.prompt_logprobs == wanted.request.sampling.logprobs == 3
    assert wanted.logprob_start == 5


def test_when_the_tokenizer_is_needed() -> None:
    assert not one().needs_tokenizer
    assert one(sampling_params={"stop": "x"}).needs_tokenizer
    assert one(sampling_params={"no_stop_trim": True}).needs_tokenizer
    assert one(sampling_params={"skip_special_tokens": False}).needs_tokenizer
    assert not one(return_text_in_logprobs=True).needs_tokenizer
    assert one(return_text_in_logprobs=True, return_logprob=True).needs_tokenizer


def texts(prompts: list[PromptCall]) -> list[str | None]:
    return [wanted.request.prompt for wanted in prompts]


def test_a_list_of_prompts_is_a_batch() -> None:
    prompts, batch = read(
        {
            "text": ["a", "b"],
            "rid": ["r", "s"],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2}],
            "return_logprob": [True, False],
        }
    )
    assert batch
    assert texts(prompts) == ["a", "b"]
    assert [wanted.id for wanted in prompts] == ["r", "s"]
    assert [wanted.request.sampling.max_tokens for wanted in prompts] == [1, 2]
    assert [wanted.logprobs for wanted in prompts] == [True, False]


def test_token_ids_of_one_prompt_and_of_several() -> None:
    prompts, batch = read({"input_ids": [1, 2]})
    assert not batch
    assert prompts[0].request.prompt_token_ids == (1, 2)
    prompts, batch = read({"input_ids": [[1, 2], [3]], "rid": "r", "extra_key": "k"})
    assert batch
    assert [each.request.prompt_token_ids for each in prompts] == [(1, 2), (3,)]
    assert [each.id for each in prompts] == ["r_0", "r_1"]
    assert {each.request.cache_salt for each in prompts} == {"k"}


def test_several_samples_are_a_batch() -> None:
    prompts, batch = read({"text": "a", "rid": "r", "sampling_params": {"n": 2}})
    assert batch
    assert prompts[0].request.n == 2
    assert prompts[0].id == "r"


def test_how_often_a_stream_has_an_event() -> None:
    assert one().interval_tokens == one(sampling_params={"stream_interval": 0}).interval_tokens == 1
    assert one(sampling_params={"stream_interval": 9}).interval_tokens == 9


@pytest.mark.parametrize(
    ("body", "code", "word"),
    [
        invalid("text and input_ids", "invalid_prompt"),
        invalid("exactly one", "invalid_prompt", text="a", input_ids=[1]),
        invalid("no prompt", "empty_prompt", text=[]),
        invalid("text", text=3),
        invalid("input_ids", input_ids=[1, "a"]),
        invalid("input_ids", input_ids=[[1], 2]),
        invalid("twice", "duplicate_request", text=["a", "b"], rid=["r", "r"]),
        invalid("rid has 1", text=["a", "b"], rid=["r"]),
        invalid("sampling_params has 2", text="a", sampling_params=[{}, {}]),
        invalid("sampling_params has 0", text="a", sampling_params=[]),
        invalid("sampling_params.", text="a", sampling_params={"top_p": "x"}),
        invalid("structural_tag", "unsupported", text="a", sampling_params={"structural_tag": "x"}),
        invalid(
            "json_schema and sampling_params.regex",
            text="a",
            sampling_params={"json_schema": "{}", "regex": "a"},
        ),
        invalid("image_data", "invalid_image", text="a", image_data=["?"]),
        invalid("image_data has 1", text=["a", "b"], image_data=["x"]),
        invalid(
            "pixel_values", "unsupported", text="a", image_data={"url": "", "pixel_values": [1]}
        ),
        invalid("video_data", "unsupported", text="a", video_data=["x"]),
    ],
)
def test_refusals(body: dict[str, Any], code: str, word: str) -> None:
    with pytest.raises(RequestError, match=word) as refused:
        read(body)
    assert refused.value.code == code


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    one(return_routed_experts=False, lora_path=None, image_data=[], session_id="s", no_logs=True)
    assert one(image_data=None).images == []
    sampling(regex=None, custom_params={}, spaces_between_special_tokens=False)
