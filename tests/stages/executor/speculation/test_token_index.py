"""An index of tokens against a search through all of them; its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.stages.executor.batch import IntArray
from nano_inference.stages.executor.speculation.token_index import (
    CHUNK_TOKENS,
    WHOLE,
    TokenIndex,
    Writer,
)

ORDERS = (8, 4, 2)
NONE = np.zeros(0, np.int64)
HUGE = (1 << 63) - 1


def array(*tokens: int) -> IntArray:
    return np.array(tokens, np.int64)


def written(index: TokenIndex, tokens: IntArray, *, scope: int = 1) -> Writer:
    writer = index.writer(scope, NONE)
    index.extend(writer, tokens)
    return writer


def searched(tokens: list[int], limit: int) -> tuple[int, list[list[int]]] | None:
    """The order of the longest context that came before, and what came behind it, newest first."""
    for length in ORDERS:
        last = tokens[-length:]
        ends = range(len(tokens) - 1, length - 1, -1)
        found = [
            (tokens[end:] * limit)[:limit] for end in ends if tokens[end - length : end] == last
        ]
        if found:
            return length, found[:8]
    return None


@given(st.lists(st.integers(1, 3), min_size=10, max_size=300), st.data())
def test_finds_what_a_search_through_all_tokens_finds(
    tokens: list[int], data: st.DataObject
) -> None:
    index = TokenIndex(1024, ORDERS)
    writer = index.writer(1, NONE)
    start = 0
    while start < len(tokens):
        # Few tokens are written one by one, many at once.
        count = data.draw(st.sampled_from((1, 2, 63, 64, 150)))
        index.extend(writer, array(*tokens[start : start + count]))
        start += count
    match = index.find(writer, 5)
    expected = searched(tokens, 5)
    assert (match and (match.length, match.continuations)) == expected


@given(st.lists(st.integers(0, 2), min_size=64, max_size=200), st.integers(0, 100))
def test_many_tokens_at_once_are_as_one_by_one(tokens: list[int], before: int) -> None:
    orders = (WHOLE, *ORDERS)
    found = []
    for one_by_one in (True, False):
        index = TokenIndex(1024, orders)
        # One that went before, so that the longest context is found as well.
        written(index, array(*tokens, 7, 7), scope=5)
        writer = index.writer(5, array(*range(before)))
        for token in tokens if one_by_one else ():
            index.extend(writer, array(token))
        if not one_by_one:
            index.extend(writer, array(*tokens))
        found.append((index.find(writer, 16), writer.hashes, writer.tail[-8:]))
    assert found[0] == found[1]


def test_a_context_is_as_long_as_it_is() -> None:
    index = TokenIndex(1024, ORDERS)
    written(index, array(1, 2, 3, 4, 5, 10))
    written(index, array(9, 9, 3, 4, 5, 20))
    match = index.find(written(index, array(7, 2, 3, 4, 5)), 1)
    assert match is not None
    assert match.length == 4
    assert match.continuations == [[10]]
    match = index.find(written(index, array(7, 7, 7, 4, 5)), 1)
    assert match is not None
    assert match.length == 2
    assert match.continuations == [[20], [10]]
    written(index, array(8, 8, 3, 4, 5, 30))
    match = index.find(written(index, array(6, 8, 3, 4, 5)), 1)
    assert match is not None
    assert (match.length, match.continuations) == (4, [[30]])


@pytest.mark.parametrize("at_once", [1, 64, 1000])
def test_never_keeps_more_than_it_may(at_once: int) -> None:
    index = TokenIndex(10 * CHUNK_TOKENS + 5, ORDERS)
    before = index.num_bytes
    rng = np.random.default_rng(1)
    writers = [index.writer(scope, NONE) for scope in (1, 2, 3)]
    for _ in range(4000 // at_once):
        for writer in writers:
            index.extend(writer, rng.integers(0, 4, at_once))
            index.find(writer, 16)
            assert index.num_tokens <= 10 * CHUNK_TOKENS
    assert index.num_bytes == before


def test_a_token_takes_the_bytes_that_are_promised() -> None:
    for max_tokens in (1 << 16, 100_000, 1_000_000):
        index = TokenIndex(max_tokens, (WHOLE, 16, 8, 4, 2))
        assert index.num_bytes / max_tokens <= 8 + 5 * 16


def test_the_oldest_is_forgotten_first() -> None:
    index = TokenIndex(8 * CHUNK_TOKENS, ORDERS)
    chunk = np.arange(CHUNK_TOKENS)
    for number in range(10):
        written(index, chunk + 100 * number)
    # The one that asks takes a chunk too, the third.
    asking = index.writer(1, NONE)
    for number in (0, 1, 2, 3, 4, 9):
        index.extend(asking, chunk[:3] + 100 * number)
        match = index.find(asking, 1)
        assert (match and match.continuations) == ([[100 * number + 3]] if number > 2 else None)


def test_one_that_outlives_its_chunks_goes_on() -> None:
    index = TokenIndex(2 * CHUNK_TOKENS, ORDERS)
    slow = written(index, array(1, 2, 3))
    written(index, np.arange(200))
    index.extend(slow, array(1, 2, 3, 1, 2))
    match = index.find(slow, 4)
    assert match is not None
    assert match.continuations == [[3, 1, 2, 3]]


def test_scopes_never_mix_even_where_chunks_are_used_again() -> None:
    index = TokenIndex(6 * CHUNK_TOKENS, ORDERS)
    rng = np.random.default_rng(2)
    # Scope s has no tokens but 10 s and 10 s + 1.
    writers = {scope: index.writer(scope, NONE) for scope in (1, 2, 3)}
    found = 0
    for step in range(3000):
        scope = 1 + step % 3
        if rng.random() < 0.05:
            writers[scope] = index.writer(scope, NONE)
        index.extend(writers[scope], 10 * scope + rng.integers(0, 2, rng.integers(1, 5)))
        match = index.find(writers[scope], 16)
        if match is not None:
            found += 1
            assert {token // 10 for tokens in match.continuations for token in tokens} == {scope}
    assert found > 1000


@pytest.mark.parametrize("count", [1, 10, 100])
def test_huge_and_negative_ids_are_tokens_like_others(count: int) -> None:
    index = TokenIndex(4096, ORDERS)
    period = [HUGE, -5, 1 << 40, 0]
    writer = written(index, array(*period * count, *period[:2]))
    match = index.find(writer, 4)
    assert match is not None
    assert match.length == (2 if count == 1 else 8)
    assert match.continuations[0] == [1 << 40, 0, HUGE, -5]


def test_nothing_was_written() -> None:
    index = TokenIndex(0, ORDERS)
    writer = index.writer(1, NONE)
    assert index.find(writer, 4) is None
    index.extend(writer, NONE)
    assert index.find(writer, 4) is None
    assert index.num_tokens == 0
