"""An answer has what SGLang's has, and tells nothing that the engine did not."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.bus.messages import RowFinish
from nano_inference.bus.public import (
    CompletionSample,
    ErrorInfo,
    GenerateRequest,
    RoutedExperts,
    TokenLogprob,
)
from nano_inference.gateway.api.sglang.answers import PromptWriter
from nano_inference.gateway.api.sglang.requests import read_call
from nano_inference.gateway.serving.tokenizer import Tokenizer
from nano_inference.gateway.serving.weight_sync import VersionLabels

from ...fake import chunk, completion, sample
from ...sampled import WORDS, ends, joined, make, sizes, stops, tokens

END = "<|endoftext|>"
PROMPT = (None, -1.0, -2.0, -3.0)
REQUEST = GenerateRequest(request_id="r")


def answers(words: Tokenizer | None = None, **body: Any) -> PromptWriter:
    call = read_call({"input_ids": [11, 12, 13, 14], "rid": "r"} | body, max_prompts=10)
    return PromptWriter(next(call.prompts), words, VersionLabels())


def told(writer: PromptWriter, *samples: CompletionSample, **changed: Any) -> Any:
    """The only answer to a completion with these samples."""
    (answer,) = writer.final(completion(writer.wanted.request, *samples, **changed))
    return answer


def top(*token_ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=each, logprob=-float(each)) for each in token_ids)


def test_an_answer() -> None:
    assert told(answers()) == {
        "text": "five six",
        "output_ids": (5, 6),
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "cached_tokens": 3,
            "e2e_latency": 2.0,
            "weight_version": "3",
            "weight_versions": [("3", 0)],
        },
    }


def test_logprobs_with_their_tokens() -> None:
    writer = answers(return_logprob=True, top_logprobs_num=1)
    made = sample(top_logprobs=(top(5), top(9)))
    meta = told(writer, made)["meta_info"]
    assert meta["output_token_logprobs"] == [(-0.5, 5, None), (-1.5, 6, None)]
    assert meta["output_top_logprobs"] == [[(-5.0, 5, None)], [(-9.0, 9, None)]]
    assert meta["input_token_logprobs"] == []


def test_logprobs_by_the_reference_model() -> None:
    """Beside the others, where the pipeline has one, and of the same tokens."""
    made = sample(ref_logprobs=(-0.1, -0.2))
    more = {"prompt_logprobs": PROMPT, "prompt_ref_logprobs": (None, -4.0, -5.0, -6.0)}
    meta = told(answers(return_logprob=True, logprob_start_len=1), made, **more)["meta_info"]
    assert meta["output_ref_logprobs"] == (-0.1, -0.2)
    assert meta["input_ref_logprobs"] == [-4.0, -5.0, -6.0]
    assert len(meta["input_token_logprobs"]) == len(meta["input_ref_logprobs"])
    assert "output_ref_logprobs" not in told(answers(), made, **more)["meta_info"]


def test_logprobs_of_the_prompt_from_a_place_on() -> None:
    writer = answers(return_logprob=True, top_logprobs_num=1, logprob_start_len=1)
    tops = ((), top(21), top(22), top(23))
    meta = told(writer, prompt_logprobs=PROMPT, prompt_top_logprobs=tops)["meta_info"]
    assert meta["input_token_logprobs"] == [(-1.0, 12, None), (-2.0, 13, None), (-3.0, 14, None)]
    assert meta["input_top_logprobs"] == [[(-each, int(each), None)] for each in (21.0, 22.0, 23.0)]


def test_scores_alone() -> None:
    writer = answers(
        return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}
    )
    answer = told(writer, prompt_logprobs=PROMPT)
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["output_token_logprobs"]) == ("", (), [])
    assert (meta["completion_tokens"], meta["finish_reason"]["length"]) == (0, 0)
    assert [entry[0] for entry in meta["input_token_logprobs"]] == [None, -1.0, -2.0, -3.0]
    assert meta["weight_version"] == "3"


def test_logprobs_of_given_ids_from_a_place_on() -> None:
    writer = answers(
        return_logprob=True,
        logprob_start_len=1,
        token_ids_logprob=[7, 9],
        sampling_params={"max_new_tokens": 0},
    )
    request = writer.wanted.with_targets(writer.wanted.request)
    assert request.sampling.prompt_logprob_token_ids == ((7, 9), (7, 9))
    found = np.array([-1, -2, -3, -4], np.float32).tobytes()
    meta = told(writer, prompt_logprobs=PROMPT, prompt_token_id_logprobs=found)["meta_info"]
    assert meta["input_token_ids_logprobs"] == [
        None,
        [(-1.0, 7, None), (-2.0, 9, None)],
        [(-3.0, 7, None), (-4.0, 9, None)],
    ]


def test_routed_experts_are_those_of_the_prompt_and_of_each_token() -> None:
    writer = answers(return_routed_experts=True)
    assert writer.wanted.request.sampling.return_routed_experts
    pairs = [np.array([place, 7], "<u2").tobytes() for place in range(5)]
    prompt = RoutedExperts(first=0, layers=1, top_k=2, data=b"".join(pairs[:3]))
    made = sample(routed_experts=tuple(pairs[3:]))
    meta = told(writer, made, prompt_routed_experts=prompt)["meta_info"]
    found = np.frombuffer(b64decode(meta["routed_experts"]), np.int32).reshape(-1, 1, 2)
    assert found[:, 0].tolist() == [[place, 7] for place in range(5)]


def test_several_samples_share_cached_tokens() -> None:
    writer = answers(sampling_params={"n": 2})
    found = writer.final(completion(writer.wanted.request))
    assert [answer["meta_info"]["id"] for answer in found] == ["r_0", "r_1"]
    assert [answer["meta_info"]["cached_tokens"] for answer in found] == [2, 1]


def test_versions_by_name_the_oldest_first() -> None:
    writer = answers()
    writer._labels.put(3, "step-3")
    made = sample(weight_versions=((3, 0), (4, 1)))
    meta = told(writer, made)["meta_info"]
    assert meta["weight_version"] == "step-3"
    assert meta["weight_versions"] == [("step-3", 0), ("4", 1)]


def test_an_unbegun_sample_is_aborted() -> None:
    writer = answers(return_logprob=True)
    error = ErrorInfo(code="aborted", message="gone")
    answer = told(writer, status="cancelled", error=error, samples=())
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "gone"}
    assert (answer["text"], meta["output_token_logprobs"]) == ("", [])
    assert "weight_version" not in meta


def test_a_stop_token_is_named() -> None:
    meta = told(answers(), sample(finish_reason="stop"))["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 6}


def test_draft_counts_have_sglang_s_names() -> None:
    meta = told(answers(), sample(num_draft_tokens=8, num_accepted_draft_tokens=6))["meta_info"]
    assert (meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (8, 6)
    assert meta["spec_accept_rate"] == 0.75


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({"stop": ["25 =", " ="]}, "98 + ", "25 ="),
        ({"stop": ["5", "25"]}, "98 + ", "25"),
        ({"stop": ["25"], "no_stop_trim": True}, "98 + 25 =", "25"),
        ({"stop": ["25"], "skip_special_tokens": False}, "98 + ", "25"),
        ({"stop": ["8", "25"], "min_new_tokens": 3}, "98 + ", "25"),
    ],
)
def test_a_stop_string_is_named_and_cut_off(
    params: dict[str, Any], text: str, matched: str
) -> None:
    writer = answers(WORDS, sampling_params=params)
    token_ids = WORDS.token_ids("98 + 25 =")
    made = sample(token_ids, text=text, finish_reason="stop")
    answer = told(writer, made)
    assert answer["text"] == text
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "98"),
        ({"no_stop_trim": True}, "98"),
        ({"skip_special_tokens": False}, "98"),
        ({"no_stop_trim": True, "skip_special_tokens": False}, f"98{END}"),
        ({"no_stop_trim": True, "skip_special_tokens": False, "stop": "x"}, f"98{END}"),
        ({"skip_special_tokens": False, "stop": "x"}, "98"),
    ],
)
def test_the_text_of_a_stop_token(params: dict[str, Any], text: str) -> None:
    writer = answers(WORDS, sampling_params=params)
    token_ids = WORDS.token_ids(f"98{END}")
    made = sample(token_ids, text="98", finish_reason="stop")
    answer = told(writer, made)
    assert answer["text"] == text
    assert answer["meta_info"]["finish_reason"]["matched"] == token_ids[-1]


def test_texts_of_tokens() -> None:
    writer = answers(WORDS, return_logprob=True, return_text_in_logprobs=True)
    made = sample(WORDS.token_ids("98"))
    answer = told(writer, made)
    shown = [text for _, _, text in answer["meta_info"]["output_token_logprobs"]]
    assert shown == ["9", "8"]


def test_stream_events_repeat_the_earlier_text() -> None:
    growing = answers(return_logprob=True).growing(0)
    growing.add(chunk(REQUEST, (5,), "five"))
    growing.add(chunk(REQUEST, (6, 7), " six seven", weight_version=4))
    answer = growing.answer()
    assert (answer["text"], answer["output_ids"]) == ("five six seven", (5, 6, 7))
    meta = answer["meta_info"]
    assert meta["finish_reason"] is None
    assert [entry[1] for entry in meta["output_token_logprobs"]] == [5, 6, 7]
    assert meta["weight_versions"] == [("0", 0), ("4", 1)]


def test_a_possible_stop_string_is_held_back() -> None:
    writer = answers(WORDS, sampling_params={"skip_special_tokens": False, "stop": [" = 9"]})
    growing = writer.growing(0)
    growing.add(chunk(REQUEST, WORDS.token_ids("98 + 25 =")))
    assert growing.answer()["text"] == "98 + 25"
    growing.add(chunk(REQUEST, WORDS.token_ids(" 8")))
    assert growing.answer()["text"] == "98 + 25 = 8"


def test_no_text_is_held_back_within_min_tokens() -> None:
    params = {"skip_special_tokens": False, "stop": ["9", "8 +"], "min_new_tokens": 2}
    growing = answers(WORDS, sampling_params=params).growing(0)
    texts = []
    for token_id in WORDS.token_ids("98 + 298"):
        growing.add(chunk(REQUEST, (token_id,)))
        texts.append(growing.answer()["text"])
    assert texts[:4] == ["9", "98", "98 +", "98 + "]
    assert texts[-1] == "98 + 2"


def test_an_incomplete_character_is_held_back() -> None:
    writer = answers(WORDS, sampling_params={"no_stop_trim": True})
    growing = writer.growing(0)
    texts = []
    token_ids = WORDS.token_ids("a\N{GRINNING FACE}")
    for token_id in token_ids:
        growing.add(chunk(REQUEST, (token_id,)))
        texts.append(growing.answer()["text"])
    assert len(texts) > 2
    assert set(texts) == {"a", "a\N{GRINNING FACE}"}


@settings(deadline=None)
@given(tokens, stops, ends, sizes, st.integers(0, 60), st.booleans(), st.booleans())
def test_a_streamed_sample_ends_as_the_whole_one(
    token_ids: list[int],
    stop: tuple[str, ...],
    end: RowFinish,
    cuts: list[int],
    number: int,
    skips: bool,
    trims: bool,
) -> None:
    made = make(token_ids, stop, end)
    params = {"stop": list(stop), "skip_special_tokens": skips, "no_stop_trim": not trims}

    def writer() -> PromptWriter:
        return answers(WORDS, return_logprob=True, sampling_params=params)

    streamed = writer()
    growing = streamed.growing(0)
    for each in joined(made.chunks, cuts)[:number]:
        growing.add(each)
        growing.answer()
    assert told(streamed, made.sample) == told(writer(), made.sample)
