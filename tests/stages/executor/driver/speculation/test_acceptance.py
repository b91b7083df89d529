from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.stages.executor.driver.speculation.acceptance import Acceptance
from nano_inference.stages.executor.driver.speculation.drafts import NO_DRAFT, Draft

RIGHT = (1, 2, 3, 4, 5, 6, 7, 8)
WRONG = (9, *RIGHT[1:])


def draft(*tokens: int, likelihoods: tuple[float, ...] = (), source: str = "ngram") -> Draft:
    return Draft(tokens, likelihoods, source)


def started(*rows: int) -> Acceptance:
    acceptance = Acceptance()
    for row in rows:
        acceptance.begin(row)
    return acceptance


def test_nothing_is_expected_of_no_draft() -> None:
    acceptance = started(0)
    assert acceptance.expected(0, NO_DRAFT) == []
    acceptance.settle(0, NO_DRAFT, [1])


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=8),
            st.lists(st.floats(), max_size=9),
            st.sampled_from(["ngram", "model"]),
            st.lists(st.integers(0, 3), max_size=9),
        ),
        max_size=60,
    )
)
def test_chances_fall_and_are_chances_whatever_happens(
    history: list[tuple[list[int], list[float], str, list[int]]],
) -> None:
    acceptance = started(0)
    for tokens, likelihoods, source, got in history:
        proposed = Draft(tuple(tokens), tuple(likelihoods), source)
        chances = acceptance.expected(0, proposed)
        assert len(chances) <= len(tokens)
        assert bool(chances) == bool(tokens)
        assert all(0 < chance < 1 for chance in chances)
        assert chances == sorted(chances, reverse=True)
        acceptance.settle(0, proposed, got)


def test_what_was_right_is_expected_again() -> None:
    acceptance = started(0)
    before = acceptance.expected(0, draft(*RIGHT))
    for _ in range(50):
        acceptance.settle(0, draft(*RIGHT), RIGHT)
    after = acceptance.expected(0, draft(*RIGHT))
    assert all(now > then for now, then in zip(after, before, strict=False))
    assert after[-1] > 0.9


def test_no_run_of_luck_makes_certain() -> None:
    """Nor divides by nothing, also after a million tokens."""
    acceptance = started(0)
    for _ in range(20_000):
        acceptance.settle(0, draft(1), [1])
    assert 0.99 < acceptance.expected(0, draft(1))[0] < 1
    for _ in range(20_000):
        acceptance.settle(0, draft(1), [2])
    assert 0 < acceptance.expected(0, draft(1))[0] < 0.01


def test_sequences_differ() -> None:
    acceptance = started(0, 1)
    for _ in range(40):
        acceptance.settle(0, draft(*RIGHT), RIGHT)
        acceptance.settle(1, draft(*WRONG), RIGHT)
    (good, *_), (bad, *_) = (acceptance.expected(row, draft(*RIGHT)) for row in (0, 1))
    assert good > 0.9
    assert bad < 0.1


def test_sources_differ() -> None:
    acceptance = started(0)
    for _ in range(40):
        acceptance.settle(0, draft(*RIGHT, source="suffix"), RIGHT)
        acceptance.settle(0, draft(*WRONG, source="ngram"), RIGHT)
    suffix, ngram = (
        acceptance.expected(0, draft(*RIGHT, source=source))[0] for source in ("suffix", "ngram")
    )
    assert suffix > 0.9
    assert ngram < 0.1


def test_a_new_sequence_starts_from_what_its_source_did_for_others() -> None:
    acceptance = started(0, 1)
    guess = acceptance.expected(1, draft(*RIGHT))[0]
    for _ in range(40):
        acceptance.settle(0, draft(*RIGHT), RIGHT)
    assert acceptance.expected(1, draft(*RIGHT))[0] > guess
    # Neither what a row's earlier sequence did by itself, nor its draft that was under way.
    acceptance.settle(0, draft(*RIGHT), RIGHT[:4])
    acceptance.forget(0)
    acceptance.begin(0)
    assert acceptance.expected(0, draft(*RIGHT)) == acceptance.expected(1, draft(*RIGHT))
    acceptance.settle(0, NO_DRAFT, [0])
    assert acceptance.expected(0, draft(*RIGHT)) == acceptance.expected(1, draft(*RIGHT))


def test_likelihoods_are_believed_as_far_as_they_were_right() -> None:
    """A source that boasts: what it finds likely at 0.9 comes true half the time."""
    acceptance = started(0, 1)
    sure, unsure = ((1,), (0.9,)), ((1,), (0.2,))
    first = acceptance.expected(0, Draft(*sure, "suffix"))[0]
    assert first > acceptance.expected(0, Draft(*unsure, "suffix"))[0]
    for number in range(400):
        acceptance.settle(0, Draft(*sure, "suffix"), [number % 2])
        acceptance.settle(0, Draft(*unsure, "suffix"), [0])
    assert acceptance.expected(1, Draft(*sure, "suffix"))[0] == pytest.approx(0.5, abs=0.1)
    assert acceptance.expected(1, Draft(*unsure, "suffix"))[0] < 0.1


def test_a_likelihood_that_is_no_number_counts_as_none() -> None:
    acceptance = started(0)
    for hostile in (math.nan, -1.0, -math.inf):
        assert acceptance.expected(0, draft(1, likelihoods=(hostile,))) == acceptance.expected(
            0, draft(1, likelihoods=(0.0,))
        )


def test_a_draft_that_was_not_verified_is_compared_with_the_text_too() -> None:
    unverified, verified = started(0), started(0)
    unverified.settle(0, draft(1, 2, 9, 4), [1])
    verified.settle(0, draft(1), [1])
    assert unverified.expected(0, draft(*RIGHT)) == verified.expected(0, draft(*RIGHT))


def test_one_likelihood_is_that_of_all_tokens() -> None:
    one, all_of_them = draft(*RIGHT, likelihoods=(0.9,)), draft(*RIGHT, likelihoods=(0.9,) * 8)
    found = []
    for proposed in (one, all_of_them):
        acceptance = started(0)
        acceptance.settle(0, proposed, (1, 2, 3, 9))
        found.append([acceptance.expected(0, each) for each in (one, all_of_them)])
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def test_after_a_long_failure_a_text_that_repeats_itself_is_soon_known_again() -> None:
    acceptance = started(0)
    for _ in range(500):
        acceptance.settle(0, draft(*WRONG), [RIGHT[0]])
    assert acceptance.expected(0, draft(*RIGHT))[0] < 0.05
    steps = 0
    while acceptance.expected(0, draft(*RIGHT))[0] < 0.5:
        acceptance.settle(0, draft(*RIGHT), [RIGHT[0]])
        steps += 1
    assert steps <= 20


def test_clear_forgets_sequences_and_not_sources() -> None:
    acceptance = started(0)
    for _ in range(40):
        acceptance.settle(0, draft(*WRONG), RIGHT)
    acceptance.clear()
    acceptance.begin(0)
    assert acceptance.expected(0, draft(*RIGHT))[0] < 0.3
