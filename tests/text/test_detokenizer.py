from __future__ import annotations

import codecs
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from nano_inference.config import ModelError
from nano_inference.text.detokenizer import Detokenizer, TokenPieces

ANCHORS = {
    "byte_level": ["T", "."],
    "byte_fallback": ["a", "▁world"],
    "metaspace": ["▁the", "s"],
    "word_piece": ["the", "##es"],
    "no_decoder": ["red", "fox"],
}


def stream(tokenizer: Tokenizer, groups: list[list[int]]) -> str:
    detokenizer = Detokenizer(TokenPieces(tokenizer))
    return "".join([*map(detokenizer.push, groups), detokenizer.finish()])


def in_context(tokenizer: Tokenizer, anchor: str, ids: list[int]) -> str:
    """Return the text that the ids add after the anchor, by the library's own decode."""
    before = tokenizer.token_to_id(anchor)
    return tokenizer.decode([before, *ids])[len(tokenizer.decode([before])) :]


def grouped(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    return [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]


def byte_of(token: str | None) -> int | None:
    found = re.fullmatch(r"<0x(..)>", token or "")
    return int(found[1], 16) if found else None


@pytest.mark.parametrize("family", ["byte_level", "metaspace", "word_piece", "no_decoder"])
@given(data=st.data())
def test_pushes_and_finish_are_decode_in_context(
    families: dict[str, Tokenizer], family: str, data: st.DataObject
) -> None:
    tokenizer = families[family]
    # Past the vocabulary too: output layers are padded, and decode leaves such ids out.
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=30))
    groups = data.draw(st.composite(grouped)(ids))
    anchor = data.draw(st.sampled_from(ANCHORS[family]))
    assert stream(tokenizer, groups) == in_context(tokenizer, anchor, ids)


@given(data=st.data())
def test_byte_fallback_of_valid_text_is_decode_in_context(
    families: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = families["byte_fallback"]
    words = [
        i for i in range(tokenizer.get_vocab_size()) if byte_of(tokenizer.id_to_token(i)) is None
    ]
    characters = st.characters(exclude_categories=["Cs"]).map(
        lambda c: [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in c.encode()]
    )
    parts = data.draw(st.lists(st.sampled_from(words).map(lambda i: [i]) | characters, max_size=20))
    ids = list(itertools.chain.from_iterable(parts))
    groups = data.draw(st.composite(grouped)(ids))
    anchor = data.draw(st.sampled_from(ANCHORS["byte_fallback"]))
    assert stream(tokenizer, groups) == in_context(tokenizer, anchor, ids)


@given(data=st.data())
def test_byte_fallback_of_any_ids_is_utf8_with_replacement(
    families: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = families["byte_fallback"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    whole = b""
    for token_id in ids:
        byte = byte_of(tokenizer.id_to_token(token_id))
        alone = in_context(tokenizer, "a", [token_id]).encode()
        whole += alone if byte is None else bytes([byte])
    assert stream(tokenizer, [ids]) == whole.decode(errors="replace")


@given(data=st.data())
def test_text_is_held_back_only_while_a_character_is_incomplete(
    families: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = families["byte_fallback"]
    values = data.draw(st.lists(st.integers(0, 255), max_size=12))
    detokenizer = Detokenizer(TokenPieces(tokenizer))
    reference = codecs.getincrementaldecoder("utf-8")("replace")
    for value in values:
        token_id = tokenizer.token_to_id(f"<0x{value:02X}>")
        assert detokenizer.push([token_id]) == reference.decode(bytes([value]))
    assert detokenizer.finish() == reference.decode(b"", final=True)
    assert detokenizer.finish() == ""


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_byte_level_gives_back_any_text(families: dict[str, Tokenizer], text: str) -> None:
    tokenizer = families["byte_level"]
    ids = tokenizer.encode(text).ids
    shown = tokenizer.decode(ids)  # without "<s>", should the text spell it out
    assert stream(tokenizer, [[i] for i in ids]) == shown


@pytest.mark.parametrize(
    ("family", "tokens", "text"),
    [
        ("byte_fallback", ["▁Hello", "▁world"], " Hello world"),
        ("byte_fallback", ["<s>", "▁Hello", "</s>", "▁world"], " Hello world"),
        ("byte_fallback", ["a", "<0x80>", "a"], "a\ufffda"),
        ("byte_fallback", ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a"], "€\ufffda"),
        ("byte_fallback", ["a", "<0xE2>", "<0x82>"], "a\ufffd"),
        ("byte_fallback", ["<0x41>", "<0x4", "a"], "A<0x4a"),
        ("metaspace", ["▁the", "▁fox"], " the fox"),
        ("word_piece", ["the", "fox", "##es", "."], " the foxes."),
        ("byte_level", ["Ġ", "<s>", "Ģ", "a", "<tool call>"], " \ufffda<tool call>"),
        ("byte_level", ["â", "</s>", "Ĥ", "¬"], "€"),
    ],
)
def test_examples(
    families: dict[str, Tokenizer], family: str, tokens: list[str], text: str
) -> None:
    tokenizer = families[family]
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    assert stream(tokenizer, [[i] for i in ids]) == text


def test_the_librarys_stream_still_fails_where_ours_does_not(
    families: dict[str, Tokenizer],
) -> None:
    """When this fails, `DecodeStream` may have become good enough to replace our own."""
    tokenizer = families["byte_fallback"]
    tokens = ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a"]
    library = DecodeStream(skip_special_tokens=True)
    ids = [tokenizer.token_to_id(token) for token in tokens]
    with pytest.raises(Exception, match="Invalid prefix"):
        list(map(library.step, [tokenizer] * len(ids), ids))
    assert stream(tokenizer, [ids]) == "€\ufffda"


def test_a_known_token_is_never_decoded_again(families: dict[str, Tokenizer]) -> None:
    """The cost per token stays constant."""

    class Counting:
        calls = 0

        def __getattr__(self, name: str) -> object:
            Counting.calls += 1
            return getattr(families["word_piece"], name)

    detokenizer = Detokenizer(TokenPieces(Counting()))  # type: ignore[arg-type]
    detokenizer.push([3, 4, 5])
    calls = Counting.calls
    detokenizer.push([3, 4, 5] * 1000)
    assert Counting.calls == calls


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]),
    ],
)
def test_decoders_that_look_at_neighbours_are_refused(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(models.WordLevel({"red": 0, "fox": 1}, unk_token="red"))
    tokenizer.decoder = decoder
    with pytest.raises(ModelError, match="can't be streamed"):
        TokenPieces(tokenizer)


def test_a_vocabulary_without_words_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"!": 0, "?": 1}, unk_token="!"))
    with pytest.raises(ModelError, match="no letter, digit or word"):
        TokenPieces(tokenizer)
