"""What a sequence's own tokens draft: what came behind the longest context, the newest of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.stages.executor.driver.speculation.drafts import NO_DRAFT
from nano_inference.stages.executor.driver.speculation.ngram import NgramSource

from .contexts import context, propose


@pytest.mark.parametrize("tokens", [[], [5], [5, 6], [5, 6, 7], [5, 6, 7, 5]])
def test_nothing_is_drafted_without_a_context(tokens: list[int]) -> None:
    assert propose(NgramSource(), context(tokens)) == NO_DRAFT


def test_what_repeats_is_drafted_up_to_the_limit() -> None:
    for limit in (1, 3, 16):
        draft = propose(NgramSource(), context([1, 2, 3] * 9, limit=limit))
        assert draft.tokens == ((1, 2, 3) * 6)[:limit]
        assert draft.source == "ngram"


def test_a_longer_context_is_likelier_and_wins_over_frequent_and_newer_ones() -> None:
    source = NgramSource()
    two = propose(source, context([1, 2, 50, *[4, 1, 2, 60] * 5, 7, 1, 2], limit=1))
    three = propose(source, context([3, 1, 2, 50, *[4, 1, 2, 60] * 5, 3, 1, 2], limit=1))
    assert (two.tokens, three.tokens) == ((60,), (50,))
    assert three.likelihoods > two.likelihoods


def test_of_contexts_as_long_the_newest_counts() -> None:
    draft = propose(NgramSource(), context([1, 2, 50, 9, 1, 2, 60, 7, 1, 2], limit=1))
    assert draft.tokens == (60,)


def test_the_prompt_counts_and_what_is_long_ago_does_not() -> None:
    source, said = NgramSource(), [1, 2, 3, 4]
    near, far = [*said, *range(10, 8000), 1, 2], [*said, *range(10, 9000), 1, 2]
    assert propose(source, context(near, num_prompt=4, limit=2)).tokens == (3, 4)
    assert propose(source, context(far, num_prompt=4, limit=2)) == NO_DRAFT


@given(st.lists(st.integers(-1, 2), max_size=80), st.integers(1, 20))
def test_drafts_what_a_search_finds(tokens: list[int], limit: int) -> None:
    draft = propose(NgramSource(), context(tokens, limit=limit))
    best, wanted = 1, ()
    for end in range(2, len(tokens)):
        same = 0
        while same < min(end, 16) and tokens[end - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= max(best, 2):
            best, wanted = same, tuple((tokens[end:] * limit)[:limit])
    assert draft.tokens == wanted
