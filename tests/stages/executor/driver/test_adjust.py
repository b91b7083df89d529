"""Penalties and limits against the documented steps, token by token, and against Transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, LoadedModel, uniform
from nano_inference.stages.executor.driver.choose import (
    adjust_logits,
    apply_presence_penalty,
    apply_repetition_penalty,
)
from nano_inference.stages.executor.driver.sequences import Places, SequenceTable

from ....soaking import in_soak
from ..models import VOCAB, make_model
from ..plans import PROMPT, Generation, Planner, new_sequence, step_plan
from .test_sampling import brute_force


@pytest.mark.parametrize("penalty", [0.7, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 37, generator=generator) * 3
    logits[2, 5] = float("-inf")
    ids = torch.randint(0, 37, (9, 20), generator=generator)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    found = apply_repetition_penalty(logits, ids, torch.full((9,), penalty))
    assert torch.equal(found, expected)


def test_a_row_without_generated_tokens_has_no_presence_penalty() -> None:
    """Its padding is no token of its own."""
    ids, valid = torch.tensor([[3, 5], [4, 4]]), torch.tensor([[True, True], [False, False]])
    found = apply_presence_penalty(torch.zeros(2, 9), ids, valid, torch.full((2,), 0.5))
    assert found.nonzero().tolist() == [[0, 3], [0, 5]]


CONFIG = EngineConfig(block_size=4, kv_cache_bytes=1 << 20, max_batch_size=8)
SAMPLES = 6000


def adjusted(logits: Tensor, prompt: list[int], generated: list[int], p: SamplingParams) -> Tensor:
    """The steps of docs/sampling.md up to the temperature, token by token, `[vocab]` float64."""
    out: list[float] = logits.double().tolist()
    for token in {*prompt, *generated}:
        penalty = p.repetition_penalty
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    for token in set(generated):
        out[token] -= p.presence_penalty
        out[token] -= p.frequency_penalty * generated.count(token)
    for token, bias in p.logit_bias.items():
        out[token] += bias
    if len(generated) < p.min_tokens:
        for token in p.stop_token_ids:
            out[token] = -math.inf
    return torch.tensor(out, dtype=torch.float64)


def restricted(logits: Tensor, p: SamplingParams) -> Tensor:
    """Probabilities after temperature and limits, `[vocab]`."""
    scaled = logits / p.temperature
    allowed = sorted(brute_force(scaled.tolist(), p.top_k, p.top_p, p.min_p))
    out = torch.zeros_like(scaled)
    out[allowed] = scaled.softmax(-1)[allowed]
    return out / out.sum()


def model_logits(tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = make_model("qwen2")(torch.tensor([tokens])).logits[0]
    return logits


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
    "frequency_penalty": -0.4,
    "logit_bias": {17: 1.5, 40: -2.0, 99: 3.0},
    "min_tokens": 5,
    "stop_token_ids": frozenset({5, 60, 99}),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_tokens_and_logprobs_follow_the_steps(
    model: LoadedModel, temperature: float, mode: Any
) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=14, logprobs=6, **EVERYTHING)
    core = ExecutorCore(
        EngineConfig(block_size=4, kv_cache_bytes=1 << 20, logprobs_mode=mode), model=model
    )
    generation = Generation(1, PROMPT, sampling, seed=3)
    planner = Planner(core, chunk=7)
    planner.run([generation])
    tokens = generation.token_ids
    tops = [top for result in planner.results for top in result.top_logprobs]
    raw = model_logits(PROMPT + tokens)[len(PROMPT) - 1 : -1]
    assert len(tokens) == len(tops) >= 5
    for place, token in enumerate(tokens):
        logits = adjusted(raw[place], PROMPT, tokens[:place], sampling)
        scaled = logits / (temperature or 1)
        running = scaled.softmax(-1).cumsum(-1)
        expected = int(logits.argmax())
        if temperature:
            expected = int(torch.searchsorted(running, torch.tensor([uniform(3, place)]).double()))
        assert token == expected
        reported = (scaled if mode == "processed" else raw[place].double()).log_softmax(-1)
        assert generation.logprobs[place] == pytest.approx(float(reported[token]), abs=1e-4)
        values, ids = reported.topk(6)
        assert [token_id for token_id, _ in tops[place]] == ids.tolist()
        assert [value for _, value in tops[place]] == pytest.approx(values.tolist(), abs=1e-4)


def test_rows_without_penalties_keep_their_bits_and_share_the_memory() -> None:
    table = SequenceTable(4, 64, 4)
    for number, options in enumerate(({}, EVERYTHING, {})):
        table.add(new_sequence(number, PROMPT, (0, 1, 2), SamplingParams(**options)))
    rows = table.rows_of((0, 1, 2))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    found = adjust_logits(logits, table, Places.next_of(rows))
    assert torch.equal(logits, before), "the model's own logits stay as they are"
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert not torch.equal(found[1], logits[1])
    plain = logits[[0, 2]]
    assert adjust_logits(plain, table, Places.next_of(rows[[0, 2]])) is plain


def test_a_row_that_is_used_again_forgets_its_sampling() -> None:
    table = SequenceTable(1, 64, 4)
    table.add(new_sequence(1, PROMPT, (0, 1, 2), SamplingParams(prompt_logprobs=2, **EVERYTHING)))
    table.remove(1)
    table.add(new_sequence(2, PROMPT, (0, 1, 2), SamplingParams()))
    rows = table.rows_of((2,))
    logits = torch.randn(1, VOCAB)
    assert adjust_logits(logits, table, Places.next_of(rows)) is logits
    assert not table.scores[rows].any()


# --- the distribution of many samples ---------------------------------------------------------


def limit_of(degrees: int) -> float:
    """The 99.9 % quantile of chi-square (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.09 * math.sqrt(spread)) ** 3)


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; values expected less than 5 times are joined."""
    expected = probabilities * counts.sum()
    often = expected >= 5
    groups = [(float(counts[often][i]), float(e)) for i, e in enumerate(expected[often])]
    rest = float(expected[~often].sum())
    if rest > 0.5:
        groups.append((float(counts[~often].sum()), rest))
    return sum((c - e) ** 2 / e for c, e in groups), max(len(groups) - 1, 1)


def draw(model: LoadedModel, sampling: SamplingParams, generated: list[int]) -> Tensor:
    """Return the counts of each next token, `[vocab]`, over SAMPLES seeds.

    The rows share their blocks: all write the same key and value to the same place.
    """
    config = EngineConfig(
        block_size=4, kv_cache_bytes=1 << 20, max_batch_size=SAMPLES, max_tokens_per_batch=SAMPLES
    )
    core = ExecutorCore(config, model=model)
    tokens = PROMPT + generated
    first = new_sequence(SAMPLES, tokens, range(4), sampling, num_generated=len(generated))
    core.execute(step_plan(new=(first,), rows={SAMPLES: len(tokens)}))
    new = tuple(
        new_sequence(
            seed,
            tokens,
            range(4),
            sampling,
            num_generated=len(generated),
            num_cached=len(tokens) - 1,
            seed=seed,
        )
        for seed in range(SAMPLES)
    )
    rows = dict.fromkeys(range(SAMPLES), 1)
    result = core.execute(step_plan(2, new=new, rows=rows, finished=(SAMPLES,)))
    return torch.tensor(result.token_ids).bincount(minlength=VOCAB).double()


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.9,
    "frequency_penalty": 0.5,
    "logit_bias": {17: 2.5, 40: 4.0, 99: -3.0, 8: 1.0},
}


@pytest.mark.parametrize(
    "options",
    [
        in_soak({"temperature": 0.6}),
        {"temperature": 1.0},
        in_soak({"temperature": 1.7}),
        in_soak({"top_k": 12, "temperature": 1.4}),
        {"top_p": 0.7, "temperature": 1.4},
        in_soak({"min_p": 0.08, "temperature": 1.4}),
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 2.0},
        in_soak({**PENALTIES, "temperature": 1.5}),
        in_soak({**PENALTIES, "temperature": 1.5, "top_k": 15}),
        in_soak({**PENALTIES, "temperature": 1.5, "top_p": 0.8}),
        in_soak({**PENALTIES, "temperature": 1.5, "min_p": 0.05}),
    ],
    ids=str,
)
def test_many_samples_follow_the_exact_probabilities(
    model: LoadedModel, options: dict[str, Any]
) -> None:
    generated = [40, 17, 40, 40, 88]
    sampling = SamplingParams(max_tokens=50, **options)
    logits = model_logits(PROMPT + generated)[-1]
    exact = restricted(adjusted(logits, PROMPT, generated, sampling), sampling)
    counts = draw(model, sampling, generated)
    assert int(counts.sum()) == SAMPLES
    assert float(counts[exact == 0].sum()) == 0
    statistic, degrees = chi_square(counts, exact)
    assert degrees >= 3
    assert statistic < limit_of(degrees)
    # The samples do not fit the distribution without any one of the parameters.
    for name in options:
        other = SamplingParams(max_tokens=50, **{k: v for k, v in options.items() if k != name})
        wrong = restricted(adjusted(logits, PROMPT, generated, other), other)
        if not torch.allclose(wrong, exact, atol=0.01):
            statistic, degrees = chi_square(counts, wrong.clamp(min=1e-9))
            assert statistic > limit_of(degrees), name
