"""Arguments between tags, as rules of a grammar: texts as they are, other values as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...config import RequestError
from ..schemas import ANNOTATIONS, moved
from .lark import Grammar, is_regex, json_of, nested, quoted, regex, without
from .message_format import KIND, ArgumentSyntax, MessageFormat
from .regions import region_template
from .typed import TEXT, referred, types_of

_ANY_TEXT = "/(?s:.*)/"

_NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"

_VALUES = {
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": "[01]|(?i:true|false)",
    "null": "(?i:null|none)",
    "array": r"\[.*",
    "object": r"\{.*",
}
"""Texts, without the spaces around them, that are read as values of other types."""

_ANY_NAME = "/[A-Za-z0-9_.-]{1,64}/"

_DAY = r"(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[0-9]{{4}}-(?:0[1-9]|1[0-2])-{_DAY}"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:0[0-9]|1[0-4]):00)"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"

_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:[0-9]{1,6}D|T[0-9]{1,6}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,32}})?@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,5}}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": r"(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uuid": r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,15}}://{_LABEL}(?:\.{_LABEL}){{0,5}}(?:/[A-Za-z0-9._~=&?/-]*)?",
}
"""Formats of texts, for some of their texts at least."""

_KEPT = frozenset({"type", "properties", "required", "additionalProperties", "$ref"})
_ASIDE = ANNOTATIONS | {"$defs", "definitions", "$schema", "$id", "x-guidance", "nullable"}
"""Keywords of a schema that say nothing about a value, or are read elsewhere."""

_OF_TEXTS = frozenset({"enum", "const", "pattern", "format", "minLength", "maxLength"})
_OF_PARTS = frozenset({"anyOf", "oneOf", "allOf", "$ref", "type"})
_OF_OTHERS = re.compile(
    "(?:min|max|additional|unevaluated|prefix|pattern)?(?:Items|Properties|Contains)$|items$|"
    "properties$|required$|contains$|propertyNames$|dependent|multipleOf$|"
    "(?:exclusive)?(?:[mM]in|[mM]ax)imum$"
)
"""Keywords that say nothing about texts."""


class TaggedArguments:
    """The rules of arguments between tags.

    The names come in the order of the schema, and no others. A text holds no tag of its syntax.
    """

    def __init__(self, grammar: Grammar, form: MessageFormat, syntax: ArgumentSyntax) -> None:
        self._grammar = grammar
        self._form = form
        self._syntax = syntax
        self._template = region_template(form.response_template, with_calls=True)
        self._root: Mapping[str, Any] = {}
        self._values = 0
        self._any = ""

    def any(self) -> str:
        """Return the rule of arguments of any names, which are texts."""
        if not self._any:
            before = self._grammar.literal(self._syntax.before)
            text = f"{self._middle(TEXT)} {self._text(True, TEXT)}"
            self._any = self._grammar.rule("any_argument", f"{before} {_ANY_NAME} {text}")
        return f"{self._any}*"

    def text_of(self, name: str, grammar: str) -> str:
        """Return the rule of one argument, a text in a grammar that writes no tag."""
        self._check_name(name)
        begin = self._grammar.literal(self._syntax.before + name)
        after = self._grammar.literal(self._syntax.after)
        return f"{begin} {self._middle(TEXT)} {nested(grammar)} {after}"

    def of(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of the arguments of a schema.

        Raises:
            RequestError: unsupported.
        """
        self._root = schema
        given = {**schema, **(referred(schema, schema) or {})}
        self._check(given, _KEPT, "arguments")
        properties, required = given.get("properties", {}), given.get("required", ())
        known = {**properties, **{name: True for name in required if name not in properties}}
        parts = [
            self._argument(name, part) + ("" if name in required else "?")
            for name, part in known.items()
        ]
        return " ".join(parts) or '""'

    def _check(self, schema: Mapping[str, Any], known: frozenset[str], what: str) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in _ASIDE:
                raise self._unsupported(f"{what} with {keyword!r} in their schema")

    def _unsupported(self, what: str) -> RequestError:
        return RequestError(
            f"the model's message format, {self._form.name}, writes arguments between tags, where "
            f"{what} can't be enforced; leave that out, or let the tool be called freely",
            code="unsupported",
        )

    # --- an argument -----------------------------------------------------------------------------

    def _argument(self, name: str, schema: Any) -> str:
        self._check_name(name)
        types = types_of(schema, self._root)
        choices = []
        if "string" in types:
            choices.append(f"{self._middle(TEXT)} {self._text(schema, types)}")
        choices += [
            f"{self._middle(group)} {self._json(schema, types, group)}"
            for group in self._groups(types - TEXT)
        ]
        self._values += 1
        value = self._grammar.rule(f"value_{self._values}", " | ".join(choices))
        return f"({self._grammar.literal(self._syntax.before + name)} {value})"

    def _check_name(self, name: str) -> None:
        if self._template.names_in(self._syntax.written(name, "")) != [name]:
            raise self._unsupported(f"an argument called {name!r}")

    def _middle(self, types: frozenset[str]) -> str:
        """Return what stands between an argument's name and a value of one of some types."""
        return self._grammar.literal(
            self._syntax.middle.replace(KIND, self._syntax.word(min(types)))
        )

    def _groups(self, types: frozenset[str]) -> Iterator[frozenset[str]]:
        """Yield the types that have the same word."""
        for word in sorted({self._syntax.word(kind) for kind in types}):
            yield frozenset(kind for kind in types if self._syntax.word(kind) == word)

    def _json(self, schema: Any, types: frozenset[str], group: frozenset[str]) -> str:
        found = dict(schema) if isinstance(schema, Mapping) else {}
        if "$ref" in json.dumps(found):
            # The document to which its references refer goes along.
            at = "#/$defs/root"
            found = {**moved(found, at), "$defs": {"root": moved(self._root, at)}}
        if types != group:
            defs = {"$defs": found.pop("$defs")} if "$defs" in found else {}
            found = {"allOf": [found, {"type": sorted(group)}], **defs}
        return f"{json_of(found)} {self._grammar.literal(self._syntax.after)}"

    # --- texts -----------------------------------------------------------------------------------

    def _text(self, schema: Any, types: frozenset[str]) -> str:
        """Return the rule of a text up to the end of its argument."""
        tags = (self._syntax.before.strip(), self._syntax.after.strip())
        parts = [without(*(re.escape(tag) for tag in tags))]
        if (found := self._strings(schema)) != _ANY_TEXT:
            parts.append(f"({found})")
        if types != TEXT:
            others = "|".join(_VALUES[kind] for kind in sorted(types - TEXT))
            parts.append("~" + regex(rf"(?s:\s*(?:{others})\s*)"))
        self._values += 1
        name = f"TEXT_{self._values}"
        self._grammar.rule(name, " & ".join(parts))
        after = self._syntax.after
        token = self._grammar.first_token(after)
        if token is None:
            return self._grammar.rule(f"text_{self._values}[lazy]", f"{name} {quoted(after)}")
        if token.start():
            name = self._grammar.rule(f"{name}_END", f"{name} {quoted(after[: token.start()])}")
        return f"{name} {self._grammar.literal(after[token.start() :])}"

    def _strings(self, schema: Any) -> str:
        """Return a terminal for the texts of a schema."""
        if not isinstance(schema, Mapping):
            return _ANY_TEXT
        for keyword in schema:
            if not (
                keyword in _OF_TEXTS | _OF_PARTS | _ASIDE or _OF_OTHERS.match(keyword) is not None
            ):
                raise self._unsupported(f"a text with {keyword!r} in its schema")
        parts = [*self._literals(schema), *self._matched(schema)]
        for key in ("anyOf", "oneOf"):
            if key in schema:
                some = [part for part in schema[key] if "string" in types_of(part, self._root)]
                parts.append(" | ".join(f"({self._strings(part)})" for part in some))
        parts += [self._strings(part) for part in schema.get("allOf", ())]
        if (target := referred(schema, self._root)) is not None:
            parts.append(self._strings(target))
        parts = [part for part in parts if part != _ANY_TEXT]
        return " & ".join(f"({part})" for part in parts) or _ANY_TEXT

    def _literals(self, schema: Mapping[str, Any]) -> Iterator[str]:
        for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if values is not None:
                texts = [value for value in values if isinstance(value, str)]
                yield regex("(?:" + "|".join(map(_escaped, texts)) + ")")

    def _matched(self, schema: Mapping[str, Any]) -> Iterator[str]:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            yield regex(f"(?s:.{{{least},{most}}})")
        if (pattern := schema.get("pattern")) is not None:
            yield regex(self._whole(str(pattern)))
        if (form := _FORMATS.get(schema.get("format", ""))) is not None:
            yield regex(form)

    def _whole(self, pattern: str) -> str:
        """Return a pattern of a whole text, for one that is searched in it."""
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        ends = re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
        body = pattern[1 if not begin else 0 : -1 if ends else None]
        found = f"{begin}(?:{body})" + ("" if ends else "(?s:.*)")
        if not is_regex(found):
            raise self._unsupported(f"a text with the pattern {pattern!r}")
        return found


def _escaped(text: str) -> str:
    """Return a regular expression of one text, on one line."""
    return "".join(
        re.escape(each) if each.isprintable() else rf"\u{{{ord(each):x}}}" for each in text
    )
