"""N-gram and suffix drafts, and the token index."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import DEFAULT_SCOPE, CacheScope
from nano_inference.stages.executor.driver.sequences import SequenceTable
from nano_inference.stages.executor.driver.speculation.drafts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    DraftSource,
    NgramSource,
)
from nano_inference.stages.executor.driver.speculation.suffix import (
    CONTEXTS,
    LEAD,
    NO_TOKEN,
    ContextKind,
    Segment,
    SuffixSource,
    TokenIndex,
)


def context(
    tokens: Sequence[int],
    *,
    num_prompt: int = 1,
    row: int = 0,
    seq_id: int = 1,
    scope: CacheScope = DEFAULT_SCOPE,
    limit: int = 16,
) -> DraftContext:
    """A sequence of these tokens."""
    return DraftContext(
        row=row,
        seq_id=seq_id,
        tokens=np.array(tokens, np.int64),
        num_prompt=num_prompt,
        scope=scope,
        prediction=(),
        limit=limit,
    )


def propose(source: DraftSource, *contexts: DraftContext) -> Draft:
    """The draft of the last of these."""
    return source.propose(contexts)[-1]


class SuffixOfContexts(SuffixSource):
    """A source whose table has the sequences of its calls."""

    def __init__(self, max_tokens: int = 100_000) -> None:
        self.table = SequenceTable(8, 4096, 16)
        super().__init__(self.table, max_tokens)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        for asked in contexts:
            self.put(asked)
        return super().propose(contexts)

    def put(self, asked: DraftContext) -> None:
        table, row, known = self.table, asked.row, len(asked.tokens)
        table.tokens[row, :known] = asked.tokens
        table.num_known[row] = known
        table.num_generated[row] = max(known - asked.num_prompt, 0)
        table.scope[row] = asked.scope

    def end(self, asked: DraftContext) -> None:
        """A sequence leaves, with these tokens."""
        self.put(asked)
        self.forget(asked.row, asked.seq_id)


def run(
    source: SuffixOfContexts,
    tokens: Sequence[int],
    *,
    num_prompt: int,
    seq_id: int,
    scope: CacheScope = DEFAULT_SCOPE,
) -> list[Draft]:
    """Run a whole sequence, one token per step, and return the drafts."""
    drafts = []
    for end in range(num_prompt, len(tokens)):
        now = context(tokens[:end], num_prompt=num_prompt, seq_id=seq_id, scope=scope)
        drafts.append(propose(source, now))
    source.end(context(tokens, num_prompt=num_prompt, seq_id=seq_id, scope=scope))
    return drafts


def num_accepted(tokens: Sequence[int], drafts: Sequence[Draft], num_prompt: int) -> int:
    """How many drafted tokens came as they were drafted, over all steps."""
    accepted = 0
    for end, draft in enumerate(drafts, num_prompt):
        for drafted, came in zip(draft.tokens, tokens[end:], strict=False):
            if drafted != came:
                break
            accepted += 1
    return accepted


def test_a_longer_context_is_likelier_and_wins_over_frequent_and_newer_ones() -> None:
    source = NgramSource()
    two = propose(source, context([1, 2, 50, *[4, 1, 2, 60] * 5, 7, 1, 2], limit=1))
    three = propose(source, context([3, 1, 2, 50, *[4, 1, 2, 60] * 5, 3, 1, 2], limit=1))
    assert (two.tokens, three.tokens) == ((60,), (50,))
    assert three.likelihoods > two.likelihoods


def test_prompts_are_searched_and_distant_tokens_are_not() -> None:
    source, said = NgramSource(), [1, 2, 3, 4]
    near, far = [*said, *range(10, 8000), 1, 2], [*said, *range(10, 9000), 1, 2]
    assert propose(source, context(near, num_prompt=4, limit=2)).tokens == (3, 4)
    assert propose(source, context(far, num_prompt=4, limit=2)) == NO_DRAFT


@given(st.lists(st.integers(-1, 2), max_size=80), st.integers(1, 20))
def test_drafts_equal_those_of_a_search(tokens: list[int], limit: int) -> None:
    draft = propose(NgramSource(), context(tokens, limit=limit))
    best, wanted = 1, ()
    for end in range(2, len(tokens)):
        same = 0
        while same < min(end, 16) and tokens[end - 1 - same] == tokens[-1 - same]:
            same += 1
        if same >= max(best, 2):
            best, wanted = same, tuple((tokens[end:] * limit)[:limit])
    assert draft.tokens == wanted


def lead(tokens: Sequence[int]) -> list[int]:
    return [*[NO_TOKEN] * LEAD, *tokens][-LEAD:]


def piece(prompt: Sequence[int], output: Sequence[int], scope: int = 1) -> Segment:
    tokens, before = np.array(output, np.int64), np.array(lead(prompt))
    return Segment(tokens, len(output), before, scope, hash(tuple(prompt)) & 0xFFFF)


def find(index: TokenIndex, prompt: Sequence[int], output: Sequence[int], scope: int = 1) -> int:
    (place,), _ = index.find(
        np.array([lead([*prompt, *output])]),
        np.array([scope], np.uint64),
        np.array([hash(tuple(prompt)) & 0xFFFF], np.uint64),
    )
    return int(place)


Said = tuple[list[int], list[int]]


def searched(said: list[Said], asked: Said, kind: ContextKind) -> list[int] | None:
    """The newest continuation of the same context, by a full search."""
    context = lead([*asked[0], *asked[1]])[LEAD - kind.length :]
    for prompt, output in reversed(said):
        for place in range(len(output) - 1, -1, -1):
            before = lead([*prompt, *output[:place]])[LEAD - kind.length :]
            if before == context and (not kind.same_prompt or prompt == asked[0]):
                return output[place:]
    return None


texts = st.tuples(
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
)


@given(st.lists(texts, max_size=8), texts, st.booleans())
def test_matches_equal_those_of_a_search_of_all_contexts(
    said: list[Said], asked: Said, at_once: bool
) -> None:
    index = TokenIndex(1024)
    pieces = [piece(*each) for each in said]
    for some in [pieces] if at_once and pieces else [[each] for each in pieces]:
        index.add(some)
    place = find(index, *asked)
    wanted = next(filter(None, (searched(said, asked, kind) for kind in CONTEXTS)), None)
    assert (None if place < 0 else index.read(place, 100)) == wanted


def test_a_segment_continues_behind_its_indexed_tokens() -> None:
    index = TokenIndex(1024)
    before = np.array(lead([7]))
    index.add([Segment(np.arange(10, 30), 4, before, 1, 5)])
    assert index.read(find(index, [], [10, 11, 12]), 6) == [13, 14, 15, 16, 17, 18]
    assert find(index, [], [10, 11, 12, 13]) < 0


@pytest.mark.parametrize("length", [1, 40, 600])
def test_the_index_keeps_to_its_size(length: int) -> None:
    index = TokenIndex(1000)
    before, rng = index.num_bytes, np.random.default_rng(1)
    for _ in range(4000 // length):
        output = rng.integers(0, 4, length).tolist()
        index.add([piece([1], output)])
        assert index.num_tokens <= 1000
        place = find(index, [1], output[:-1])
        assert index.read(place, length) == output[-1:]
    assert index.num_bytes == before
    with pytest.raises(ValueError, match="room for less"):
        index.add([piece([1], [1] * 1000)])


def test_a_token_takes_the_bytes_that_are_promised() -> None:
    for max_tokens in (1 << 16, 100_000, 1_000_000):
        index = TokenIndex(max_tokens)
        assert index.num_bytes / max_tokens <= 4 + 12 * len(CONTEXTS)


def test_the_oldest_is_forgotten_first() -> None:
    index = TokenIndex(400)
    for number in range(10):
        index.add([piece([1], range(100 * number, 100 * number + 60))])
    for number in range(10):
        place = find(index, [2], range(100 * number + 10, 100 * number + 30))
        assert (index.read(place, 1) if place >= 0 else None) == (
            [100 * number + 30] if number > 3 else None
        )


def test_scopes_never_mix_even_where_memory_is_used_again() -> None:
    index, rng, found = TokenIndex(200), np.random.default_rng(2), 0
    for step in range(1000):
        # Scope s has no tokens but 10 s and 10 s + 1.
        scope = 1 + step % 3
        output = (10 * scope + rng.integers(0, 2, rng.integers(1, 30))).tolist()
        place = find(index, [], output, scope)
        if place >= 0:
            found += 1
            assert {token // 10 for token in index.read(place, 16)} == {scope}
        index.add([piece([], output, scope)])
    assert found > 500


Steps = list[tuple[int, int, list[int], int, bool]]


def test_an_empty_output_is_not_indexed() -> None:
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


def test_earlier_rollouts_draft_later_ones() -> None:
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
    # The very first sequence has no history, and the second day's first has all of it.
    assert accepted[0][0] == 0
    assert min(accepted[1]) > 120 * 2


def test_a_sample_follows_a_running_sibling() -> None:
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
    """Prompts with equal ends, as from templates, are distinguished by their starts."""
    source = SuffixOfContexts()
    end = list(range(500, 540))
    for first in (1, 2, 3):
        run(source, [first, *end, *range(10 * first, 10 * first + 8)], num_prompt=41, seq_id=first)
    for first in (1, 2, 3):
        asked = context([first, *end], num_prompt=41, seq_id=10 + first, limit=8)
        assert propose(source, asked).tokens == tuple(range(10 * first, 10 * first + 8))


def test_a_diverged_sample_follows_others_of_its_prompt_again() -> None:
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


def test_unread_tokens_are_not_indexed() -> None:
    source = SuffixOfContexts()
    source.end(context([1, 2, 3, 4, 5, -1, -1]))
    assert propose(source, context([1, 2, 3], seq_id=2)).tokens == (4, 5)


def test_reused_ids_after_a_reset_are_new_sequences() -> None:
    source = SuffixOfContexts()
    propose(source, context([1, 2, 3, 4, 1, 2]))
    source.clear()
    source.end(context([5, 6, 7, 8, 9, 5, 6]))
    assert propose(source, context([5, 6, 7], seq_id=2)).tokens == (8, 9, 5, 6)


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
def test_any_history_gives_valid_chances(steps: Steps, max_tokens: int) -> None:
    """Rows are reused, contexts grow, shrink and change, and drafts depend on nothing else."""
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
