"""Incremental detokenisation, one token at a time.

A completion's text is the text that its tokens add after the prompt, so a completion that continues
a word begins with its space. (`decode` of the completion alone would strip it, as
SentencePiece-like decoders do at the start of a text.)

Why not `tokenizers.decoders.DecodeStream`: with byte-fallback tokens it raises InvalidPrefix once
an invalid byte follows a valid character; its cost is quadratic in a run of invalid bytes; and it
has no end at which an incomplete character is emitted. In every supported decoder a token adds the
same bytes at every position but a text's first. So each token's bytes are computed once; per token,
the work is a lookup and, for characters split between tokens, Python's UTF-8 decoder.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer

from ..config import ModelError
from .tokenizer import parts_of

_TABLE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


Pieces = dict[int, str | bytes]
"""Text that each token adds: a string, or bytes where a character may be split."""


class TokenPieces(dict[int, str | bytes]):
    """Text that each token id adds: a string, or bytes where a character may be split.

    Unknown ids add nothing; special tokens add text only on request. Filled on demand, so at most
    as large as the vocabulary; one instance serves all samples of a model.

    Raises:
        ModelError: The tokenizer's decoder is of a kind whose tokens depend on their neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        """Args: `skip_special`: special tokens add nothing. False: they add their name."""
        super().__init__()
        kinds = {part["type"] for part in parts_of(tokenizer.decoder, "decoders")}
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        odd = kinds - {"ByteLevel", "Fuse"} if self._byte_level else kinds - _TABLE_DECODERS
        if odd:
            raise ModelError(
                f"the tokenizer's decoder is {' + '.join(sorted(kinds))}, which can't be streamed; "
                f"supported are ByteLevel, or any of {', '.join(sorted(_TABLE_DECODERS))}"
            )
        added = tokenizer.get_added_tokens_decoder()
        self._skip_special = skip_special
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._anchor = 0 if self._byte_level else self._find_anchor()
        self._anchor_text = tokenizer.decode([self._anchor])

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = self._work_out(token_id)
        return piece

    def _work_out(self, token_id: int) -> str | bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if token_id in self._special:
            return "" if self._skip_special else token
        if self._byte_level:
            return _as_text(_byte_level_bytes(token))
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte is not None:
            return _as_text(bytes.fromhex(byte[1]))
        return self._tokenizer.decode([self._anchor, token_id])[len(self._anchor_text) :]

    def _find_anchor(self) -> int:
        """Return an ordinary token to put before another, which is then not the text's first."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            if self._tokenizer.decode([token_id]).isalnum():  # a special token decodes to ""
                return token_id
        raise ModelError("the tokenizer has no letter, digit or word; save the model's own")


class Detokenizer:
    """The text of one sample.

    All pushes and `finish` together equal `decode(anchor + ids)` without the anchor's own text,
    where `decode` is the tokenizers library's (special tokens skipped) and `anchor` is any part of
    the prompt that ends between characters. One exception: in an invalid run of byte-fallback
    tokens `decode` shows every byte as U+FFFD, even those of whole characters already delivered.
    Here, as in byte-level decoding, whole characters stay and each maximal ill-formed part becomes
    one U+FFFD (Unicode 15, section 3.9).
    """

    __slots__ = ("_cut", "_piece_of")

    def __init__(self, pieces: Pieces) -> None:
        self._piece_of = pieces.__getitem__
        self._cut = b""

    @property
    def incomplete(self) -> bool:
        """Whether the tokens so far end within a character."""
        return bool(self._cut)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is now final."""
        if not self._cut:
            try:
                return "".join(map(self._piece_of, token_ids))  # type: ignore[arg-type]
            except TypeError:
                pass  # there are bytes among the pieces
        text = ""
        for piece in map(self._piece_of, token_ids):
            if isinstance(piece, str):
                if not self._cut:
                    text += piece
                    continue
                piece = piece.encode()
            data = self._cut + piece
            decoded, used = utf_8_decode(data, "replace", False)
            self._cut = data[used:]
            text += decoded
        return text

    def finish(self) -> str:
        """Return U+FFFD if the tokens ended within a character, else ""."""
        text = self._cut.decode(errors="replace")
        self._cut = b""
        return text


def _as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _byte_level_bytes(token: str) -> bytes:
    """Return a byte-level token's bytes; a token with a foreign character stands for itself."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable bytes are their own, others follow from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
