"""The block list: normalisation, and matches that don't depend on how a text is cut."""

from __future__ import annotations

import sys
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nano_inference.gateway.policy.block_list import (
    LONGEST_SEGMENT,
    BlockList,
    Normaliser,
    Scanner,
    _begins_joining,
    context_chars,
    normalise,
)

from ...errors import raises

# Letters that normalise to others, to several or to nothing; marks; Hangul; word boundaries.
ALPHABET = "abdefistBADS ßẞﬁİıſＡｂé\u0301\u0323\u0345\u00ad\u200d\u1100\u1161\u11a8가ﾞｶ1.\n"
TEXTS = st.text(ALPHABET, max_size=60)
CUTS = st.lists(st.integers(0, 60), max_size=8)

BLOCKED = BlockList(["bad", "ßfi", "İs", "가b"], [r"e[0-9a]{1,3}\.", r"\bfist\b", "d.*d"], 12)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


def expected(block_list: BlockList, text: str) -> int | None:
    """Return the start of the first match, by brute force."""
    normaliser = Normaliser()
    normalised, origins = normaliser.push(text)
    rest, more = normaliser.finish()
    normalised, origins = normalised + rest, origins + more
    for begin in range(len(normalised)):
        if block_list.find(normalised, begin, begin + 1) is not None:
            return origins[begin]
    return None


@given(TEXTS, CUTS)
def test_normalising_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    whole, normaliser = Normaliser(), Normaliser()
    in_pieces = [normaliser.push(piece) for piece in pieces_of(text, cuts)] + [normaliser.finish()]
    once = [whole.push(text), whole.finish()]
    assert "".join(normalised for normalised, _ in in_pieces) == "".join(
        normalised for normalised, _ in once
    )
    assert [each for _, origins in in_pieces for each in origins] == [
        each for _, origins in once for each in origins
    ]


@given(st.text(max_size=40) | TEXTS)
@example("\u03b1\u0345\u0301")
@example("\u0345\uff9e")
def test_normalising_is_idempotent_and_ignores_the_form(text: str) -> None:
    normalised = normalise(text)
    assert unicodedata.is_normalized("NFC", normalised)
    assert normalise(normalised) == normalised
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert normalise(unicodedata.normalize(form, text)) == normalised


def test_characters_that_combine_begin_no_segment() -> None:
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.combining(character):
            assert _begins_joining(character)
        if not unicodedata.decomposition(character):
            continue
        parts = unicodedata.normalize("NFD", character)
        if len(parts) > 1 and unicodedata.normalize("NFC", parts) == character:
            assert all(map(_begins_joining, parts[1:])), hex(ord(character))


@pytest.mark.parametrize(
    "text",
    ["BAD", "\uff42\uff41\uff44", "b\u00ada\u200bd", "\U0001d401\U0001d41a\U0001d41d", "ⓑⓐⓓ"],
)
def test_a_literal_matches_in_any_form(text: str) -> None:
    assert BlockList(["bad"], [], 1).blocks(f"so {text} it is")


@pytest.mark.parametrize(
    ("literal", "text"),
    [("straße", "STRASSE"), ("ﬁsh", "FISH"), ("ss", "ß"), ("e\u0301", "É"), ("i\u0307x", "İX")],
)
def test_literals_are_normalised_too(literal: str, text: str) -> None:
    assert BlockList([literal], [], 1).blocks(text)
    assert BlockList([text], [], 1).blocks(literal)


def test_many_marks_take_linear_time() -> None:
    marks = "\u0300\u0323" * 200_000
    assert len(normalise("a" + marks)) >= len(marks)
    normaliser = Normaliser()
    assert len(normaliser.push("a" + "\u0300" * 500)[0]) >= 500 - LONGEST_SEGMENT


def test_a_lone_surrogate_is_replaced() -> None:
    assert normalise("a\ud800B") == "a\ufffdb"


@given(TEXTS, CUTS)
@example("a baß", [])
@example("paßfi", [3])
def test_where_a_match_begins_does_not_depend_on_the_pieces(text: str, cuts: list[int]) -> None:
    scanner, at = Scanner(BLOCKED), expected(BLOCKED, text)
    before = 0
    for piece in pieces_of(text, cuts):
        scanner.push(piece)
        # Never more than may stay, and never less than before.
        assert before <= scanner.safe <= (len(text) if at is None else at)
        before = scanner.safe
    scanner.finish()
    assert scanner.blocked_at == at
    assert scanner.safe == (len(text) if at is None else at)


@given(TEXTS, TEXTS, CUTS)
def test_a_match_may_begin_before_the_text(before: str, text: str, cuts: list[int]) -> None:
    literals = BlockList(["bad", "ßfi", "İs", "가b"], [], 1)
    if literals.blocks(before):
        return
    scanner = Scanner(literals, before[-context_chars(literals) :])
    for piece in pieces_of(text, cuts):
        scanner.push(piece)
    scanner.finish()
    at = expected(literals, before + text)
    assert scanner.blocked_at == (None if at is None else max(0, at - len(before)))


def test_the_longest_match_is_held_back() -> None:
    scanner = Scanner(BlockList(["1234567890"], [], 1))
    scanner.push("abcdefghijklmnopqrstuvwxyz")
    # Also the last character, which a mark may follow.
    assert scanner.safe == 26 - 10 - 1
    scanner.finish()
    assert scanner.safe == 26


@pytest.mark.parametrize(
    ("pattern", "longest"),
    [
        ("abc", 3),
        (r"\bfoo\b", 7),
        ("(a|bc)d?", 8),
        ("a{2,3}", 6 + 3),
        ("(?:a{2}b){3}", (12 + 2) * 3),
        (r"a\+", 3),
        ("a+", 200),
        ("[^ ]*x", 200),
        ("a{3,}", 200),
        (r"\\+", 200),
        (r"\x{1F600}", 9),
        (r"a{150}", 6 + 150),
        (r"\b\d{3}-\d{2}-\d{4}\b", 21 + 9),
        (r"[a-z]{0,50}\){9}", 16 + 59),
    ],
)
def test_the_longest_match_of_a_pattern(pattern: str, longest: int) -> None:
    assert BlockList([], [pattern], 200).max_match == longest


def test_a_longer_match_is_cut() -> None:
    blocked = BlockList([], ["a.*z"], 10)
    found = []
    for text in ("a" + "." * 8 + "z", "a" + "." * 9 + "z", "a" + "." * 9 + "a.z...z"):
        scanner = Scanner(blocked)
        scanner.push(text)
        scanner.finish()
        found.append(scanner.blocked_at)
    assert found == [0, None, 10]
    # A prompt is there as a whole.
    assert blocked.blocks("a" + "." * 9 + "z")


def test_anchors_refer_to_the_whole_text() -> None:
    blocked = BlockList([], [r"\bcat\b", "^dog", "end$"], 50)
    for text, at in (
        ("the cats", None),
        ("the cat", 4),
        ("the cat.", 4),
        ("dog", 0),
        ("a dog", None),
        ("end of it", None),
        ("the end", 4),
    ):
        for cut in range(len(text)):
            scanner = Scanner(blocked)
            scanner.push(text[:cut])
            scanner.push(text[cut:])
            scanner.finish()
            assert scanner.blocked_at == at, (text, cut)


@pytest.mark.parametrize(
    ("literals", "patterns", "because"),
    [
        (["\u200b"], [], "no visible character"),
        ([], ["(a"], "can't be read"),
        ([], ["(?=a)b"], "can't be read"),
        ([], [r"(a)\1"], "can't be read"),
        ([], ["a*"], "where there is nothing"),
        ([], ["stra\u00dfe"], "compared as 'ss'"),
        ([], [r"\C"], "no bytes"),
    ],
)
def test_invalid_literals_and_patterns_are_refused(
    literals: list[str], patterns: list[str], because: str
) -> None:
    with raises("invalid_guardrails", because):
        BlockList(literals, patterns, 256)


def test_patterns_match_without_case_in_any_form() -> None:
    blocked = BlockList([], ["CAF\u00c9 [0-9]+", "\uff21b"], 256)
    assert blocked.blocks("cafe\u0301 12")
    assert blocked.blocks("AB")


def test_nested_repetition_is_linear() -> None:
    blocked = BlockList([], ["(?:(?:a+)+)+b"], 256)
    scanner = Scanner(blocked)
    scanner.push("a" * 20_000)
    scanner.finish()
    assert scanner.blocked_at is None
    assert not blocked.blocks("a" * 200_000)


def test_patterns_with_groups_of_one_name() -> None:
    blocked = BlockList([], ["(?P<x>foo)", "(?P<x>bar)"], 256)
    assert blocked.blocks("bar")


def test_an_empty_block_list_blocks_nothing() -> None:
    nothing = BlockList([], [], 256)
    assert not nothing
    assert not nothing.blocks("anything")
