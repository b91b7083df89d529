"""Building blocks of grammars, in llguidance's form of Lark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, grammar_from

from ...config import Constraint, RequestError
from ...config.sampling_checks import kind_of
from ..schemas import without_words

JSON_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"[ \n\r\t]{1,8}"}
"""Options of JSON. Without a bound a model may write white space for ever."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_NOTHING = '""'

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
"""llguidance's conversion takes quadratic time in their number: 5 s for 16,000, during all of which
it holds the interpreter's lock."""

SPACE = r"/[ \t\r\n]{1,8}/"
"""White space between the parts of a message."""


class Grammar:
    """The rules of a grammar, in whose literal texts some tokens are special."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: ids by names. No other tokens spell such a name."""
        self._tokens = tokens
        names = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []

    def first_token(self, text: str) -> re.Match[str] | None:
        """Find the first special token in a text."""
        return self._pattern.search(text) if self._pattern else None

    def tokens_in(self, text: str) -> list[str]:
        """Return the names of all special tokens in a text."""
        return self._pattern.findall(text) if self._pattern else []

    def token_id(self, name: str) -> int:
        """Return the id of a special token."""
        return self._tokens[name]

    def literal(self, text: str) -> str:
        """Return a literal text in a rule."""
        parts = []
        while found := self.first_token(text):
            parts += [quoted(text[: found.start()]), f"<[{self.token_id(found[0])}]>"]
            text = text[found.end() :]
        return " ".join(part for part in (*parts, quoted(text)) if part != _NOTHING) or _NOTHING

    def rule(self, name: str, body: str) -> str:
        """Add a rule, or a terminal; return its name in other rules.

        Args:
            name: With its attributes, as in `name[lazy]`.
        """
        self._rules.append(f"{name}: {body}")
        return name.split("[")[0]

    def text(self) -> str:
        """Return the grammar's text."""
        return "\n".join((*self._rules, ""))


def quoted(text: str) -> str:
    """Return a text without special tokens, in a rule or a terminal."""
    return _encoded(text).replace("\x7f", r"\u007f")


def without(*patterns: str) -> str:
    """Return a terminal for text that none of the regular expressions matches."""
    unwanted = (f"~{regex(f'(?s:.*)(?:{pattern})(?s:.*)')}" for pattern in patterns)
    return " & ".join(("/(?s:.*)/", *unwanted))


def up_to(text: str) -> str:
    """Return a terminal, which has to be lazy, for any text up to the end of another text."""
    return regex(f"(?s:.*){re.escape(text)}")


def regex(text: str) -> str:
    """Return a regular expression as a terminal."""
    if not text:
        return _NOTHING
    if re.search(r"(?<!\\)(\\\\)*\\$", text):
        raise _invalid("a regular expression ends with a backslash that escapes nothing")
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", text, flags=re.DOTALL) + "/"


def is_regex(text: str) -> bool:
    """Return whether llguidance supports a regular expression: it has no look-around."""
    return not LLMatcher.validate_grammar(f"start: {regex(text)}")


def json_of(schema: Mapping[str, Any]) -> str:
    """Return JSON of a schema, in a rule."""
    own = schema.get("x-guidance")
    options = {**JSON_OPTIONS, **(own if isinstance(own, dict) else {})}
    return f"%json {_encoded({**without_words(schema), 'x-guidance': options})}"


def is_lark(text: str) -> bool:
    """Return whether llguidance supports a grammar in Lark's form, within another one."""
    return not LLMatcher.validate_grammar(f"start: {nested(text)}")


def lark_of_gbnf(text: str) -> str:
    """Convert a grammar from llama.cpp's form to Lark.

    Raises ValueError or RecursionError: it is none.
    """
    return grammar_from("gbnf", _BLANK_LINES.sub("\n", text))


def answer_of(constraint: Constraint) -> str:
    """Return a constraint in a rule.

    Raises:
        RequestError: invalid_constraint.
    """
    kind_of(constraint)
    if constraint.json_object:
        return json_of(ANY_OBJECT)
    if constraint.json_schema is not None:
        return json_of(schema_of(constraint))
    if constraint.regex is not None:
        return regex(constraint.regex)
    if constraint.choice is not None:
        return f"({' | '.join(map(quoted, constraint.choice))})"
    if constraint.gbnf is not None:
        try:
            return nested(lark_of_gbnf(constraint.gbnf))
        except (ValueError, RecursionError) as error:
            raise _invalid(f"constraint.gbnf can't be read: {error}") from None
    assert constraint.lark is not None
    return nested(constraint.lark)


def schema_of(constraint: Constraint) -> dict[str, Any]:
    """Return the schema of a constraint that has one.

    Raises:
        RequestError: invalid_constraint.
    """
    schema = constraint.json_schema
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"constraint.json_schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise _invalid("constraint.json_schema must be a JSON object")
    return schema


def nested(lark: str) -> str:
    """Return a grammar of its own, in a rule."""
    return f"%lark {{\n{lark}\n}}"


def _encoded(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _invalid(f"a schema or a text of it can't be read: {error}") from None


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_constraint")
