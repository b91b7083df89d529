"""The tokenizer of the bundled tiny model: its special tokens, its chat template, its training."""

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from . import tasks

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Contractions, words with one leading character, single digits, signs, line ends, blanks.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "Answer with the result only.",
    "Be brief.",
)

# Not Transformers' own annotation, which does not pass mypy's strict mode.
FastTokenizer = Any


def build_tokenizer(vocabulary: int, seed: int) -> FastTokenizer:
    """Train a byte-level BPE tokenizer of so many tokens on training examples of this seed.

    Only ASCII examples are used, so every other character stays split into its UTF-8 bytes.
    Normalizer, pieces and decoder are those that Transformers puts into every Qwen2 tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=True) for t in (END_OF_TEXT, TURN_START, TURN_END)]
        + [AddedToken(PAD, special=True)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["system\nuser\nassistant\n", *SYSTEM_MESSAGES] * 100
    for task in tasks.TASKS:
        for chat in (False, True):
            examples = tasks.stream(task, "train", seed, chat=chat)
            drawn = (next(examples) for _ in range(3000))
            texts.extend(t for t in (e.prompt + e.answer for e in drawn) if t.isascii())
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast  # Not typed either.
    return make(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: FastTokenizer, text: str) -> list[int]:
    """Return the token ids of ``text``, which may hold special tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat_text(tokenizer: FastTokenizer, messages: list[dict[str, str]]) -> str:
    """Return the chat up to where the assistant's next answer begins."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    return text
