"""The engine for Python callers: the same answers and the same refusals as the pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from nano_inference import InferenceEngine, RequestError, SamplingParams

from . import reference

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine() as engine:
        yield engine


def test_greedy_text_prompts_equal_transformers(engine: InferenceEngine) -> None:
    prompts = [f"{i} + {3 * i} =" for i in range(24)]
    for prompt, sample in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        prompt_ids = reference.tokenizer().encode(prompt)
        assert list(sample.prompt_tokens) == prompt_ids
        assert list(sample.completion_tokens) == reference.generate(prompt_ids, 24)
        wanted = reference.logprobs(prompt_ids, list(sample.completion_tokens))
        assert sample.logprobs == pytest.approx(wanted, abs=1e-4)


def test_results_come_in_order_of_prompts_then_samples(engine: InferenceEngine) -> None:
    prompts = [[40 + i, 50, 60] for i in range(5)]
    params = [SamplingParams(max_tokens=3 + 5 * (4 - i), seed=i) for i in range(5)]
    samples = engine.generate(prompts, params, num_samples_per_prompt=3)
    assert [list(sample.prompt_tokens) for sample in samples] == [p for p in prompts for _ in "abc"]
    again = engine.generate(prompts, params, num_samples_per_prompt=3)
    assert [s.completion_tokens for s in again] == [s.completion_tokens for s in samples]


def test_step_by_step(engine: InferenceEngine) -> None:
    ids = [engine.add_request("12 + 30 =", GREEDY), engine.add_request("1 + 1 =", GREEDY)]
    finished = []
    while engine.has_pending():
        finished += engine.step()
    assert len(ids) == len(finished) == 2
    assert {sample.finish_reason for sample in finished} == {"stop"}


def test_abort_leaves_the_others_alone(engine: InferenceEngine) -> None:
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    aborted = engine.add_request("7 + 7 =", endless)
    engine.add_request("12 + 30 =", GREEDY)
    engine.step()
    engine.abort(aborted)
    finished = []
    while engine.has_pending():
        finished += engine.step()
    (sample,) = finished
    assert list(sample.prompt_tokens) == reference.tokenizer().encode("12 + 30 =")
    engine.step()
    assert engine._batching.idle


@pytest.mark.parametrize(
    ("prompt", "params", "code"),
    [
        ("", GREEDY, "empty_prompt"),
        ([], GREEDY, "empty_prompt"),
        ([10**6], GREEDY, "invalid_token_ids"),
        ("1 + 1 =", SamplingParams(max_tokens=0), "invalid_max_tokens"),
        ("1 + 1 =", SamplingParams(temperature=math.nan), "invalid_temperature"),
        ("1 + 1 =", SamplingParams(temperature="hot"), "invalid_request"),  # type: ignore[arg-type]
    ],
)
def test_a_refused_prompt_leaves_nothing_behind(
    engine: InferenceEngine, prompt: str | list[int], params: SamplingParams, code: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.generate(["2 + 2 =", prompt], [GREEDY, params])
    assert refused.value.code == code
    assert not engine.has_pending()
    assert len(engine.generate(["2 + 2 ="], GREEDY)) == 1


def test_as_many_parameters_as_prompts(engine: InferenceEngine) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 sampling_params"):
        engine.generate(["1 + 1 =", "2 + 2 ="], [GREEDY])
