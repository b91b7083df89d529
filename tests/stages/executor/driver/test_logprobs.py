"""Logprobs against a full log_softmax in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.config import ModelError
from nano_inference.stages.executor import sample_with_logprobs
from nano_inference.stages.executor.driver.logprobs import LOWEST, gather_logprobs, top_token_ids
from nano_inference.stages.executor.driver.report import report_top_logprobs


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


def test_of_broken_logits_there_are_none() -> None:
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


def test_each_row_gets_as_many_as_it_wants() -> None:
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


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(90, 3001, generator=torch.Generator().manual_seed(6))
    temperatures = torch.linspace(0, 2, 90)
    counts = np.arange(90) % 5
    together = report_top_logprobs(logits, temperatures, counts)
    for rows in ([1], [89, 3], [64, 63, 2]):
        assert report_top_logprobs(logits[rows], temperatures[rows], counts[rows]) == tuple(
            together[row] for row in rows
        )
