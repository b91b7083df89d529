"""What earlier outputs draft: what came behind the tokens that tell most, the newest first."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import CacheScope
from nano_inference.stages.executor.driver.speculation.drafts import NO_DRAFT, DraftContext

from .contexts import SuffixOfContexts, context, num_accepted, propose, run

Steps = list[tuple[int, int, list[int], int, bool]]


def test_nothing_is_drafted_where_nothing_was_said() -> None:
    source = SuffixOfContexts()
    assert source.propose([]) == []
    assert propose(source, context([1, 2, 3, 1, 2])) == NO_DRAFT
    # A prompt is no output.
    source.end(context([1, 2, 3, 4], num_prompt=4, seq_id=3))
    assert propose(source, context([1, 2, 3], seq_id=2)) == NO_DRAFT


def rollouts(seed: int, count: int) -> list[list[int]]:
    """Outputs of one prompt that have most of their tokens in common, but for some choices."""
    rng = random.Random(seed)
    usual = random.Random(1).choices(range(1000), k=120)
    return [
        [1, 2, 3, *(t if rng.random() < 0.93 else rng.randrange(1000) for t in usual)]
        for _ in range(count)
    ]


def test_yesterdays_rollouts_draft_todays() -> None:
    source = SuffixOfContexts()
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


def test_a_sibling_that_goes_before_is_followed_while_it_runs() -> None:
    source = SuffixOfContexts()
    ahead, behind = rollouts(3, 2)
    drafts = []
    for end in range(70, len(ahead)):
        both = [
            context(ahead[:end], num_prompt=3, row=0, seq_id=1),
            context(behind[: end - 60], num_prompt=3, row=1, seq_id=2),
        ]
        drafts.append(source.propose(both)[1])
    assert num_accepted(behind, drafts, 10) > 100


def test_outputs_of_the_same_prompt_come_first() -> None:
    """Prompts that end alike, as templates do, are told apart by how they begin."""
    source = SuffixOfContexts()
    end = list(range(500, 540))
    for first in (1, 2, 3):
        run(source, [first, *end, *range(10 * first, 10 * first + 8)], num_prompt=41, seq_id=first)
    for first in (1, 2, 3):
        asked = context([first, *end], num_prompt=41, seq_id=10 + first, limit=8)
        assert propose(source, asked).tokens == tuple(range(10 * first, 10 * first + 8))


def test_behind_a_word_of_its_own_a_sample_goes_on_as_others_of_its_prompt_did() -> None:
    source = SuffixOfContexts()
    run(source, [1, 2, 3, *range(10, 30)], num_prompt=3, seq_id=1)
    run(source, [7, 7, 7, 12, 13, 14, 90, 91, 92], num_prompt=3, seq_id=2)
    asked = context([1, 2, 3, 10, 99, 12, 13, 14], num_prompt=3, seq_id=3, limit=3)
    assert propose(source, asked).tokens == (15, 16, 17)


def test_more_tokens_that_are_the_same_are_likelier_to_go_on() -> None:
    source = SuffixOfContexts()
    run(source, list(range(40)), num_prompt=1, seq_id=1)
    drafts = [
        propose(source, context([99, *range(20 - same, 20)], seq_id=2, limit=1))
        for same in (2, 6, 16)
    ]
    assert {draft.tokens for draft in drafts} == {(20,)}
    likelihoods = [draft.likelihoods for draft in drafts]
    assert likelihoods == sorted(set(likelihoods))


def test_of_two_outputs_the_newer_is_followed() -> None:
    source = SuffixOfContexts()
    for seq_id, last in enumerate((8, 9)):
        run(source, [1, 2, 3, last], num_prompt=1, seq_id=seq_id)
    assert propose(source, context([1, 2, 3], seq_id=5)).tokens == (9,)


def test_a_sample_that_was_preempted_is_written_once() -> None:
    source, told = SuffixOfContexts(), []
    add = source._index.add
    source._index.add = lambda pieces: (told.extend(pieces), add(pieces))[1]  # type: ignore[method-assign]
    tokens = list(range(60))
    for end in (10, 50, 60):
        propose(source, context(tokens[:end]))
        source.end(context(tokens[:end]))
    propose(source, context([5, 6, 7], seq_id=2))
    assert sum(piece.count for piece in told) == 59


def test_what_nobody_has_read_is_not_written() -> None:
    source = SuffixOfContexts()
    source.end(context([1, 2, 3, 4, 5, -1, -1]))
    assert propose(source, context([1, 2, 3], seq_id=2)).tokens == (4, 5)


def test_scopes_never_mix() -> None:
    def asked(seq_id: int, scope: str) -> DraftContext:
        return context([1, 2, 3, 4], seq_id=seq_id, scope=CacheScope(salt=scope))

    source = SuffixOfContexts()
    scopes: Sequence[str] = ["", "a", "b", "a\0", "\ud800"]
    run(source, [1, 2, 3, 4, 5, 6, 7], num_prompt=1, seq_id=1, scope=CacheScope(salt="a"))
    for seq_id, scope in enumerate(scopes, 2):
        assert bool(propose(source, asked(seq_id, scope)).tokens) == (scope == "a")


def test_ids_used_again_after_a_reset_are_others() -> None:
    source = SuffixOfContexts()
    propose(source, context([1, 2, 3, 4, 1, 2]))
    source.clear()
    source.end(context([5, 6, 7, 8, 9, 5, 6]))
    assert propose(source, context([5, 6, 7], seq_id=2)).tokens == (8, 9, 5, 6)


def test_a_reply_that_was_given_before_is_drafted_and_old_ones_are_forgotten() -> None:
    source = SuffixOfContexts(1024)
    rng = random.Random(4)
    replies = [[number, *(rng.randrange(500) for _ in range(100))] for number in range(30)]
    for seq_id, reply in enumerate(replies):
        run(source, reply, num_prompt=1, seq_id=seq_id)
    newest, oldest = replies[-1], replies[0]
    drafts = run(source, newest, num_prompt=1, seq_id=100)
    assert num_accepted(newest, drafts, 1) > 100 * 14
    drafts = run(source, oldest, num_prompt=1, seq_id=101)
    assert num_accepted(oldest, drafts, 1) == 0


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
    ),
    st.sampled_from([1, 100, 1000]),
)
def test_no_history_is_too_strange(steps: Steps, max_tokens: int) -> None:
    """Rows change hands, contexts grow, shrink and change, and what is drafted depends on nothing
    else."""
    said = []
    for _ in range(2):
        source, drafts = SuffixOfContexts(max_tokens), []
        for row, seq_id, tokens, limit, leaves in steps:
            asked = context(tokens, row=row, seq_id=seq_id, limit=limit, num_prompt=2)
            draft = propose(source, asked)
            assert len(draft.tokens) <= limit
            assert all(0 < likelihood < 1 for likelihood in draft.likelihoods)
            drafts.append(draft)
            if leaves:
                source.forget(row, seq_id)
        said.append(drafts)
    assert said[0] == said[1]
