"""Whoever follows a request is given each token and each character of it once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.public import CompletionChunk, TokenLogprob
from nano_inference.bus.redis.given import Given

TEXTS = ("a", "", "bc", "d", "", "", "efg", "h")
"""What each token makes certain."""


def chunk_of(first: int, end: int) -> CompletionChunk:
    tops = [(TokenLogprob(token_id=place, logprob=-0.5),) for place in range(first, end)]
    return CompletionChunk(
        request_id="r",
        entry_id="1-0",
        sample_index=0,
        token_offset=first,
        token_ids=tuple(range(first, end)),
        logprobs=tuple(-float(place) for place in range(first, end)),
        text="".join(TEXTS[first:end]),
        top_logprobs=tuple(tops),
        finish_reason="stop" if end == len(TEXTS) else None,
    )


def cut(ends: set[int], first: int = 0) -> list[CompletionChunk]:
    """The tokens from the given one on, in chunks that end at these places and at the last."""
    places = [first, *sorted(end for end in ends if first < end < len(TEXTS)), len(TEXTS)]
    return [chunk_of(*pair) for pair in pairwise(places)]


@given(data=st.data())
def test_a_stream_written_anew_is_given_once(data: st.DataObject) -> None:
    """The server has lost all behind some chunk, some of which a reader has had, and gets the rest
    again, cut in another way; and perhaps a third time."""
    ends = st.sets(st.integers(1, len(TEXTS) - 1))
    reader, found = Given(), []
    written = cut(data.draw(ends))
    for _ in range(data.draw(st.integers(1, 3))):
        had = data.draw(st.integers(0, len(written)))
        kept = data.draw(st.integers(0, had))
        found += [reader.next_of(chunk) for chunk in written[:had]]
        first = written[kept].token_offset if kept < len(written) else len(TEXTS)
        written = [] if first == len(TEXTS) else cut(data.draw(ends), first)
    found += [reader.next_of(chunk) for chunk in written]
    told = [chunk for chunk in found if chunk is not None]
    assert "".join(chunk.text for chunk in told) == "".join(TEXTS)
    whole = chunk_of(0, len(TEXTS))
    for name in ("token_ids", "logprobs", "top_logprobs"):
        parts = [part for chunk in told for part in getattr(chunk, name)]
        assert tuple(parts) == getattr(whole, name)
    offset = 0
    for chunk in told:
        assert chunk.token_offset == offset
        offset += len(chunk.token_ids)
    assert [chunk.finish_reason for chunk in told if chunk.finish_reason] == ["stop"]


def test_what_came_again_may_be_lost_again_from_where_only_it_was_cut() -> None:
    reader = Given()
    for chunk in (chunk_of(0, 3), chunk_of(0, 1), chunk_of(1, 3)):
        reader.next_of(chunk)
    rest = reader.next_of(chunk_of(1, 5))
    assert (rest.token_offset, rest.token_ids, rest.text) == (3, (3, 4), TEXTS[3] + TEXTS[4])


def test_what_tokens_are_missing_before_is_not_given() -> None:
    reader = Given()
    assert reader.next_of(chunk_of(0, 2)) == chunk_of(0, 2)
    assert reader.next_of(chunk_of(3, 5)) is None
    assert reader.next_of(chunk_of(2, 5)) == chunk_of(2, 5)


def test_the_rest_of_the_text_may_come_without_a_token() -> None:
    reader = Given()
    reader.next_of(chunk_of(0, 2))
    last = chunk_of(2, 2)
    assert reader.next_of(last) is last
