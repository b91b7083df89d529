"""An index of outputs against a search through all of them; its bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.stages.executor.driver.speculation.token_index import (
    CONTEXTS,
    LEAD,
    NO_TOKEN,
    ContextKind,
    Piece,
    TokenIndex,
)


def lead(tokens: Sequence[int]) -> list[int]:
    return [*[NO_TOKEN] * LEAD, *tokens][-LEAD:]


def piece(prompt: Sequence[int], output: Sequence[int], scope: int = 1) -> Piece:
    tokens, before = np.array(output, np.int64), np.array(lead(prompt))
    return Piece(tokens, len(output), before, scope, hash(tuple(prompt)) & 0xFFFF)


def find(index: TokenIndex, prompt: Sequence[int], output: Sequence[int], scope: int = 1) -> int:
    (place,), _ = index.find(
        np.array([lead([*prompt, *output])]),
        np.array([scope], np.uint64),
        np.array([hash(tuple(prompt)) & 0xFFFF], np.uint64),
    )
    return int(place)


Said = tuple[list[int], list[int]]


def searched(said: list[Said], asked: Said, kind: ContextKind) -> list[int] | None:
    """What came behind the same context, the newest time."""
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
def test_finds_what_a_search_through_all_of_them_finds(
    said: list[Said], asked: Said, at_once: bool
) -> None:
    index = TokenIndex(1024)
    pieces = [piece(*each) for each in said]
    for some in [pieces] if at_once and pieces else [[each] for each in pieces]:
        index.add(some)
    place = find(index, *asked)
    wanted = next(filter(None, (searched(said, asked, kind) for kind in CONTEXTS)), None)
    assert (None if place < 0 else index.read(place, 100)) == wanted


def test_a_piece_of_which_only_the_first_tokens_are_found_goes_on_behind_them() -> None:
    index = TokenIndex(1024)
    before = np.array(lead([7]))
    index.add([Piece(np.arange(10, 30), 4, before, 1, 5)])
    assert index.read(find(index, [], [10, 11, 12]), 6) == [13, 14, 15, 16, 17, 18]
    assert find(index, [], [10, 11, 12, 13]) < 0


@pytest.mark.parametrize("length", [1, 40, 600])
def test_never_keeps_more_than_it_may(length: int) -> None:
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
