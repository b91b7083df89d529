"""Logprobs against a full log_softmax in float64."""

from __future__ import annotations

import json
import random
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.bus.messages import SequenceSpec
from nano_inference.bus.parts.scoring import PromptLogprobs
from nano_inference.bus.steps import StepResult
from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import (
    ExecutorCore,
    LoadedModel,
    sample_with_logprobs,
)
from nano_inference.stages.executor.driver.logprobs import (
    LOWEST,
    gather_logprobs,
    report_top_logprobs,
    top_token_ids,
)

from ....sections import prompt_logprobs_of
from ....soaking import in_soak
from ..models import VOCAB, make_model
from ..plans import Generation, Planner, new_sequence, step_plan


def test_gathered_logprobs_are_those_of_the_full_softmax() -> None:
    """With more rows than are taken together, and a vocabulary that no block divides."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(150, 5000, generator=generator) * 5
    temperatures = torch.tensor([0.0, 0.5, 1.0, 2.0, 30.0] * 30)
    ids = torch.randint(0, 5000, (150, 4), generator=generator)
    found = gather_logprobs(logits, temperatures, ids)
    divisors = torch.where(temperatures == 0, 1.0, temperatures).double()[:, None]
    expected = (logits.double() / divisors).log_softmax(-1).gather(1, ids)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_no_rows_give_no_logprobs() -> None:
    empty = gather_logprobs(torch.zeros(0, 9), torch.zeros(0), torch.zeros(0, 1, dtype=torch.long))
    assert empty.shape == (0, 1)


def test_broken_logits_give_no_logprobs() -> None:
    logits = torch.zeros(3, 9)
    logits[1, 2] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        gather_logprobs(logits, torch.ones(3), torch.zeros(3, 1, dtype=torch.long))


def test_an_impossible_token_has_a_number_that_json_can_say() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    found = gather_logprobs(logits, torch.ones(1), torch.tensor([[1]])).item()
    assert found == LOWEST
    assert json.loads(json.dumps(found)) == np.finfo(np.float32).min


@pytest.mark.soak
@given(
    # Few distinct values, so that ties are common.
    logits=st.lists(
        st.lists(st.integers(-3, 3).map(lambda n: n / 2), min_size=12, max_size=12),
        min_size=1,
        max_size=5,
    ),
    count=st.integers(1, 12),
)
def test_the_likeliest_come_first_and_equal_ones_by_id(
    logits: list[list[float]], count: int
) -> None:
    expected = [sorted(range(12), key=lambda token: (-row[token], token))[:count] for row in logits]
    assert top_token_ids(torch.tensor(logits), count).tolist() == expected


def test_impossible_tokens_come_last() -> None:
    logits = torch.tensor([[float("-inf"), 2.0, float("-inf"), 3.0]])
    assert top_token_ids(logits, 4).tolist() == [[3, 1, 0, 2]]
    ((*_, last),) = report_top_logprobs(logits, torch.ones(1), np.array([4]))
    assert last == (2, LOWEST)


def test_each_row_gets_its_number_of_top_logprobs() -> None:
    logits = torch.randn(200, 700, generator=torch.Generator().manual_seed(2))
    counts = np.arange(200) % 8
    found = report_top_logprobs(logits, torch.full((200,), 0.7), counts)
    table = (logits.double() / 0.7).log_softmax(-1)
    for row, count in enumerate(counts):
        values, ids = table[row].topk(int(count))
        assert [token for token, _ in found[row]] == ids.tolist()
        assert [value for _, value in found[row]] == pytest.approx(values.tolist(), abs=1e-5)
    assert report_top_logprobs(logits, torch.ones(200), np.zeros(200, np.int64)) == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_sampled_tokens_logprob_is_the_same_number_in_both_places(temperature: float) -> None:
    logits = torch.randn(40, 1500, generator=torch.Generator().manual_seed(3)) * 4
    temperatures = torch.full((40,), temperature)
    torch.manual_seed(1)
    tokens, logprobs = sample_with_logprobs(logits, temperatures)
    found = report_top_logprobs(logits, temperatures, np.full(40, 20))
    met = [
        (dict(top)[token], logprob)
        for top, token, logprob in zip(found, tokens.tolist(), logprobs.tolist(), strict=True)
        if token in dict(top)
    ]
    assert len(met) > 20
    assert all(one == other for one, other in met)


CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=8)
PROMPT = [17, 3, 99, 42, 8, 150, 77, 31, 5, 61, 17, 17, 2]


def table_of(tokens: list[int], temperature: float = 1.0) -> Tensor:
    """`[tokens - 1, vocab]`, log_softmax at each place but the last."""
    with torch.no_grad():
        logits = make_model("qwen2")(torch.tensor([tokens])).logits[0, :-1].double()
    return (logits / temperature).log_softmax(-1)


def of_sequence(results: list[StepResult], seq_id: int = 1) -> list[PromptLogprobs]:
    return [
        found
        for result in results
        for found in prompt_logprobs_of(result)
        if found.seq_id == seq_id
    ]


def holds(found: list[PromptLogprobs], prompt: list[int], count: int, temperature: float) -> None:
    """The joined reports equal the logprobs of Transformers."""
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


@pytest.mark.parametrize(
    ("chunk", "count"),
    [
        (1, 4),
        (7, 4),
        (64, 0),
        *(in_soak(each, 0) for each in (1, 2, 7)),
        in_soak(2, 4),
        in_soak(64, 4),
    ],
)
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
    assert {f.seq_id for r in planner.results for f in prompt_logprobs_of(r)} == {1, 3}


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
    assert prompt_logprobs_of(result) == ()
    assert len(result.seq_ids) == 2


def test_a_prompt_of_one_token_has_none(model: LoadedModel) -> None:
    core = ExecutorCore(CONFIG, model=model)
    new = new_sequence(1, [5], range(4), SamplingParams(prompt_logprobs=1))
    result = core.execute(step_plan(new=(new,), rows={1: 1}))
    assert prompt_logprobs_of(result) == ()
    assert len(result.seq_ids) == 1
