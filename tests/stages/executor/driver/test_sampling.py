"""The sampler: its distribution, logprobs and limits, and independence of anything else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nano_inference.config import ModelError, RequestError
from nano_inference.stages.executor import sample_with_logprobs, uniform
from nano_inference.stages.executor.driver.logprobs import scale_logits
from nano_inference.stages.executor.driver.sampling import (
    Limits,
    _restrict,
    sample_rows,
    sample_within,
    uniforms,
)

from ..recorder import OperationRecorder
from ..refusals import refused

BIG_VOCAB = 151_936


def even_uniforms(count: int) -> Tensor:
    """Numbers spread evenly over [0, 1): samples with them have nearly no noise."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def draw(
    logits: Tensor, us: Tensor, temperature: float = 1.0, **limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Samples the one row of logits once for each uniform."""
    rows = logits.expand(len(us), -1)
    temperatures = torch.full((len(us),), temperature)
    limits = {name: value.expand(len(us)) for name, value in limits.items()}
    return sample_with_logprobs(rows, temperatures, uniforms=us, **limits)


# --- the distribution -------------------------------------------------------------------------


def test_the_probability_of_each_token_is_exact() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    tokens, _ = draw(probabilities.log(), even_uniforms(1600))
    assert tokens.bincount().tolist() == [800, 400, 200, 100, 100]


def test_the_tail_of_a_large_vocabulary_is_sampled() -> None:
    """One token of half the mass, the rest spread so thin that float32 sums would lose it."""
    logits = torch.zeros(BIG_VOCAB)
    logits[7] = math.log(BIG_VOCAB - 1)
    tokens, logprobs = draw(logits, even_uniforms(64))
    assert int((tokens == 7).sum()) == 32
    others = tokens[tokens != 7]
    spread = (torch.arange(1, 64, 2) / 64 * BIG_VOCAB)[-len(others) :]
    assert bool((others[1:] > others[:-1]).all())
    assert float((others[1:].double() - spread[1:]).abs().max()) < BIG_VOCAB / 32
    assert float((others.double()[1:].diff() - BIG_VOCAB / 32).abs().max()) < 2
    expected = torch.where(tokens == 7, math.log(0.5), -math.log(2 * (BIG_VOCAB - 1)))
    assert torch.allclose(logprobs, expected.float(), atol=1e-4)


@pytest.mark.parametrize("vocab", [2, 511, 512, 513, 1024, 5000, BIG_VOCAB])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_range_give_tokens_that_can_be_chosen(vocab: int, u: float) -> None:
    logits = torch.full((1, vocab), float("-inf"))
    allowed = [vocab // 3, vocab // 2]
    logits[0, allowed] = torch.tensor([-3.0, 2.0])
    token, logprob = draw(logits, torch.tensor([u], dtype=torch.float64))
    assert int(token) == allowed[0 if u == 0.0 else -1]
    assert math.isfinite(float(logprob))


def test_tokens_of_probability_zero_are_never_chosen() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, BIG_VOCAB, generator=generator) * 20
    logits[torch.rand(logits.shape, generator=generator) < 0.5] = float("-inf")
    us = torch.tensor([0.0, 1e-300, 0.5, 1 - 2**-53] * 4, dtype=torch.float64)
    tokens, logprobs = sample_with_logprobs(logits, torch.ones(16), uniforms=us)
    assert torch.isfinite(logits.gather(1, tokens[:, None])).all()
    assert torch.isfinite(logprobs).all()


def test_without_uniforms_the_default_generator_is_used() -> None:
    logits, ones = torch.randn(8, 50), torch.ones(8)
    torch.manual_seed(5)
    first = sample_with_logprobs(logits, ones)[0]
    torch.manual_seed(5)
    assert torch.equal(sample_with_logprobs(logits, ones)[0], first)
    assert not torch.equal(sample_with_logprobs(logits, ones)[0], first)


# --- greedy, temperature, broken logits -------------------------------------------------------


def test_temperature_zero_is_greedy_with_the_logprob_of_one() -> None:
    logits = torch.randn(5, 300)
    expected = logits.log_softmax(-1).max(-1)
    tokens, logprobs = sample_with_logprobs(logits, torch.zeros(5))
    assert torch.equal(tokens, expected.indices)
    assert torch.allclose(logprobs, expected.values, atol=1e-5)


def test_of_equal_logits_greedy_takes_the_first() -> None:
    logits = torch.zeros(1, 1000)
    logits[0, [400, 700, 999]] = 3.0
    assert sample_with_logprobs(logits, torch.zeros(1))[0].tolist() == [400]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 3e38])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([-1e4, 5.0, 1e4, 9.0])
    tokens, logprobs = draw(logits, even_uniforms(8), temperature)
    assert torch.isfinite(logprobs).all()
    assert tokens.tolist() == [2] * 8 if temperature < 1 else len(set(tokens.tolist())) > 2


@pytest.mark.parametrize("wrong", [-1.0, -1e-9, float("nan"), float("inf")])
def test_invalid_temperatures_are_refused(wrong: float) -> None:
    with refused("invalid_temperature", "must be 0"):
        sample_with_logprobs(torch.zeros(2, 9), torch.tensor([1.0, wrong]))


@pytest.mark.parametrize("name", ["temperatures", "uniforms", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1)])
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """torch would repeat it."""
    columns = {"temperatures": torch.ones(2), name: torch.full(shape, 0.5)}
    with pytest.raises(RequestError, match=rf"{name} has the shape .* it must be \(2,\)"):
        sample_with_logprobs(torch.zeros(2, 9), **columns)


@pytest.mark.parametrize("logits", [torch.zeros(9), torch.zeros(1, 2, 9), torch.ones(2, 9).long()])
def test_invalid_logits_are_refused(logits: Tensor) -> None:
    with pytest.raises(RequestError, match=r"must be \[batch, vocab\] floats"):
        sample_with_logprobs(logits, torch.ones(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 100)
    logits[1, 4] = bad
    with pytest.raises(ModelError, match="not finite"):
        sample_with_logprobs(logits, torch.full((3,), temperature))
    with pytest.raises(ModelError, match="not finite"):
        sample_with_logprobs(torch.full((1, 9), float("-inf")), torch.ones(1))


# --- limits -----------------------------------------------------------------------------------


def brute_force(logits: Sequence[float], k: int, p: float, m: float) -> set[int]:
    """The tokens that the limits leave, by the definition in the docstring."""
    weights = torch.tensor(logits).sub(max(logits)).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if k > 0:
        order = order[:k]
    total = sum(weights[token] for token in order)
    allowed, reached = [], 0.0
    for token in order:
        if allowed and ((p < 1 and reached >= p * total) or weights[token] < m):
            break
        allowed.append(token)
        reached += weights[token]
    return set(allowed)


@pytest.mark.soak
@given(
    # Few distinct values, so that ties are common, as they are among bfloat16 logits.
    logits=st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=1, max_size=40),
    k=st.integers(0, 45),
    p=st.sampled_from([0.0, 0.1, 0.3, 0.51, 0.77, 0.93, 0.999, 1.0]),
    m=st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]),
)
def test_limits_keep_the_tokens_of_their_definition(
    logits: list[float], k: int, p: float, m: float
) -> None:
    tokens, logprobs = draw(
        torch.tensor(logits),
        even_uniforms(1000),
        top_k=torch.tensor(k),
        top_p=torch.tensor(p, dtype=torch.float64),
        min_p=torch.tensor(m),
    )
    allowed = brute_force(logits, k, p, m)
    weights = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    mass = float(sum(weights[token] for token in allowed))
    likely = {token for token in allowed if float(weights[token]) / mass > 2 / 1000}
    assert likely <= set(tokens.tolist()) <= allowed
    assert torch.allclose(logprobs.double(), weights.log()[tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("k", "p", "m"),
    [(3000, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.3), (2500, 0.95, 0.4), (5, 0.9, 0)],
)
def test_limits_beyond_the_candidates_that_are_looked_at_first(k: int, p: float, m: float) -> None:
    logits = torch.randn(1, 4096, generator=torch.Generator().manual_seed(3)) / 4
    share = torch.tensor([p], dtype=torch.float64)
    limits = Limits(torch.tensor([k]), share, torch.tensor([m]))
    restricted = _restrict(scale_logits(logits, torch.ones(1)), limits)
    assert restricted is not None
    kept = restricted.weights[0].nonzero()[:, 0]
    allowed = brute_force(logits[0].tolist(), k, p, m)
    assert len(set(kept.tolist()) ^ allowed) <= 1, "up to rounding at the very edge"
    mass = logits[0].double().softmax(-1)[kept].sum()
    assert float(restricted.log_shares) == pytest.approx(float(mass.log()), abs=1e-7)


# --- independence -----------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, 3000, generator=generator).bfloat16().float()
    columns = {
        "temperatures": torch.tensor([0.0, 1.0, 0.7] * 4),
        "uniforms": torch.rand(12, dtype=torch.float64, generator=generator),
        "top_k": torch.tensor([0, 0, 7, 2000] * 3),
        "top_p": torch.tensor([1.0, 0.5, 1.0, 0.99, 0.9, 1.0] * 2, dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.1] * 3),
    }
    whole = choose(logits, **columns)
    assert len(whole) == 3
    for rows in ([0], [1], [2], [5, 3], [11, 7, 0], list(range(11, -1, -1))):
        some = choose(logits[rows], **{name: column[rows] for name, column in columns.items()})
        for found, wanted in zip(some, whole, strict=True):
            assert torch.equal(found, wanted[rows])


def test_the_choice_in_fixed_shapes_has_the_same_bits_and_never_waits() -> None:
    generator = torch.Generator().manual_seed(5)
    many, vocab = 70, 3000

    def numbers(seed: int) -> list[Tensor]:
        order = torch.randperm(many, generator=generator.manual_seed(seed))
        # Coarse, so that equal ones are common, and in float32 not.
        coarse = (torch.randn(many, vocab, generator=generator) * 2).round() / 2
        fine = torch.randn(many, vocab, generator=generator) * 3
        repeated = (
            torch.tensor([0.0, 1.0, 0.7, 2.5, 1.0]),
            torch.tensor([0, 0, 7, 2000, 0, 1, -1]),
            torch.tensor([1.0, 0.5, 0.99, 1.0, 0.9, 0.0], dtype=torch.float64),
            torch.tensor([0.0, 0.0, 0.0, 0.1], dtype=torch.float64),
        )
        temperatures, *limits = (each.repeat(many)[order] for each in repeated)
        uniforms = torch.rand(many, dtype=torch.float64, generator=generator)
        logits = torch.where((order % 2 == 0)[:, None], coarse, fine)
        logits[order % 3 == 0, 100:2900] = float("-inf")
        return [logits, temperatures, uniforms, *limits]

    buffers = numbers(0)

    @torch.inference_mode()
    def step() -> tuple[Tensor, ...]:
        return sample_within(*buffers[:3], Limits(*buffers[3:]))

    recorded = OperationRecorder()(step)
    for seed in range(3):
        new = numbers(seed)
        for buffer, values in zip(buffers, new, strict=True):
            buffer.copy_(values)
        names = "top_k", "top_p", "min_p"
        wanted = choose(*new[:3], **dict(zip(names, new[3:], strict=True)))
        for found, expected in zip(recorded(), wanted, strict=True):
            assert torch.equal(found, expected)
    buffers[0][3] = float("nan")
    tokens, logprobs, _ = recorded()
    assert logprobs[3].isnan()
    assert 0 <= int(tokens[3]) < vocab
    assert logprobs.isfinite().sum() == many - 1


def choose(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, **limits: Tensor
) -> tuple[Tensor, ...]:
    """Tokens, logprobs and log S, as the engine makes them."""
    choice = sample_rows(logits, temperatures, uniforms, Limits(**limits), kernels=False)
    assert choice.support_logprobs is not None
    return choice.tokens, choice.logprobs, choice.support_logprobs


# --- log S ------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=700),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    k=st.sampled_from([0, 1, 3, 40]),
    p=st.sampled_from([0.2, 0.9, 0.999, 1.0]),
    m=st.sampled_from([0.0, 0.05, 0.9]),
)
def test_log_s_is_the_mass_that_the_limits_leave(
    logits: list[float], temperature: float, k: int, p: float, m: float
) -> None:
    """It is that of the kept tokens in float64, and 0 to the bit where all are kept."""
    row, scaled = torch.tensor([logits]), torch.tensor([logits]) / (temperature or 1)
    limits = {
        "top_k": torch.tensor([k]),
        "top_p": torch.tensor([p], dtype=torch.float64),
        "min_p": torch.tensor([m]),
    }
    number = torch.tensor([0.5], dtype=torch.float64)
    token, logprob, support = choose(row, torch.tensor([temperature]), number, **limits)
    if not temperature:
        # The one token that greedy sampling can choose.
        assert float(support) == float(logprob)
        return
    kept = range(len(logits))
    if k or p < 1 or m:
        found = _restrict(scale_logits(row, torch.tensor([temperature])), Limits(**limits))
        if found is not None:
            kept = found.weights[0].nonzero()[:, 0].tolist()
    exact = scaled[0].double().softmax(-1)
    assert int(token) in kept
    if len(kept) == len(logits):
        assert float(support) == 0.0
    else:
        assert float(support) == pytest.approx(float(exact[kept].sum().log()), rel=1e-5, abs=1e-7)
    restricted = exact[int(token)] / exact[kept].sum()
    assert float(logprob - support) == pytest.approx(float(restricted.log()), abs=2e-6)


def test_uniform_is_a_function_of_seed_and_position() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 12345], np.uint64)
    positions = np.array([0, 5, 9, 100_000])
    together = uniforms(seeds, positions)
    alone = [uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert uniform(-1, 9) == uniform(2**64 - 1, 9)
    # Fixed for good: another number would change every seeded sample.
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(12345, 100_000) == (split_mix(split_mix(12345), 100_000) >> 11) / 2**53


def split_mix(state: int, steps: int = 0) -> int:
    """SplitMix64's output after `steps` earlier ones, in plain integers."""
    z = (state + (steps + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("axis", ["seeds", "positions", "diagonal"])
def test_uniforms_are_uniform_and_unrelated(axis: str) -> None:
    count = 1 << 16
    numbers = np.arange(count)
    fixed = np.full(count, 42)
    seeds = fixed if axis == "positions" else numbers
    positions = fixed if axis == "seeds" else numbers
    values = uniforms(seeds.astype(np.uint64), positions)
    assert values.min() >= 0
    assert values.max() < 1
    histogram = np.bincount((values * 256).astype(int), minlength=256)
    expected = count / 256
    # 255 degrees of freedom: 99.9 % lie between 190 and 330.
    assert 190 < ((histogram - expected) ** 2 / expected).sum() < 330
    for lag in (1, 2, 7):
        assert abs(np.corrcoef(values[:-lag], values[lag:])[0, 1]) < 0.015
