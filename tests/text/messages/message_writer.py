"""Writes messages by chance, within what is asked of them, as an executor would."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from nano_inference.config import BUNDLED_MODEL, Constraint, EngineConfig
from nano_inference.text.detokenizer import Detokenizer, TokenPieces
from nano_inference.text.grammar import GrammarCompiler, is_dead_end
from nano_inference.text.messages import MessageFormat, MessageReader, Reading, ToolCall
from nano_inference.text.messages.message_format import known_formats
from nano_inference.text.tokenizer import load_tokenizer, special_token_ids

FOLDER = EngineConfig(model_path=BUNDLED_MODEL).model_folder
VOCAB = 900
MOST = 300
"""Tokens of a message."""

_HINTED = 0.15
"""The probability of a hint."""


class Message(NamedTuple):
    """A reader's result."""

    text: str
    reasoning: str
    content: str
    calls: list[ToolCall]


def _without_marks() -> PreTrainedTokenizerFast:
    tokenizer: Any = load_tokenizer(FOLDER)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [each for each in state["added_tokens"] if each["special"]]
    plain = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=tokenizer.eos_token)


class Writer:
    """A tokenizer, and what can be written with it.

    Attributes:
        special_tokens: As `constraint_of` takes them.
        marked: Whether it has tokens of its own for marks.
        compiler: Compiler of its grammars.
    """

    def __init__(self, special: Sequence[str] = (), added: Sequence[str] = ()) -> None:
        """The bundled model's tokenizer, without its own marks, and with more tokens in it."""
        tokenizer = _without_marks()
        for names, is_special in ((special, True), (added, False)):
            tokens = [AddedToken(each, special=is_special, normalized=False) for each in names]
            tokenizer.add_tokens(tokens, special_tokens=is_special)
        self.special_tokens = special_token_ids(tokenizer)
        self.marked = bool([*special, *added])
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer.backend_tokenizer, skip_special=False)
        self.compiler = GrammarCompiler(FOLDER, VOCAB, self._load)
        # What ends a part of a text, so that most come to their end.
        self.bias = np.zeros(VOCAB)
        self.bias[self.tokens('"}],')] = 3.0
        self.bias[sorted(self.special_tokens.values())] = 2.0

    def _load(self, folder: Path) -> object:
        return self._tokenizer

    def tokens(self, text: str) -> list[int]:
        """Return the tokens that the tokenizer makes of a text."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spelled(self, text: str) -> list[int]:
        """Return tokens of a text, each character for itself, so that no token stands for more."""
        return [token for character in text for token in self.tokens(character)]

    def may_be(self, constraint: Constraint, text: str | list[int]) -> bool:
        """Whether a text is one of those that are asked for."""
        matcher = self.compiler.matcher(constraint)
        tokens = self.tokens(text) if isinstance(text, str) else text
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def allowed(self, constraint: Constraint, text: str | list[int]) -> list[str]:
        """The tokens that may come after a text."""
        matcher = self.compiler.matcher(constraint)
        tokens = self.tokens(text) if isinstance(text, str) else text
        assert matcher.consume_tokens(tokens), matcher.get_error()
        return [self._tokenizer.decode([token]) for token in np.flatnonzero(self._mask(matcher))]

    def write(
        self, constraint: Constraint, seed: int, hints: Sequence[str] = ()
    ) -> tuple[list[int], bool]:
        """The tokens of a message, and whether it came to its end.

        Args:
            hints: Texts that chance alone would not write; some of them are tried now and then.
        """
        rng = np.random.default_rng(seed)
        matcher = self.compiler.matcher(constraint)
        stops, tokens = self.compiler.stop_ids, list[int]()
        while len(tokens) < MOST:
            if hints and rng.random() < _HINTED:
                hint = self.tokens(hints[rng.integers(len(hints))])
                tokens += hint[: matcher.try_consume_tokens(hint)]
            allowed = self._mask(matcher)
            if is_dead_end(matcher, may_stop=bool(allowed[stops].any())):
                break
            logits = rng.standard_normal(VOCAB) * 2 + self.bias
            token = int(np.where(allowed, logits, -np.inf).argmax())
            if token in stops:
                return tokens, True
            assert matcher.consume_token(token), matcher.get_error()
            tokens.append(token)
        return tokens, False

    def text(self, tokens: Sequence[int]) -> str:
        """Special tokens by their names."""
        words = Detokenizer(self._pieces)
        return words.push(tokens) + words.finish()

    def read(self, form: MessageFormat, reading: Reading, tokens: list[int]) -> Message:
        """Return a reader's result of a finished message."""
        reader, words = MessageReader(form, reading, "seed"), Detokenizer(self._pieces)
        text = [*(words.push([token]) for token in tokens), words.finish()]
        deltas = [*map(reader.feed, text), reader.finish()]
        assert reader.malformed == 0, ascii("".join(text))
        return Message(
            "".join(text),
            "".join(delta.reasoning for delta in deltas),
            "".join(delta.content for delta in deltas),
            [call for delta in deltas for call in delta.calls],
        )

    def _mask(self, matcher: LLMatcher) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=VOCAB, bitorder="little").view(np.bool_)


MARK = re.compile(r"<[^<>\s=]+>|\[/?[A-Z_]+\]")
FORMS = {form.name: form for form in known_formats() if form.calls is not None}


def _parts(syntax: Any) -> tuple[Any, ...]:
    return msgspec.structs.astuple(syntax) if isinstance(syntax, msgspec.Struct) else ()


@cache
def writer_of(name: str, *, marked: bool) -> Writer:
    """With tokens for all marks of a format, or for none."""
    form = FORMS[name]
    syntaxes = (form.calls, form.calls.arguments, form.reasoning)
    parts = [each for syntax in syntaxes for each in _parts(syntax)]
    texts = [part for part in parts if isinstance(part, str)]
    marks = MARK.findall(" ".join((*texts, form.answer_open)))
    return Writer(special=list(dict.fromkeys(marks)) if marked else ())
