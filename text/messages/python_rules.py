"""Arguments of calls as in Python, as rules of a grammar: `name=value, …`, with values in JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...config import RequestError
from ..schemas import ANNOTATIONS, moved
from .lark import Grammar, json_of, nested, quoted
from .lark_in_json import in_json
from .message_format import MessageFormat
from .own_bodies import NAME
from .typed import referred

_KEPT = ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$ref"),
    *("$defs", "definitions", "$schema", "$id", "x-guidance"),
}

_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class PythonArguments:
    """The rules of arguments in Python. Names come in the order of the schema, and no others."""

    def __init__(self, grammar: Grammar, form: MessageFormat) -> None:
        self._grammar = grammar
        self._form = form
        self._values = 0
        self._any = ""

    def any(self) -> str:
        """Return the rule of arguments of any names and values."""
        if not self._any:
            one = f'{_NAME} "=" {json_of({})}'
            self._any = self._grammar.rule("any_arguments", f'({one} (", " {one})*)?')
        return self._any

    def text_of(self, name: str, grammar: str) -> str:
        """Return the rule of one argument, a text in a grammar."""
        begin, end = self._grammar.literal(f'{name}="'), quoted('"')
        return f"{begin} {nested(in_json(grammar))} {end}"

    def of(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of the arguments of a schema.

        Raises:
            RequestError: unsupported.
        """
        given = {**schema, **(referred(schema, schema) or {})}
        for keyword in given:
            if keyword not in _KEPT:
                raise self._unsupported(f"arguments with {keyword!r} in their schema")
        properties, required = given.get("properties", {}), given.get("required", ())
        known = {**properties, **{name: True for name in required if name not in properties}}
        # The rules of the arguments from each on: at the begin of all, and behind another.
        first, further = '""', '""'
        for name, part in reversed(known.items()):
            argument = self._argument(name, part, schema)
            begun, behind = f"{argument} {further}", f'", " {argument} {further}'
            if name not in required:
                begun, behind = f"{begun} | {first}", f"{behind} | {further}"
            first = self._rule(f"({begun})")
            further = self._rule(f"({behind})")
        return first

    def _argument(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        if re.fullmatch(NAME, name) is None:
            raise self._unsupported(f"an argument called {name!r}")
        found = dict(schema) if isinstance(schema, Mapping) else {}
        if "$ref" in json.dumps(found):
            # The document to which its references refer goes along.
            at = "#/$defs/root"
            found = {**moved(found, at), "$defs": {"root": moved(root, at)}}
        return self._rule(f"{self._grammar.literal(f'{name}=')} {json_of(found)}")

    def _rule(self, body: str) -> str:
        self._values += 1
        return self._grammar.rule(f"python_{self._values}", body)

    def _unsupported(self, what: str) -> RequestError:
        return RequestError(
            f"the model's message format, {self._form.name}, writes arguments as in Python, where "
            f"{what} can't be enforced; leave that out, or let the tool be called freely",
            code="unsupported",
        )
