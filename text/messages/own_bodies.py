"""Bodies of calls that Transformers' content parsers don't read: Python, and other JSON.

A field names its parser in its arguments: `{"content": "text", "content_args": {"as": "python"}}`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Call = dict[str, Any]
"""A call: `name` and `arguments`."""

STRING = r'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
"""A string of Python, which may have line breaks: models write them."""

NAME = r"[^\W\d][\w.-]*"
"""A name of a function or an argument in Python's calls, more than Python has."""

_TOKEN = re.compile(
    rf"(?P<string>{STRING})"
    rf"|(?P<name>{NAME})(?P<behind>\s*[(=])?"
    r"|(?P<number>[\d.][\w.]*(?:[eE][+-]\d+)?)"
    r"|(?P<space>\s+)"
    r"|(?P<sign>[\[\]{}(),:+-])",
    re.DOTALL,
)
_WORDS: Mapping[str, Any] = {
    "True": True, "False": False, "None": None, "true": True, "false": False, "null": None,
}  # fmt: skip


def parsed(kind: str, body: str) -> list[Call]:
    """Return the calls of a body.

    Raises:
        ValueError: It is not wholly made of calls.
    """
    return list(PARSERS[kind](body))


def _python(body: str) -> Iterator[Call]:
    """Calls as in Python, in a list or line by line: `[find(city="Rome", days=3)]`.

    Names of functions and arguments may be any that tools have. Values are literals, of Python or
    of JSON.
    """
    names: list[str] = []
    try:
        with warnings.catch_warnings():
            # Unknown escapes, which stay as they are.
            warnings.simplefilter("ignore")
            lines = ast.parse(_with_plain_names(body.strip(), names)).body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("it is no Python") from error
    for line in lines:
        value = line.value if isinstance(line, ast.Expr) else None
        several = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for call in several:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("it is no call, or has an argument without a name")
            given = [(keyword.arg, _literal(keyword.value)) for keyword in call.keywords]
            yield {
                "name": names[_place(call.func)],
                "arguments": _unique(
                    (names[int((name or "_x")[1:])], each) for name, each in given
                ),
            }


def _with_plain_names(body: str, names: list[str]) -> str:
    """Return Python in which functions and arguments are `_0`, `_1` …, the places of their names,
    and strings have neither line breaks nor escapes of JSON alone."""
    pieces, at, depth = [], 0, 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        if found is None:
            raise ValueError("a part of it is no literal")
        text, at = found[0], found.end()
        if found["string"]:
            text = _string(text)
        elif found["name"]:
            if found["behind"]:
                names.append(found["name"])
                text = f"_{len(names) - 1}{found['behind']}"
                depth += found["behind"].endswith("(")
            elif found["name"] not in _WORDS:
                raise ValueError(f"{found['name']} is no literal")
        elif found["space"]:
            # Between brackets a line may end anywhere.
            text = " " if depth else text
        elif found["sign"]:
            depth += (text in "([{") - (text in ")]}")
        pieces.append(text)
    return "".join(pieces)


def _string(text: str) -> str:
    if text[:3] not in ('"""', "'''"):
        if text[0] == '"':
            try:
                return repr(json.loads(text, strict=False))
            except ValueError:
                pass
        text = text.replace("\r", "\\r").replace("\n", "\\n")
    return text


def _place(function: ast.expr) -> int:
    if not isinstance(function, ast.Name) or not function.id.startswith("_"):
        raise ValueError("it has no name")
    return int(function.id[1:])


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float())):
            number = _literal(node.operand)
            return -number if isinstance(node.op, ast.USub) else number
        case ast.List(elts=each) | ast.Tuple(elts=each):
            return [_literal(value) for value in each]
        case ast.Dict(keys=keys, values=values):
            items = zip(keys, values, strict=True)
            pairs = [(_literal(key), _literal(value)) for key, value in items if key is not None]
            if len(pairs) < len(keys) or not all(isinstance(key, str) for key, _ in pairs):
                raise ValueError("a name in it is no text")
            return _unique(pairs)
    raise ValueError("a value is no literal")


def _named(body: str) -> Iterator[Call]:
    """JSON in which each call is an object of its name: `[{"find": {"city": "Rome"}}]`."""
    calls = json.loads(body)
    for call in calls if isinstance(calls, list) else [calls]:
        ((name, arguments),) = call.items()
        yield {"name": name, "arguments": arguments}


def values_in_a_row(text: str) -> list[Any]:
    """Return JSON values that stand one after another. Raises ValueError."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        found.append(value)
    return found


def _unique(pairs: Any) -> dict[str, Any]:
    known = list(pairs)
    found = dict(known)
    if len(found) < len(known):
        raise ValueError("an argument stands there twice")
    return found


PARSERS: Mapping[str, Callable[[str], Iterable[Call]]] = {
    "python": _python,
    "named": _named,
    "in a row": values_in_a_row,
}
"""The parsers, by their names in `content_args`."""
