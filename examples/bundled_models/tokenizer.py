"""The tokenizer of the bundled tiny model: its special tokens, its chat template, its training."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
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
from .examples import Example, messages_of, tools_of

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<|pad|>"

MARKS = tuple(
    f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")
)
"""Added tokens that are not special: decoding keeps them when it skips special tokens."""

_TINY = Path(__file__).parents[2] / "models" / "tiny"
# The bundled folder is the source of its own templates, which `train.save` writes again. The chat
# template is like Qwen's: tools in the system turn, their results in a user turn. It writes only
# the fields of a tool that the model has learnt to read, and leaves out earlier thoughts.
CHAT_TEMPLATE = (_TINY / "chat_template.jinja").read_text(encoding="utf-8")
# The parser of Transformers' `tokenizer.parse_response`.
RESPONSE_TEMPLATE: dict[str, Any] = json.loads(
    (_TINY / "tokenizer_config.json").read_text(encoding="utf-8")
)["response_template"]

# Contractions, words with one leading character, single digits, signs, line ends, blanks.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer with the result only.", "Be brief.")

# Transformers' own annotation does not pass mypy's strict mode.
FastTokenizer = Any


def build_tokenizer(vocabulary: int, seed: int) -> FastTokenizer:
    """Train a tokenizer with `vocabulary` tokens on training examples.

    Only ASCII examples are used, so every other character stays split into its UTF-8 bytes.
    """
    tokenizer = train_bpe(
        _texts(seed), vocabulary - len(MARKS), (END_OF_TEXT, TURN_START, TURN_END, PAD)
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    return wrap(tokenizer, chat_template=CHAT_TEMPLATE, response_template=RESPONSE_TEMPLATE)


def train_bpe(texts: Iterator[str], vocabulary: int, special: tuple[str, ...]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `vocabulary` tokens, the special ones among them.

    Normalizer, pieces and decoder are those of every Qwen2 tokenizer of Transformers.
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
        special_tokens=[AddedToken(t, special=True) for t in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap(tokenizer: Tokenizer, others: tuple[str, ...] = (), **options: Any) -> FastTokenizer:
    """Return a tokenizer for Transformers; `others` are special tokens beside the usual ones."""
    make: Any = PreTrainedTokenizerFast
    return make(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END, *others],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        **options,
    )


def _texts(seed: int) -> Iterator[str]:
    """Yield the texts that the byte pairs are counted in."""
    yield from ["system\nuser\nassistant\nTools:\n", *SYSTEM_MESSAGES] * 100
    for task in (*tasks.TASKS, *tasks.TOOL_TASKS):
        for form in tasks.forms(task):
            # Thoughts and tools repeat themselves, so fewer of them are needed.
            count = 3000 if task in tasks.TASKS and form != "thinking" else 500
            for example in itertools.islice(tasks.stream(task, form, "train", seed), count):
                text = "".join((*example.tools, example.prompt, *example.results, example.answer))
                if text.isascii():
                    yield text


def encode(tokenizer: FastTokenizer, text: str) -> list[int]:
    """Return the token ids of `text`, special tokens included."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def chat_text(
    tokenizer: FastTokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    *,
    thinking: bool = False,
) -> str:
    """Return the chat before the assistant's next answer or thought."""
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    assert isinstance(text, str)
    return text


def prompt_text(tokenizer: FastTokenizer, example: Example) -> str:
    """Return the text before the answer of `example`."""
    if not example.chat:
        return example.prompt
    messages, tools = messages_of(example), tools_of(example)
    return chat_text(tokenizer, messages, tools, thinking=example.thinking)
