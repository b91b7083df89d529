from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.stages.streaming.stop_strings import StopStrings

letters = st.sampled_from("ab")
stops = st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def first_match(text: str, stop: tuple[str, ...]) -> tuple[int, int] | None:
    """(start, end) of the match that ends first; of those with this end, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts), end
    return None


def may_become(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    lengths = range(len(text) + 1)
    return max(n for n in lengths if any(s.startswith(text[len(text) - n :]) for s in stop))


@given(text=st.text(letters, max_size=40), stop=stops, data=st.data())
def test_against_brute_force(text: str, stop: tuple[str, ...], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    watcher = StopStrings(stop)
    seen = delivered = ""
    for start, end in itertools.pairwise([0, *cuts, len(text)]):
        seen += text[start:end]
        certain, matched = watcher.push(text[start:end])
        delivered += certain
        found = first_match(seen, stop)
        assert matched == (found is not None)
        if found is not None:
            assert delivered == text[: found[0]]
            assert watcher.push("ab") == ("", True)
            assert watcher.finish() == ""
            return
        # Nothing is held back without need.
        assert delivered == seen[: len(seen) - may_become(seen, stop)]
    assert delivered + watcher.finish() == text


@pytest.mark.parametrize(
    ("stop", "pushes", "text", "matched"),
    [
        (("END",), ["on and on E", "N", "D more"], "on and on ", True),
        (("END",), ["E", "N", "E", "ND"], "EN", True),
        (("abcd", "bc"), ["ab", "c", "d"], "a", True),
        (("bc", "abc"), ["abc"], "", True),
        (("\n\n",), ["a\n", "b\n", "\n"], "a\nb", True),
        (("日本",), ["x日", "本"], "x", True),
        (("xyz",), ["xy", "xy"], "xyxy", False),
    ],
)
def test_examples(stop: tuple[str, ...], pushes: list[str], text: str, matched: bool) -> None:
    watcher = StopStrings(stop)
    results = [watcher.push(push) for push in pushes]
    assert "".join(certain for certain, _ in results) + watcher.finish() == text
    assert results[-1][1] == matched
