"""Grammars for constrained decoding, compiled for one model's tokens.

Admission uses them to refuse invalid constraints, the executor to mask logits. llguidance does the
work: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from ..config import (
    MOST_SHOWN,
    Constraint,
    EngineConfig,
    ModelError,
    RequestError,
    cut,
    sampling_checks,
    shown,
)
from .grammar_tokenizer import grammar_tokenizer, spellings
from .tokenizer import load_tokenizer, special_token_ids, stop_token_ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .grammar_trial import GrammarTrial

# Without a bound a model may emit white space for ever.
_JSON_DEFAULTS: Any = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}",
}
_ANY_OBJECT = '{"type": "object"}'

# Limits on a grammar's work per step. In comments, the maximum over 17 honest grammars at 151,936
# tokens (docs/constraints.md).
_LIMITS: Any = {
    "initial_lexer_fuel": 100_000,  # 70,312, of 111 KB; 12,695 of 18 KB
    "step_lexer_fuel": 200_000,  # 112,500, of 128 strict tools whose marks are spelled; else 1,563
    "step_max_items": 20_000,  # 415
    "max_items_in_row": 2_000,  # 531, of 500 choices
    "max_lexer_states": 25_000,  # 1,465; each takes 1 to 2 KB
    "max_grammar_size": 500_000,
}

_TOO_COSTLY = re.compile("too many (?:expressions|states|items)|max is", re.IGNORECASE)
"""llguidance's messages when a limit is exceeded."""

_UNSUPPORTED = re.compile("Unimplemented keys|oneOf constraints|min/maxProperties only")
"""llguidance's messages about keywords of JSON schemas."""

_PLACE = re.compile(r"(?:at )?(?P<line>\d+)\(\d+\): ")
"""Of an error in a grammar, which llguidance's message begins with."""

_QUOTED = re.compile(r" *(?:(?P<line>\d+) \| (?P<text>.*)|\^$)")
"""Its lines that quote the grammar, and the mark below them."""

_REGEX_ERROR = re.compile(
    r"regex parse error:\n(?: {4}(?P<pattern>[^\n]*)\n {4}(?P<before> *)\^)?.*?"
    r"\nerror: (?P<why>[^\n]*)",
    re.DOTALL,
)
"""The message about a regular expression, with a mark below its wrong part unless it has lines."""

_MOST_WORDS = 400
"""Characters quoted of the library's messages."""

_KEPT_BYTES = 64 << 20
"""Memory limit of cached compiled grammars."""

_BYTES_PER_CPU_S = 160e6
"""Memory of a compiled grammar by its compile time: 35 to 160 MB/s measured (by the time of masks
30 to 200). llguidance reports neither.
"""

MASK_S = 50e-6
"""Time of a mask whose states are cached, so that it adds none: 20 to 60 us."""

_MULTIPLYING = re.compile(r"\{\d+(?:,\d*)?\}|pattern|format|[&~]")
"""Parts of constraints whose states may multiply."""

_COUNTING = re.compile(r"max_tokens\s*=")
"""Part of a rule in Lark that counts tokens."""

_NEGATED = re.compile(r"~/(?:\\.|[^/\\])+/?", re.DOTALL)
"""Patterns that a text must not match, in Lark."""

_WALKS = 3
_WALK_TOKENS = 64
"""Texts, and their tokens, that are tried in a new grammar."""

_WALK_S = 0.05
"""CPU time after which no more are tried."""

_REFUSALS_KEPT = 1024
"""Refused grammars cached with their reason."""


def check_size(constraint: Constraint, max_bytes: int) -> None:
    """Check a constraint's length before anything else reads it.

    Raises:
        RequestError: invalid_constraint.
    """
    size = len(_encoded(constraint))
    if size > max_bytes:
        raise invalid(
            f"the constraint has {size} bytes, and {max_bytes} are taken "
            "(admission.max_constraint_bytes); make it shorter"
        )


def _said(words: object) -> str:
    """Return the library's message as one line, with the beginning of the grammar's line that it is
    about."""
    text = str(words)
    place = _PLACE.match(text)
    lines, where = [], ""
    for line in text.splitlines():
        if (quoted := _QUOTED.match(line)) is None:
            lines.append(line)
        elif place is not None and quoted["line"] == place["line"]:
            where = f", in `{cut(quoted['text'], MOST_SHOWN)}`"
    line = " ".join(" ".join(lines).split()) + where
    return cut(line.encode("ascii", "backslashreplace").decode(), _MOST_WORDS)


def invalid(message: str) -> RequestError:
    """Return the refusal of a constraint."""
    return RequestError(message, code="invalid_constraint")


def kind_of(constraint: Constraint) -> str:
    """Return the constraint's kind for telemetry: its field's name, or "none"."""
    with suppress(RequestError):
        return sampling_checks.kind_of(constraint)
    return "none"


def plain(constraint: Constraint) -> Constraint:
    """Return the constraint with every value as text.

    Raises:
        RequestError: invalid_constraint: as `sampling_checks.kind_of`, or a schema can't be JSON.
    """
    sampling_checks.kind_of(constraint)
    if constraint.json_schema is None:
        return constraint
    schema = constraint.json_schema
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(f"constraint.json_schema is no JSON: {_said(error)}") from None
    return Constraint(json_schema=text)


def grammar_of(
    constraint: Constraint, special: Mapping[str, int], ignored: frozenset[str] = frozenset()
) -> str:
    """Convert a `plain` constraint to llguidance's form.

    Args:
        special: Ids of special tokens by name.
        ignored: Keywords of JSON schemas to ignore.

    Raises:
        RequestError: invalid_constraint.
    """
    try:
        if constraint.json_object:
            return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_JSON_DEFAULTS)
        if constraint.json_schema is not None:
            assert isinstance(constraint.json_schema, str), "it is plain"
            from .enforced_schema import enforced_schema

            schema = enforced_schema(constraint.json_schema, ignored)
            return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_DEFAULTS)
        if constraint.regex is not None:
            return grammar_from("regex", constraint.regex)
        if constraint.choice is not None:
            return grammar_from("choice", msgspec.json.encode(constraint.choice).decode())
        if constraint.lark is not None:
            from .enforced_schema import enforced_lark

            return grammar_from("lark", enforced_lark(constraint.lark, special, ignored))
        assert constraint.gbnf is not None
        from .messages import lark_of_gbnf

        return lark_of_gbnf(constraint.gbnf)
    except (ValueError, RecursionError, UnicodeError) as error:
        raise invalid(f"the constraint can't be read: {_said(error)}") from None


def allows(masks: npt.NDArray[np.int32], token_ids: list[int]) -> npt.NDArray[np.bool_]:
    """Return which tokens masks allow, `[..., token_ids]`.

    Args:
        masks: `[..., ceil(vocab / 32)]`, one bit per token, lowest bit first.
        token_ids: Within the vocabulary.
    """
    words, bits = np.divmod(np.array(token_ids, np.int32), 32)
    allowed: npt.NDArray[np.bool_] = (masks[..., words] >> bits & 1).astype(np.bool_)
    return allowed


def only(token_ids: list[int], words: int) -> npt.NDArray[np.int32]:
    """Return a mask, `[words]`, that allows these tokens only."""
    mask = np.zeros(words, np.uint32)
    for token_id in token_ids:
        mask[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask.view(np.int32)


def is_too_costly(matcher: LLMatcher) -> bool:
    """Return whether the matcher stopped because a step exceeded `_LIMITS`."""
    # Its stop_reason is InternalError for every error.
    return matcher.is_error() and _TOO_COSTLY.search(matcher.get_error()) is not None


def is_dead_end(matcher: LLMatcher, *, may_stop: bool) -> bool:
    """Return whether the text can no longer satisfy its grammar.

    llguidance allows it to end then, as it does where a text is complete.

    Args:
        matcher: After the text so far.
        may_stop: Whether its mask allows an end-of-text token.
    """
    return matcher.is_error() or (may_stop and not matcher.is_accepting())


class _Compiled(NamedTuple):
    """A compiled grammar.

    Attributes:
        matcher: At its start.
        spelled: Tokens that the text shows by their names, which the grammar has, by id; and the
            ids of the tokens that spell them.
        size: Bytes.
    """

    matcher: LLMatcher
    spelled: Mapping[int, list[int]]
    size: int


@dataclass(eq=False)
class _Vocabulary:
    """A model's tokens in llguidance's form, with a cache of compiled grammars.

    One per process, so that the executor reuses grammars compiled by admission.

    Attributes:
        tokenizer: Tokenizer from `grammar_tokenizer`.
        stop_ids: End-of-text tokens.
        special: Ids of special tokens by name.
        spellings: As the function.
        ignored: Keywords of JSON schemas to ignore.
        vocab_size: Columns of the logits.
        ends: Tokens that end a part of JSON.
    """

    tokenizer: LLTokenizer
    stop_ids: list[int]
    special: dict[str, int]
    spellings: dict[str, tuple[int, list[int]]]
    ignored: frozenset[str]
    vocab_size: int
    ends: list[int]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._compiled_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._trial: GrammarTrial | None = None

    def knows(self, constraint: Constraint) -> bool:
        """Return whether the grammar, or its refusal, is cached."""
        try:
            _, key = _plain_and_key(constraint)
        except RequestError:
            return True
        with self._lock:
            return key in self._compiled or key in self._refused

    def matcher(
        self, constraint: Constraint, *, tried: bool
    ) -> tuple[LLMatcher, Mapping[int, list[int]]]:
        """Return a new matcher for a constraint, and as `_Compiled.spelled`.

        Args:
            tried: The grammar passed its trial, as all admitted ones have.

        Raises:
            RequestError: invalid_constraint.
        """
        constraint, key = _plain_and_key(constraint)
        with self._lock:
            found = self._compiled.get(key)
            refusal = self._refused.get(key)
        if refusal is not None:
            raise invalid(refusal)
        # Outside the lock: a cached grammar doesn't wait for another's compilation.
        if found is None:
            found = self._compile(constraint, key, tried=tried)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return found.matcher.deep_copy(), found.spelled

    def charge(self, constraint: Constraint, masks_s: float) -> None:
        """Account for the states that masks added to a grammar, which all its matchers share.

        Args:
            constraint: The grammar's constraint.
            masks_s: Time of its masks beyond `MASK_S` each.
        """
        _, key = _plain_and_key(constraint)
        with self._lock:
            if key in self._compiled:
                grown = int(masks_s * _BYTES_PER_CPU_S)
                self._keep(key, self._compiled[key], grown)

    def forget(self, constraint: Constraint) -> None:
        """Drop a grammar that exceeded a limit."""
        _, key = _plain_and_key(constraint)
        with self._lock:
            if (dropped := self._compiled.pop(key, None)) is not None:
                self._compiled_bytes -= dropped.size

    def _keep(self, key: bytes, compiled: _Compiled, grown: int) -> None:
        """Keep a grammar that has grown, and evict the least recently used ones."""
        self._compiled[key] = compiled._replace(size=compiled.size + grown)
        self._compiled_bytes += grown
        while self._compiled_bytes > _KEPT_BYTES and len(self._compiled) > 1:
            _, dropped = self._compiled.popitem(last=False)
            self._compiled_bytes -= dropped.size

    def _compile(self, constraint: Constraint, key: bytes, *, tried: bool) -> _Compiled:
        try:
            grammar = grammar_of(constraint, self.special, self.ignored)
            if not tried:
                self._try(grammar)
            start_s = time.thread_time()
            matcher = _compile(grammar, self.tokenizer, self.stop_ids)
            if not tried and _MULTIPLYING.search(_encoded(constraint).decode()):
                matcher = self._walk(grammar, matcher)
            size = len(grammar) + int((time.thread_time() - start_s) * _BYTES_PER_CPU_S)
        except RequestError as error:
            if error.code == "invalid_constraint":
                with self._lock:
                    self._refused[key] = error.message
                    if len(self._refused) > _REFUSALS_KEPT:
                        self._refused.popitem(last=False)
            raise
        spelled = _spelled(self.spellings, constraint.lark or grammar, grammar)
        compiled = _Compiled(matcher, spelled, 0)
        with self._lock:
            if key not in self._compiled:
                self._keep(key, compiled, size)
        return compiled

    def _walk(self, grammar: str, matcher: LLMatcher) -> LLMatcher:
        """Refuse a grammar in which every text soon exceeds a limit, as some patterns of counted
        words do: try a few texts of random tokens.

        Returns:
            The grammar's matcher, without the states of a text that exceeded a limit.

        Raises:
            RequestError: invalid_constraint.
        """
        start_s = time.thread_time()
        for seed in range(_WALKS):
            said = self._walk_once(matcher.deep_copy(), np.random.default_rng(seed))
            if not said:
                return matcher
            matcher = _compile(grammar, self.tokenizer, self.stop_ids)
            if time.thread_time() - start_s > _WALK_S:
                break
        raise invalid(
            f"the constraint takes too much work within a text: {_said(said)}; make it simpler: "
            "patterns that have to match together, or a length and a pattern with repetitions, "
            "multiply by each other"
        )

    def _walk_once(self, matcher: LLMatcher, rng: np.random.Generator) -> str:
        """Follow a random text; return the library's message if it exceeds a limit, else ""."""
        start_s = time.thread_time()
        for _ in range(_WALK_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if is_too_costly(matcher):
                return matcher.get_error()
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            allowed = allowed[~np.isin(allowed, self.stop_ids)]
            if not allowed.size or time.thread_time() - start_s > _WALK_S:
                return ""
            # Half of the tokens end something, so that a text has many parts.
            ends = allowed[np.isin(allowed, self.ends)]
            matcher.consume_token(
                int(rng.choice(ends if ends.size and rng.random() < 0.5 else allowed))
            )
        return ""

    def _try(self, grammar: str) -> None:
        """Run the grammar's trial. Raises RequestError: invalid_constraint."""
        # Only admission tries grammars, and an executor never needs this.
        from .grammar_trial import GrammarTrial, cpu_limit_s

        with self._lock:
            trial = self._trial = self._trial or GrammarTrial(
                self.vocab_size, self.stop_ids, _LIMITS
            )
        said = trial.run(grammar)
        if said is None:
            raise invalid(
                f"the constraint takes more than {cpu_limit_s(grammar):.2f} s, or too much memory, "
                "to compile; make it simpler: patterns that have to match together, or must not "
                "match, multiply by each other, most of all where they count repetitions"
            )
        if said:
            raise _unfollowed(said)


def _spelled(
    spellings: Mapping[str, tuple[int, list[int]]], text: str, grammar: str
) -> dict[int, list[int]]:
    """Return the tokens that may stand for their names in a constraint.

    Args:
        spellings: As the function.
        text: The constraint, whose negated patterns don't count.
        grammar: In llguidance's form. It may distinguish a token from its name, or count tokens.
    """
    if _COUNTING.search(grammar):
        return {}
    # A pattern's escapes are no part of a name.
    named = _NEGATED.sub("", text).replace("\\", "")
    return {
        token_id: spelled
        for name, (token_id, spelled) in spellings.items()
        if name in named and f"<[{token_id}]>" not in grammar
    }


def _unfollowed(said: str) -> RequestError:
    """Return the refusal of a constraint by the library's message."""
    from .enforced_schema import IGNORING

    if wrong := _REGEX_ERROR.search(said):
        pattern, before, why = wrong.groups()
        which = f" {shown(pattern)}, at character {len(before) + 1}" if pattern else ""
        return invalid(f"the constraint can't be followed: the regular expression{which}: {why}")
    advice = f"; {IGNORING}" if _UNSUPPORTED.search(said) else ""
    return invalid(f"the constraint can't be followed: {_said(said)}{advice}")


_VOCABULARIES: WeakValueDictionary[bytes, _Vocabulary] = WeakValueDictionary()
_VOCABULARIES_LOCK = threading.Lock()


@dataclass(eq=False)
class GrammarCompiler:
    """Makes matchers for constraints, with a cache. Thread-safe.

    A matcher tracks one sample's position in its grammar: the tokens allowed next.

    Attributes:
        folder: The model's folder; its tokenizer is loaded by `make_ready` or the first constraint.
        load: Returns the tokenizer.
        vocab_size: Columns of the model's logits.
        ignored: Keywords of JSON schemas to ignore.
    """

    folder: Path
    vocab_size: int
    load: Callable[[Path], PreTrainedTokenizerFast] = load_tokenizer
    ignored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | RequestError | ModelError | None = None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        vocab_size: int,
        load: Callable[[Path], PreTrainedTokenizerFast] = load_tokenizer,
    ) -> GrammarCompiler:
        """Return the compiler of a lane's model."""
        ignored = frozenset[str](config.ignored_schema_keywords)
        return cls(config.model_folder, vocab_size, load, ignored)

    def make_ready(self) -> None:
        """Prepare the tokenizer for constraints, before requests arrive.

        With a large vocabulary it takes a second, during which llguidance holds the GIL. Errors are
        raised by the first constraint.
        """
        with suppress(RequestError, ModelError):
            self._ready()

    @property
    def stop_ids(self) -> list[int]:
        """End-of-text tokens; empty before it is ready."""
        vocabulary = self._vocabulary
        return vocabulary.stop_ids if isinstance(vocabulary, _Vocabulary) else []

    def check(self, constraint: Constraint) -> None:
        """Check that a constraint compiles, first in another process, which ends those that take
        too long.

        Raises:
            RequestError: invalid_constraint, with llguidance's message.
        """
        self._ready().matcher(constraint, tried=False)

    def knows(self, constraint: Constraint) -> bool:
        """Return whether `check` would return from its cache."""
        vocabulary = self._vocabulary
        return isinstance(vocabulary, _Vocabulary) and vocabulary.knows(constraint)

    def matcher(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher at the start of a checked constraint's grammar.

        Raises:
            RequestError: As `check`.
            ModelError: The model has no usable tokenizer.
        """
        return self.begin(constraint)[0]

    def begin(self, constraint: Constraint) -> tuple[LLMatcher, Mapping[int, list[int]]]:
        """Return `matcher`, and the tokens that the text shows by their names, with the ids that
        spell them.

        The matcher has tokens like `<think>` as special: a text's own name is spelled by other
        tokens. Where these may come, the model may write the token itself.

        Returns:
            The matcher; by id, the ids of the tokens that spell it.
        """
        return self._ready().matcher(constraint, tried=True)

    def num_allowed(self, constraint: Constraint, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens the grammar allows, from its start on; an end-of-text
        token where the text is complete."""
        matcher, spelled = self.begin(constraint)
        for place, token_id in enumerate(token_ids):
            spelling = [token_id]
            if token_id in spelled and not matcher.validate_tokens(spelling):
                spelling = spelled[token_id]
            if matcher.validate_tokens(spelling) < len(spelling):
                ends = token_id in self.stop_ids and matcher.is_accepting()
                return place + ends
            matcher.consume_tokens(spelling)
        return len(token_ids)

    def charge(self, constraint: Constraint, masks_s: float) -> None:
        """Account for memory of a constraint's masks, by their time beyond `MASK_S`."""
        self._ready().charge(constraint, masks_s)

    def forget(self, constraint: Constraint) -> None:
        """Drop a grammar whose matcher exceeded a limit, with the states it accumulated."""
        self._ready().forget(constraint)

    def _ready(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._find_vocabulary()
                except (RequestError, ModelError) as error:
                    self._vocabulary = error
            if isinstance(self._vocabulary, Exception):
                raise self._vocabulary.with_traceback(None)
            return self._vocabulary

    def _find_vocabulary(self) -> _Vocabulary:
        """Return the process's vocabulary for these tokens."""
        tokenizer = self.load(self.folder)
        stop_ids = sorted(stop_token_ids_of(self.folder, tokenizer))
        if not stop_ids:
            raise invalid(
                "the model has no end-of-sequence token, so that a constrained answer could "
                "not end; leave the constraint out"
            )
        backend, ignored = tokenizer.backend_tokenizer, sorted(self.ignored)
        content = f"{self.vocab_size} {stop_ids} {ignored} {backend.to_str()}"
        key = hashlib.sha256(content.encode()).digest()
        with _VOCABULARIES_LOCK:
            found = _VOCABULARIES.get(key)
            if found is None:
                text = grammar_tokenizer(backend)
                try:
                    made = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=stop_ids)
                except ValueError as error:
                    raise invalid(
                        f"the model's tokenizer can't be used with a constraint: {_said(error)}"
                    ) from None
                found = _VOCABULARIES[key] = _Vocabulary(
                    tokenizer=made,
                    stop_ids=stop_ids,
                    special=special_token_ids(tokenizer),
                    spellings=spellings(backend, made, stop_ids),
                    ignored=self.ignored,
                    vocab_size=self.vocab_size,
                    ends=[each for text in '"}],' for each in made.tokenize_str(text)],
                )
            return found


def _plain_and_key(constraint: Constraint) -> tuple[Constraint, bytes]:
    """Return the `plain` constraint and its cache key. Raises RequestError: invalid_constraint."""
    constraint = plain(constraint)
    return constraint, hashlib.sha256(_encoded(constraint)).digest()


def _encoded(constraint: Constraint) -> bytes:
    try:
        return msgspec.json.encode(constraint)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise invalid(f"the constraint can't be read: {_said(error)}") from None


def _compile(grammar: str, tokenizer: LLTokenizer, stop_ids: list[int]) -> LLMatcher:
    """Compile a grammar. Raises RequestError: invalid_constraint."""
    limits = LLParserLimits(verbose_errors=False, **_LIMITS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise _unfollowed(matcher.get_error())
    tried = matcher.deep_copy()
    allowed = np.frombuffer(tried.compute_bitmask(), np.int32)
    if is_too_costly(tried):
        raise invalid(
            f"the constraint takes too much work for its first token: {_said(tried.get_error())}; "
            "make it simpler"
        )
    if is_dead_end(tried, may_stop=bool(allows(allowed, stop_ids).any())):
        raise invalid("the constraint allows no text at all")
    return matcher
