"""Logprobs of prompts: the executor against Transformers' own logits."""

from __future__ import annotations

import random
from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from nano_inference.bus.messages import PromptLogprobs, SequenceSpec, StepResult
from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, wrap_model

from ..models import VOCAB, make_model
from ..plans import Generation, Planner, new_sequence, step_plan

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=8)
PROMPT = [17, 3, 99, 42, 8, 150, 77, 31, 5, 61, 17, 17, 2]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap_model(make_model("qwen2"), 64)


def table_of(tokens: list[int], temperature: float = 1.0) -> Tensor:
    """`[tokens - 1, vocab]`, log_softmax at each place but the last."""
    with torch.no_grad():
        logits = make_model("qwen2")(torch.tensor([tokens])).logits[0, :-1].double()
    return (logits / temperature).log_softmax(-1)


def of_sequence(results: list[StepResult], seq_id: int = 1) -> list[PromptLogprobs]:
    return [
        found for result in results for found in result.prompt_logprobs if found.seq_id == seq_id
    ]


def holds(found: list[PromptLogprobs], prompt: list[int], count: int, temperature: float) -> None:
    """The reports, put together, are what Transformers gives."""
    table = table_of(prompt, temperature)
    logprobs: list[float] = []
    tops = []
    for part in found:
        assert part.start == len(logprobs) + 1
        logprobs += part.logprobs
        tops += part.top_logprobs
    expected = table[torch.arange(len(prompt) - 1), prompt[1:]]
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert len(tops) == (len(prompt) - 1 if count else 0)
    for place, top in enumerate(tops):
        values, ids = table[place].topk(count)
        assert [token_id for token_id, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_equal_transformers_in_chunks_and_in_company(
    model: LoadedModel, chunk: int, count: int, mode: Literal["processed", "raw"]
) -> None:
    config = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, logprobs_mode=mode)
    rng = random.Random(chunk)
    scored = SamplingParams(
        temperature=0.6,
        max_tokens=5,
        prompt_logprobs=count,
        # None of this is for prompts.
        repetition_penalty=2.0,
        logit_bias={17: 50.0},
        min_tokens=3,
        stop_token_ids=frozenset({3}),
    )
    plain = SamplingParams(max_tokens=9)
    greedy = SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=count)
    generations = [
        Generation(1, PROMPT, scored, arrives=2),
        Generation(2, [rng.randrange(VOCAB) for _ in range(20)], plain),
        Generation(3, PROMPT[2:], greedy),
        Generation(4, [rng.randrange(VOCAB) for _ in range(3)], plain, arrives=1),
    ]
    planner = Planner(ExecutorCore(config, model=model), chunk=chunk, shuffle=chunk)
    planner.run(generations)
    temperature = 0.6 if mode == "processed" else 1.0
    holds(of_sequence(planner.results, 1), PROMPT, count, temperature)
    holds(of_sequence(planner.results, 3), PROMPT[2:], count, 1.0)
    assert {f.seq_id for r in planner.results for f in r.prompt_logprobs} == {1, 3}


def test_scoring_changes_no_sample(model: LoadedModel) -> None:
    found = []
    for wanted in (None, 3):
        sampling = SamplingParams(max_tokens=8, prompt_logprobs=wanted)
        generation = Generation(1, PROMPT, sampling, seed=4)
        Planner(ExecutorCore(CONFIG, model=model), chunk=4).run([generation])
        found.append((generation.token_ids, generation.logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_a_completion_scored_as_a_prompt_has_the_logprobs_it_was_sampled_with(
    model: LoadedModel, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=12, prompt_logprobs=0)
    sampled = Generation(1, PROMPT, sampling, seed=7)
    Planner(ExecutorCore(CONFIG, model=model)).run([sampled])
    again = Generation(1, PROMPT + sampled.token_ids, sampling)
    planner = Planner(ExecutorCore(CONFIG, model=model), chunk=5)
    planner.run([again])
    scored = [value for part in of_sequence(planner.results) for value in part.logprobs]
    assert scored[len(PROMPT) - 1 :] == pytest.approx(sampled.logprobs, abs=1e-4)


def test_only_the_first_sample_scores_and_only_until_it_has_sampled(model: LoadedModel) -> None:
    core = ExecutorCore(CONFIG, model=model)
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=1)
    first = new_sequence(1, PROMPT, range(4), sampling)
    sibling = msgspec.structs.replace(first, sample=SequenceSpec(1, 1, 0))
    resumed = new_sequence(2, PROMPT, range(4, 8), sampling, num_generated=2)
    new = (sibling, resumed)
    result = core.execute(step_plan(new=new, rows=dict.fromkeys((1, 2), len(PROMPT))))
    assert result.prompt_logprobs == ()
    assert len(result.seq_ids) == 2


def test_a_prompt_of_one_token_has_none(model: LoadedModel) -> None:
    core = ExecutorCore(CONFIG, model=model)
    new = new_sequence(1, [5], range(4), SamplingParams(prompt_logprobs=1))
    result = core.execute(step_plan(new=(new,), rows={1: 1}))
    assert result.prompt_logprobs == ()
    assert len(result.seq_ids) == 1


def test_of_a_broken_model_there_are_none() -> None:
    module = make_model("qwen2")
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    core = ExecutorCore(CONFIG, model=wrap_model(module, 64))
    new = new_sequence(1, PROMPT, range(4), SamplingParams(prompt_logprobs=0))
    with pytest.raises(ModelError, match="not finite"):
        core.execute(step_plan(new=(new,), rows={1: 5}))
