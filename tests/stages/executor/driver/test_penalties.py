"""Each penalty against one written row by row, token by token, and against Transformers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from nano_inference.stages.executor.driver.penalties import (
    apply_frequency_penalty,
    apply_logit_bias,
    apply_presence_penalty,
    apply_repetition_penalty,
    mask_tokens,
)

VOCAB = 37
BATCH = 9


@pytest.fixture
def logits() -> Tensor:
    logits = torch.randn(BATCH, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    logits[2, 5] = float("-inf")
    logits[:, 0] = 0.0
    return logits


def histories(*, shortest: int) -> list[list[int]]:
    """Tokens of each row, of different lengths, with repetitions."""
    rng = random.Random(5)
    lengths = [shortest, 30, 7, 12, 1, 25, 3, 18, 2]
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def padded(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids padded by each row's first, and which are real."""
    width = max(map(len, lists))
    ids = torch.tensor([(row + [row[0] if row else 11] * width)[:width] for row in lists])
    valid = torch.tensor([[place < len(row) for place in range(width)] for row in lists])
    return ids, valid


def spread(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, BATCH)


def test_repetition_penalty(logits: Tensor) -> None:
    lists, penalties = histories(shortest=4), spread(0.5, 3)
    ids, _ = padded(lists)
    found = apply_repetition_penalty(logits, ids, penalties)
    expected = logits.clone()
    for row, tokens in enumerate(lists):
        for token in set(tokens):
            logit = logits[row, token]
            penalty = penalties[row]
            expected[row, token] = logit * penalty if logit < 0 else logit / penalty
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits)


@pytest.mark.parametrize("penalty", [0.7, 1.3, 10.0])
def test_repetition_penalty_is_that_of_transformers(logits: Tensor, penalty: float) -> None:
    ids = torch.randint(0, VOCAB, (BATCH, 20), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    found = apply_repetition_penalty(logits, ids, torch.full((BATCH,), penalty))
    assert torch.equal(found, expected)


def test_presence_penalty(logits: Tensor) -> None:
    lists, penalties = histories(shortest=0), spread(-2, 2)
    found = apply_presence_penalty(logits, *padded(lists), penalties)
    expected = logits.clone()
    for row, tokens in enumerate(lists):
        for token in set(tokens):
            expected[row, token] -= penalties[row]
    assert torch.equal(found, expected)
    assert torch.equal(found[0], logits[0]), "nothing was generated there"
    assert not torch.equal(found[1], logits[1])


def test_frequency_penalty(logits: Tensor) -> None:
    lists, penalties = histories(shortest=0), spread(-2, 2)
    found = apply_frequency_penalty(logits, *padded(lists), penalties)
    expected = logits.double()
    for row, tokens in enumerate(lists):
        for token in set(tokens):
            expected[row, token] -= penalties[row].double() * tokens.count(token)
    assert torch.allclose(found.double(), expected, atol=1e-5)
    assert torch.equal(found[0], logits[0])
    assert max(tokens.count(token) for tokens in lists for token in tokens) > 2


def test_logit_bias(logits: Tensor) -> None:
    rng = random.Random(3)
    lists = [rng.sample(range(VOCAB), size) for size in (0, 1, 5, 37, 2, 3, 0, 8, 9)]
    ids, valid = padded(lists)
    biases = torch.where(valid, torch.randn(ids.shape), 0.0)
    found = apply_logit_bias(logits, ids, biases)
    expected = logits.clone()
    for row, tokens in enumerate(lists):
        for place, token in enumerate(tokens):
            expected[row, token] += biases[row, place]
    assert torch.equal(found, expected)


def test_masked_tokens_are_impossible_and_no_others(logits: Tensor) -> None:
    lists = histories(shortest=2)
    found = mask_tokens(logits, padded(lists)[0])
    for row, tokens in enumerate(lists):
        for token in range(VOCAB):
            wanted = float("-inf") if token in tokens else float(logits[row, token])
            assert float(found[row, token]) == wanted


def test_neutral_values_change_no_bit(logits: Tensor) -> None:
    ids, valid = padded(histories(shortest=3))
    zeros, ones = torch.zeros(BATCH), torch.ones(BATCH)
    assert torch.equal(apply_repetition_penalty(logits, ids, ones), logits)
    assert torch.equal(apply_presence_penalty(logits, ids, valid, zeros), logits)
    assert torch.equal(apply_frequency_penalty(logits, ids, valid, zeros), logits)


def test_the_width_of_the_padding_changes_no_bit(logits: Tensor) -> None:
    """A row alone gets what it gets beside longer ones."""
    ids, valid = padded(histories(shortest=2))
    penalties = spread(0.4, 1.9)
    for row, tokens in enumerate(histories(shortest=2)):
        own, real = torch.tensor([tokens]), torch.ones(1, len(tokens), dtype=torch.bool)
        one, penalty = logits[row : row + 1], penalties[row : row + 1]
        for apply in (apply_presence_penalty, apply_frequency_penalty):
            together = apply(logits, ids, valid, penalties)[row]
            assert torch.equal(apply(one, own, real, penalty)[0], together)
        together = apply_repetition_penalty(logits, ids, penalties)[row]
        assert torch.equal(apply_repetition_penalty(one, own, penalty)[0], together)
