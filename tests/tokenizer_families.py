"""Small tokenizers of each family, made on the spot."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it stops.",
    "naïve café, größer, 日本語のテキスト, Привет мир, 🙂🙃 and €5.",
] * 4

SPECIAL = ["<s>", "</s>"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool call>", "<étape>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    words = ["▁", "▁Hello", "▁world", "lo", "a", "▁a", ".", "é", "日本", "<0x4", "0", "▁▁"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *parts])
    return tokenizer


def metaspace() -> Tokenizer:
    scored = [(token, -1.0) for token in ["<unk>", *SPECIAL, "▁", "▁the", "fox", "▁fox", "é", "s"]]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.add_special_tokens(["<unk>", *SPECIAL])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokens = [*special, "the", "fox", "##es", "##é", "do", "not", ".", "n", "'", "t"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"[UNK]": 0, "red": 1, "fox": 2}, unk_token="[UNK]"))


FAMILIES = {
    make.__name__: make for make in (byte_level, byte_fallback, metaspace, word_piece, no_decoder)
}
