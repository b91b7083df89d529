"""Grammars that the text of a sample has to follow, for the tokens of one model.

Shared ground of admission, which refuses what can't be followed, and of the executor, which follows
it. llguidance does the work: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ..config import Constraint, RequestError, cut, shown
from .tokenizer import load_tokenizer, stop_token_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Without a bound a model may write white space for ever.
_JSON_DEFAULTS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}",
}
_ANY_OBJECT = '{"type": "object"}'

# Beyond these a grammar takes longer than a step may wait for it.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
)

_MOST_WORDS = 400
"""Characters of what the library says."""

_KEPT = 256
"""Grammars that are kept compiled."""


def check_size(constraint: Constraint, max_bytes: int) -> None:
    """Whether a constraint is short enough to be looked at.

    Raises:
        RequestError: invalid_constraint.
    """
    try:
        size = len(msgspec.json.encode(constraint))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(f"the constraint can't be read: {_said(error)}") from None
    if size > max_bytes:
        raise invalid(
            f"the constraint has {size} bytes, and {max_bytes} are taken "
            "(admission.max_constraint_bytes); make it shorter"
        )


def _said(words: object) -> str:
    """What the library says, on one line, as it can stand in a message."""
    line = " ".join(str(words).split()).encode("ascii", "backslashreplace").decode()
    return cut(line, _MOST_WORDS)


def invalid(message: str) -> RequestError:
    """Why a constraint is refused."""
    return RequestError(message, code="invalid_constraint")


def plain(constraint: Constraint) -> Constraint:
    """The same constraint with nothing but text in it.

    Raises:
        RequestError: invalid_constraint: not exactly one kind is given, or a schema is no JSON.
    """
    given = [
        name
        for name in constraint.__struct_fields__
        if getattr(constraint, name) not in (None, False)
    ]
    if len(given) != 1:
        wanted = ", ".join(constraint.__struct_fields__)
        raise invalid(f"constraint has {shown(given)}; give exactly one of {wanted}")
    if constraint.json_schema is None:
        return constraint
    schema = constraint.json_schema
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        found = msgspec.json.decode(text)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(f"constraint.json_schema is no JSON: {_said(error)}") from None
    if not isinstance(found, dict):
        raise invalid("constraint.json_schema must be a JSON object")
    return Constraint(json_schema=text)


def grammar_of(constraint: Constraint) -> str:
    """A constraint that is `plain`, as llguidance reads it.

    Raises:
        RequestError: invalid_constraint.
    """
    try:
        if constraint.json_object:
            return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_JSON_DEFAULTS)
        if constraint.json_schema is not None:
            return LLMatcher.grammar_from_json_schema(
                constraint.json_schema, defaults=_JSON_DEFAULTS
            )
        if constraint.regex is not None:
            return grammar_from("regex", constraint.regex)
        if constraint.choice is not None:
            if not (constraint.choice and all(constraint.choice)):
                raise invalid("constraint.choice must be texts that are not empty, one at least")
            return grammar_from("choice", msgspec.json.encode(constraint.choice).decode())
        if constraint.lark is not None:
            return grammar_from("lark", constraint.lark)
        assert constraint.gbnf is not None
        return grammar_from("gbnf", constraint.gbnf)
    except (ValueError, RecursionError, UnicodeError) as error:
        raise invalid(f"the constraint can't be read: {_said(error)}") from None


def is_dead_end(matcher: LLMatcher, stops_allowed: npt.NDArray[np.bool_]) -> bool:
    """Whether a text can't become what it has to be any more.

    llguidance then lets it end, as it does where a text is complete.

    Args:
        matcher: Behind what there is of the text.
        stops_allowed: `[stop ids]`, whether its mask allows each.
    """
    return matcher.is_error() or bool(stops_allowed.any() and not matcher.is_accepting())


class GrammarCompiler:
    """Makes matchers of constraints. Any thread may use it; what it has compiled it keeps.

    A matcher knows one sample's place in its grammar: which tokens may come next.

    Attributes:
        vocab_size: Columns of the model's logits.
        stop_ids: Tokens with which a text may end, once something has been compiled.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        load: Callable[[Path], PreTrainedTokenizerFast] = load_tokenizer,
    ) -> None:
        """Args:
        folder: The model's, where its tokenizer is; loaded when the first constraint comes.
        vocab_size: Columns of the model's logits, of which the tokenizer may have fewer.
        load: Gives the tokenizer.
        """
        self._folder = folder
        self._load = load
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self.stop_ids: list[int] = []
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def check(self, constraint: Constraint) -> None:
        """Whether a constraint can be followed.

        Raises:
            RequestError: invalid_constraint, with llguidance's own words.
        """
        self.matcher(constraint)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """A matcher at the beginning of its grammar.

        Raises:
            RequestError: As `check`.
            ModelError: The model has no tokenizer that can be used.
        """
        try:
            key = msgspec.json.encode(constraint)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise invalid(f"the constraint can't be read: {_said(error)}") from None
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                found = self._compile(constraint)
                self._compiled[key] = found
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(key)
            return found.deep_copy()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        tokenizer = self._tokens()
        grammar = grammar_of(plain(constraint))
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            tried = matcher.deep_copy()
            allowed = np.frombuffer(tried.compute_bitmask(), np.uint8)
            if is_dead_end(
                tried, np.unpackbits(allowed, bitorder="little").view(np.bool_)[self.stop_ids]
            ):
                raise invalid("the constraint allows no text at all")
        if matcher.is_error():
            raise invalid(f"the constraint can't be followed: {_said(matcher.get_error())}")
        return matcher

    def _tokens(self) -> LLTokenizer:
        if self._tokenizer is None:
            tokenizer = self._load(self._folder)
            self.stop_ids = sorted(stop_token_ids_of(self._folder, tokenizer))
            if not self.stop_ids:
                raise invalid(
                    "the model has no end-of-sequence token, so that a constrained answer could "
                    "not end; leave the constraint out"
                )
            text = tokenizer.backend_tokenizer.to_str()
            try:
                self._tokenizer = LLTokenizer(
                    text, n_vocab=self.vocab_size, eos_token=self.stop_ids
                )
            except ValueError as error:
                raise invalid(
                    f"the model's tokenizer can't be used with a constraint: {_said(error)}"
                ) from None
        return self._tokenizer
