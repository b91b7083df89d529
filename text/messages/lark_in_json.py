"""Grammars in Lark's form for texts within strings of JSON.

A grammar describes a text; within JSON the text's quotation marks, backslashes and control
characters are escaped. All of a grammar's characters stand in its literals, regular expressions and
ranges, so that each of these is rewritten.

The lexer of llguidance ends a terminal at the first byte that can't continue it. The backslash of
an escaped line break could continue most texts. So each character is a terminal of its own, none of
which is the beginning of another, and what was a terminal is a rule.

Nothing public parses regular expressions: Python's own parser reads them, in the part of their
syntax that Rust's have as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from .lark import quoted

_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|\#[^\n]*)
    |(?P<import>%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?
        |\(\s*(?P<several>\w+(?:\s*,\s*\w+)*)\s*\)))
    |(?P<first>"(?:\\.|[^"\\\n])*")\s*\.\.\s*(?P<last>"(?:\\.|[^"\\\n])*")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<case>i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/)(?P<flags>[imsx]*)
    |(?P<name>[?!]?[A-Z_][A-Z0-9_]*\b)
    |(?P<kept>[?!]?\w+|->|[:|()*+?\[\]]|\{\d*,?\d*\})""",
    re.VERBOSE,
)

_ESCAPED = '["\\\\\\x00-\\x1f]'
"""A class of the characters that are escaped."""

_SPECIAL = ['"', "\\", *map(chr, range(32))]

_COMMON = {
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": r"[0-9]",
    "ESCAPED_STRING": r'"(?:\\["\\/bfnrt]|\\u[a-fA-F0-9]{4}|[^"\\\x00-\x1f\x7f])*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "LCASE_LETTER": r"[a-z]",
    "LETTER": r"[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "UCASE_LETTER": r"[A-Z]",
    "WORD": r"[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Lark's own terminals."""

_CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}


def in_json(grammar: str) -> str:
    """Return the grammar of the same texts, as they stand in strings of JSON.

    Raises:
        ValueError: It has something that has no such form here: a token, a grammar within, an
            operator on sets of texts, or another file.
    """
    return "".join(_rewritten(grammar))


def _rewritten(grammar: str) -> Iterator[str]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise ValueError(f"{grammar[at : at + 20]!r} can't be within JSON")
        at = found.end()
        if found["import"]:
            yield _imported(found)
        elif found["first"]:
            ends = [json.loads(found[name]) for name in ("first", "last")]
            if any(len(each) != 1 for each in ends):
                raise ValueError("a range goes from one character to another")
            yield _chars("-".join(_in_class(ord(each)) for each in ends), 0)
        elif found["text"]:
            text = json.loads(found["text"])
            yield _rule(re.escape(text), "i" if found["case"] else "")
        elif found["regex"]:
            yield _rule(found["regex"][1:-1].replace(r"\/", "/"), found["flags"])
        elif found["name"]:
            yield _renamed(found["name"])
        else:
            yield found[0] if found["kept"] or "\n" not in found[0] else "\n"


def _renamed(terminal: str) -> str:
    """Return a terminal's name as a rule's."""
    return f"terminal_{terminal.lstrip('?!').lower()}"


def _imported(found: re.Match[str]) -> str:
    lines = []
    for each in (found["one"] or found["several"]).split(","):
        name = each.strip()
        if name not in _COMMON:
            raise ValueError(f"common.{name} can't be within JSON")
        lines.append(f"{_renamed(found['alias'] or name)}: {_rule(_COMMON[name])}")
    return "\n".join(lines)


def _rule(pattern: str, flags: str = "") -> str:
    """Return a regular expression for the escaped texts of another, in a rule."""
    try:
        parsed = parser.parse(f"(?{flags}:{pattern})" if flags else pattern)
        return f"({_sequence(parsed, 0)})"
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"a regular expression can't be read: {error}") from None


def _sequence(parsed: Any, flags: int) -> str:
    return " ".join(_node(kind, argument, flags) for kind, argument in parsed) or '""'


def _node(kind: Any, argument: Any, flags: int) -> str:
    match kind:
        case codes.LITERAL if not flags & re.IGNORECASE:
            return quoted(json.dumps(chr(argument), ensure_ascii=False)[1:-1])
        case codes.LITERAL:
            return _chars(_in_class(argument), flags)
        case codes.NOT_LITERAL:
            return _chars(f"^{_in_class(argument)}", flags)
        case codes.ANY:
            return _chars(r"\U00000000-\U0010ffff" if flags & re.DOTALL else r"^\n", flags)
        case codes.IN:
            return _chars("".join(map(_member, argument)), flags)
        case codes.BRANCH:
            return f"({' | '.join(_sequence(each, flags) for each in argument[1])})"
        case codes.SUBPATTERN:
            _, added, removed, inner = argument
            return f"({_sequence(inner, (flags | added) & ~removed)})"
        case codes.MAX_REPEAT:
            least, most, inner = argument
            bound = "" if most is codes.MAXREPEAT else most
            return f"({_sequence(inner, flags)}){{{least},{bound}}}"
    raise ValueError(f"{kind} of a regular expression can't be within JSON")


def _member(part: tuple[Any, Any]) -> str:
    kind, value = part
    match kind:
        case codes.NEGATE:
            return "^"
        case codes.LITERAL:
            return _in_class(value)
        case codes.RANGE:
            return "-".join(map(_in_class, value))
        case codes.CATEGORY:
            return _CATEGORIES[value]
    raise ValueError(f"{kind} in a class can't be within JSON")


def _in_class(code: int) -> str:
    return rf"\U{code:08x}"


def _chars(members: str, flags: int) -> str:
    """Return a terminal of one of some characters, as it stands in JSON."""
    case = "i" if flags & re.IGNORECASE else ""
    one = re.compile(f"[{members}]", re.IGNORECASE if case else 0)
    escaped = [re.escape(json.dumps(char)[1:-1]) for char in _SPECIAL if one.fullmatch(char)]
    # As Rust has it.
    members = re.sub(r"\\U([0-9a-f]{8})", r"\\x{\1}", members)
    return f"/{'|'.join([f'(?{case}:[[{members}]--{_ESCAPED}])', *escaped])}/"
