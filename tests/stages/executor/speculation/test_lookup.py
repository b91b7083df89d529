"""What is drafted: what came behind the longest context, the frequent first, then the new."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.stages.executor.speculation.drafts import NO_DRAFT, DraftContext
from nano_inference.stages.executor.speculation.lookup import LookupSource
from nano_inference.stages.executor.speculation.ngram import NgramSource
from nano_inference.stages.executor.speculation.suffix import SuffixSource

from .contexts import context, num_accepted, propose, run

MAKERS: list[Callable[[], LookupSource]] = [NgramSource, lambda: SuffixSource(4096)]
either = pytest.mark.parametrize("make", MAKERS, ids=["ngram", "suffix"])
Steps = list[tuple[int, int, list[int], int, bool]]


@either
def test_nothing_is_drafted_without_a_context(make: Callable[[], LookupSource]) -> None:
    source = make()
    assert source.propose([]) == []
    assert propose(source, context([], num_prompt=0)) == NO_DRAFT
    assert propose(source, context([5], num_prompt=0)) == NO_DRAFT
    assert propose(source, context([5, 6], num_prompt=0)) == NO_DRAFT


@either
def test_what_repeats_is_drafted_up_to_the_limit(make: Callable[[], LookupSource]) -> None:
    for limit in (1, 3, 16):
        draft = propose(make(), context([1, 2, 3] * 9, limit=limit))
        assert draft.tokens == ((1, 2, 3) * 6)[:limit]
        assert len(draft.likelihoods) == limit


@either
def test_100_thousand_same_tokens(make: Callable[[], LookupSource]) -> None:
    source = make()
    now = context([7] * 100_000)
    drafts = [propose(source, now) for _ in range(13)]
    # No step takes in all of them.
    assert drafts[0] == drafts[1] == NO_DRAFT
    assert drafts[-1].tokens == (7,) * 16


@either
def test_short_matches_draft_little(make: Callable[[], LookupSource]) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 99]
    two = propose(make(), context([*tokens, 1, 2]))
    assert two.tokens == (3, 4, 5, 6)
    eight = propose(make(), context([*tokens, 1, 2, 3, 4, 5, 6, 7, 8]))
    assert eight.tokens == (*range(9, 21), 99, 1, 2, 3)
    assert eight.likelihoods[0] > two.likelihoods[0]
    assert list(two.likelihoods) == sorted(two.likelihoods)


@either
def test_a_longer_context_wins_over_frequent_ones(make: Callable[[], LookupSource]) -> None:
    tokens = [3, 1, 2, 50, *[4, 1, 2, 60] * 5, 3, 1, 2]
    assert propose(make(), context(tokens, limit=1)).tokens == (50,)


@either
def test_the_more_frequent_wins_and_then_the_newer(make: Callable[[], LookupSource]) -> None:
    often = [1, 2, 50, 9, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    draft = propose(make(), context(often, limit=2))
    assert draft.tokens[0] == 50
    assert 0.4 < draft.likelihoods[0] < 0.67
    newer = [1, 2, 50, 9, 1, 2, 60, 7, 1, 2]
    assert propose(make(), context(newer, limit=1)).tokens == (60,)


@either
def test_unlikely_tokens_are_not_drafted(make: Callable[[], LookupSource]) -> None:
    # Eight ways to go on: the first token of each is just likely enough, and no more.
    tokens = [1, 2, *[token for way in range(10, 18) for token in (way, 90 + way, 1, 2)]]
    draft = propose(make(), context(tokens))
    assert draft.tokens == (17,)
    assert 0.1 < draft.likelihoods[0] <= 1 / 8


@either
def test_a_sequence_that_comes_back_is_drafted_for(make: Callable[[], LookupSource]) -> None:
    source = make()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    before = propose(source, context(tokens, row=3))
    source.forget(3, 1)
    assert propose(source, context(tokens, row=0)).tokens == before.tokens
    # One that has lost tokens is written anew.
    assert propose(source, context(tokens[:-2], row=0)).tokens[:2] == (7, 8)
    assert propose(source, context([*tokens, 1, 2], row=0)).tokens[:2] == (3, 4)


def test_ngram_knows_no_other_sequence_but_suffix_does() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    asked = context([1, 2, 3, 4, 5], row=0, seq_id=2)
    for source, draft in ((NgramSource(), ()), (SuffixSource(4096), (6, 7, 8, 9, 10))):
        source.observe([context(text, row=0)])
        source.forget(0, 1)
        assert propose(source, asked).tokens == draft


def test_ngram_finds_what_the_prompt_says() -> None:
    prompt = list(range(100, 200))
    draft = propose(NgramSource(), context([*prompt, 120, 121], num_prompt=100))
    assert draft.tokens == (122, 123, 124, 125)


@either
def test_ids_used_again_after_a_reset_are_others(make: Callable[[], LookupSource]) -> None:
    source = make()
    propose(source, context([1, 2, 3, 4, 1, 2]))
    source.clear()
    draft = propose(source, context([5, 6, 7, 8, 9, 5, 6]))
    assert draft.tokens == (7, 8, 9, 5)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 3),
            st.lists(st.integers(-1, 3), max_size=90),
            st.integers(1, 20),
            st.booleans(),
        ),
        max_size=20,
    )
)
def test_no_history_is_too_strange(steps: Steps) -> None:
    """Rows change hands, contexts grow, shrink and change, and what is drafted depends on nothing
    else."""
    said = []
    for _ in range(2):
        for source in (NgramSource(64), SuffixSource(100)):
            drafts = []
            for row, seq_id, tokens, limit, leaves in steps:
                asked = context(tokens, row=row, seq_id=seq_id, limit=limit, num_prompt=2)
                draft = propose(source, asked)
                assert len(draft.tokens) <= limit
                assert len(draft.likelihoods) == len(draft.tokens)
                assert all(0 < likelihood < 1 for likelihood in draft.likelihoods)
                drafts.append(draft)
                if leaves:
                    source.forget(row, seq_id)
            said.append(drafts)
    assert said[:2] == said[2:]


def rollouts(seed: int, count: int) -> list[list[int]]:
    """Outputs of one prompt that have most of their tokens in common, but for some choices."""
    rng = random.Random(seed)
    usual = random.Random(1).choices(range(1000), k=120)
    return [
        [1, 2, 3, *(t if rng.random() < 0.93 else rng.randrange(1000) for t in usual)]
        for _ in range(count)
    ]


def test_yesterdays_rollouts_draft_todays() -> None:
    source = SuffixSource(100_000)
    accepted = []
    for day in (1, 2):
        outputs = rollouts(day, 8)
        drafts = [
            run(source, tokens, num_prompt=3, seq_id=100 * day + number)
            for number, tokens in enumerate(outputs)
        ]
        source.clear()
        accepted.append([num_accepted(*pair, 3) for pair in zip(outputs, drafts, strict=True)])
    # The first of all has nothing to learn from, and the second day's first has everything.
    assert accepted[0][0] == 0
    assert min(accepted[1]) > 120 * 2


def test_siblings_learn_from_one_another_while_they_run() -> None:
    source = SuffixSource(100_000)
    outputs = rollouts(3, 2)
    ahead, behind = outputs
    drafts = []
    for end in range(20, len(ahead)):
        both = [
            context(ahead[:end], num_prompt=3, row=0, seq_id=1),
            context(behind[: end - 10], num_prompt=3, row=1, seq_id=2),
        ]
        drafts.append(source.propose(both)[1])
    assert num_accepted(behind, drafts, 10) > 100


def test_a_whole_prompt_is_a_context_of_its_own() -> None:
    """Prompts that end alike, as templates do, are told apart by how they begin."""
    source = SuffixSource(4096)
    end = list(range(500, 540))
    for first in (1, 2, 3):
        run(source, [first, *end, *range(10 * first, 10 * first + 8)], num_prompt=41, seq_id=first)
    for first in (1, 2, 3):
        asked = context([first, *end], num_prompt=41, seq_id=10 + first, limit=8)
        assert propose(source, asked).tokens == tuple(range(10 * first, 10 * first + 8))


def test_a_sample_that_was_preempted_is_not_counted_twice() -> None:
    source = SuffixSource(4096)
    tokens = [1, 2, 3, 4, 5, 6]
    for end in range(2, 7):
        source.observe([context(tokens[:end], seq_id=1)])
        source.forget(0, 1)
    other = [1, 2, 3, 9]
    source.observe([context(other, seq_id=2)])
    # The one of two that is newer, and not the one that came back often.
    assert propose(source, context([1, 2, 3], seq_id=3)).tokens[0] == 9


def test_scopes_never_mix() -> None:
    def asked(seq_id: int, scope: str) -> DraftContext:
        return context([1, 2, 3, 4], seq_id=seq_id, scope=scope)

    source = SuffixSource(4096)
    scopes: Sequence[str] = ["", "a", "b", "a\0", "\ud800"]
    run(source, [1, 2, 3, 4, 5, 6, 7], num_prompt=1, seq_id=1, scope="a")
    for seq_id, scope in enumerate(scopes, 2):
        assert bool(propose(source, asked(seq_id, scope)).tokens) == (scope == "a")


def test_most_of_a_reply_that_was_given_before_is_drafted_and_old_ones_are_forgotten() -> None:
    source = SuffixSource(1024)
    rng = random.Random(4)
    replies = [[number, *(rng.randrange(500) for _ in range(100))] for number in range(30)]
    for seq_id, reply in enumerate(replies):
        run(source, reply, num_prompt=1, seq_id=seq_id)
    newest, oldest = replies[-1], replies[0]
    drafts = run(source, newest, num_prompt=1, seq_id=100)
    assert num_accepted(newest, drafts, 1) > 100 * 14
    drafts = run(source, oldest, num_prompt=1, seq_id=101)
    assert num_accepted(oldest, drafts, 1) == 0
