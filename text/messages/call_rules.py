"""Tool calls as rules of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from transformers.utils.chat_parsing.response_templates import load_response_template

from ...config import Constraint, RequestError
from ..schemas import may_have, moved
from .lark import ANY_OBJECT, Grammar, is_lark, is_regex, json_of, nested, quoted, schema_of
from .lark_in_json import in_json
from .message_format import NAME, NUMBER, ArgumentSyntax, MessageFormat
from .python_rules import PythonArguments
from .tagged_rules import TaggedArguments
from .tools import Tool, ToolUse

_ANY_NUMBER = "/[0-9]{1,3}/"


def unsupported(form: MessageFormat, why: str) -> RequestError:
    """Return the error of a request that the format can't express."""
    return RequestError(
        f"the model's message format, {form.name}, {why}; gateway.message_format can name another",
        code="unsupported",
    )


class CallRules:
    """The grammar rules of the calls that a model may, or has to, make.

    Attributes:
        begin: The text before the name of the first call.
    """

    def __init__(
        self, grammar: Grammar, form: MessageFormat, use: ToolUse, opening: str = ""
    ) -> None:
        """Raises RequestError: unsupported."""
        if form.calls is None:
            raise unsupported(
                form, "does not say how calls are written, so that none can be required, or strict"
            )
        self._grammar = grammar
        self._form = form
        self._use = use
        self._syntax = form.calls
        self._tools = [tool for tool in use.usable if use.named in ("", tool.name)]
        if not self._tools:
            raise RequestError(
                "there is no tool that could be called; give one, or another tool_choice",
                code="unsupported",
            )
        self._several = use.parallel and not use.named
        self._known_arguments: dict[int, str] = {}
        self._tagged = _arguments_rules(grammar, form)
        opened = form.answer_open
        begin = form.calls.open.removeprefix(opened if opened and opened in opening else "")
        self.begin = (begin + form.calls.before).lstrip("\n")

    def calls(self) -> str:
        """Return the rule of one call, or of several in a row."""
        return self._grammar.rule("calls", self._followed(self._any_of("first_call", self.begin)))

    def text_and_calls(self, text: str) -> str:
        """Return the rule of text in which only calls begin like calls.

        Args:
            text: A terminal for text that none of the `patterns` matches.
        """
        token = self._grammar.first_token(self.begin)
        if token is not None:
            first = f"{text}? {self._any_of('first_call', self.begin[token.start() :])}"
        else:
            first = self._any_behind(text)
        ends = self._ends_by_itself()
        # Where text may stand after a call, the next one may just as well be the first of others,
        # unless some bracket holds them all.
        calls = self._followed(first, further=bool(self._syntax.close) or not ends)
        if not ends:
            return f"({text}? | {calls})"
        return f"({calls}){'*' if self._several else '?'} {text}?"

    def patterns(self) -> list[str]:
        """Return regular expressions of all beginnings of calls for the reader."""
        literals = [re.escape(name) for name in self._grammar.tokens_in(self.begin)]
        field = self._form.response_template["fields"]["tool_calls"]
        pattern = _plain_pattern(field.get("open_pattern", ""))
        texts = field.get("open", [])
        opens = [re.escape(text) for text in ([texts] if isinstance(texts, str) else texts)]
        found = [*literals, *opens, *([pattern] if pattern else [])] or [re.escape(self.begin)]
        return list(dict.fromkeys(found))

    # --- calls that are nothing but JSON ---------------------------------------------------------

    def are_bare(self) -> bool:
        """Return whether a call is JSON from beginning to end, as an answer may be."""
        return re.match(r"\[?\s*\{", self.begin) is not None

    def bare_calls(self) -> str:
        """Return the rule of `calls`, in rules that may stand beside those of an answer in JSON: a
        parser can distinguish them by the JSON's content alone."""
        syntax = self._syntax
        listed = (syntax.open, syntax.close, syntax.between) == ("[", "]", ", ")
        if not listed and (syntax.open or syntax.close):
            raise unsupported(self._form, "writes calls that can't be told from an answer")
        if listed:
            calls = [
                self._bare_call(tool, f"#/items/anyOf/{place}")
                for place, tool in enumerate(self._tools)
            ]
            most = {} if self._several else {"maxItems": 1}
            return json_of({"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most})
        rules = [
            self._grammar.rule(f"bare_call_{place}", json_of(self._bare_call(tool, "#")))
            for place, tool in enumerate(self._tools)
        ]
        one = self._grammar.rule("bare_call", " | ".join(rules))
        between = self._grammar.literal(syntax.between)
        return f"{one} ({between} {one})*" if self._several else one

    def _bare_call(self, tool: Tool, root: str) -> dict[str, Any]:
        """Return the format's text around name and arguments as a schema, at a path in another."""
        if tool.grammar:
            raise unsupported(
                self._form,
                "writes calls as plain JSON, so that no grammar can be kept in them beside an "
                "answer's format; leave one of them out",
            )
        syntax = self._syntax
        try:
            keys = json.loads(f"{syntax.before}{self._name(tool)}{syntax.middle}null{syntax.after}")
        except ValueError:
            keys = None
        if not isinstance(keys, dict):
            raise unsupported(self._form, "writes calls that can't be told from an answer")
        at = next(key for key, value in keys.items() if value is None)
        return {
            "type": "object",
            "properties": {
                key: {"const": value}
                if key != at
                else moved(_arguments_of(tool, self._use), f"{root}/properties/{at}")
                for key, value in keys.items()
            },
            "required": list(keys),
            "additionalProperties": False,
        }

    def check_answer(self, answer: Constraint) -> None:
        """Check that no answer can be mistaken for a call, where calls are bare.

        Raises:
            RequestError: unsupported.
        """
        first, *others = re.findall(r'"(\w+)"\s*:', self.begin + self._syntax.middle)
        schema = schema_of(answer) if answer.json_schema is not None else True
        if may_have(schema, first, {*others, "arguments", "parameters"}):
            raise unsupported(
                self._form,
                "writes calls as plain JSON, so that an answer must be a json_schema that no call "
                f"fits: its objects with additionalProperties: false, none with {first!r} and "
                "'parameters' or 'arguments'; or give no tools",
            )

    # --- parts of a call -------------------------------------------------------------------------

    def _name(self, tool: Tool) -> str:
        """Return the name as the format writes it."""
        in_json = self._syntax.before.endswith('"')
        return json.dumps(tool.name, ensure_ascii=False)[1:-1] if in_json else tool.name

    def _arguments(self, place: int) -> str:
        if place not in self._known_arguments:
            tool = self._tools[place]
            schema = _arguments_of(tool, self._use)
            if tool.grammar:
                body = self._text_of(tool)
            elif self._tagged is None:
                body = json_of(schema)
            elif schema is ANY_OBJECT:
                body = self._tagged.any()
            else:
                body = self._tagged.of(schema)
            self._known_arguments[place] = self._grammar.rule(f"arguments_{place}", body)
        return self._known_arguments[place]

    def _text_of(self, tool: Tool) -> str:
        """Return the only argument of a tool, in its grammar."""
        (name,) = tool.parameters["properties"]
        if self._tagged is not None:
            return self._tagged.text_of(name, tool.grammar)
        begin, end = quoted(f'{{{json.dumps(name)}: "'), quoted('"}')
        return f"{begin} {nested(in_json(tool.grammar))} {end}"

    def _written(self, text: str, *, spelled: bool = False) -> str:
        """Return a literal text in a rule, with any number where one stands.

        Args:
            spelled: Whether no special token is in it, so that it may stand in a terminal.
        """
        literal = quoted if spelled else self._grammar.literal
        return f" {_ANY_NUMBER} ".join(literal(part) for part in text.split(NUMBER))

    def _any_of(self, name: str, begin: str) -> str:
        """Return the rule of any tool's call: from the text before its name to its arguments."""
        calls = [
            f"{self._written(self._head(begin, tool))} {self._arguments(place)}"
            for place, tool in enumerate(self._tools)
        ]
        return self._grammar.rule(name, " | ".join(calls))

    def _any_behind(self, text: str) -> str:
        """Return the rule of `_any_of`, after any text. One terminal has both, since text alone has
        no end that could be found."""
        calls = []
        for place, tool in enumerate(self._tools):
            head, rest = self._head(self.begin, tool), ""
            token = self._grammar.first_token(head)
            if token is not None:
                head, rest = head[: token.start()], head[token.start() :]
            opened = self._grammar.rule(
                f"opened_{place}[lazy]", f"{text} {self._written(head, spelled=True)}"
            )
            arguments = self._arguments(place)
            calls.append(f"{opened} {self._written(rest)} {arguments}")
        return self._grammar.rule("first_call", " | ".join(calls))

    def _head(self, begin: str, tool: Tool) -> str:
        name = self._name(tool)
        return f"{begin.replace(NAME, name)}{name}{self._syntax.middle}"

    def _followed(self, first: str, *, further: bool = True) -> str:
        """Return the rule of a call, and of others after it if there may be some."""
        syntax, literal = self._syntax, self._grammar.literal
        after = literal(syntax.after)
        calls = f"{first} {after}"
        if self._several and further:
            other = self._any_of("further_call", syntax.between + syntax.before)
            calls += f" ({other} {after})*"
        return f"{calls} {literal(syntax.close)}"

    def _ends_by_itself(self) -> bool:
        """Return whether the reader finds the end of a call, so that text may stand after it."""
        template = load_response_template(self._form.response_template)
        close = template.fields["tool_calls"].close_re
        syntax = self._syntax
        return close is not None and close.search(f"{{}}{syntax.after}{syntax.close}") is not None


def may_have_grammar(form: MessageFormat | None, grammar: str) -> bool:
    """Return whether the text of a tool can be kept to a grammar in Lark's form."""
    if form is None or form.calls is None or not is_lark(grammar):
        return False
    if isinstance(form.calls.arguments, ArgumentSyntax):
        return True
    try:
        return is_lark(in_json(grammar))
    except ValueError:
        return False


def _arguments_rules(
    grammar: Grammar, form: MessageFormat
) -> TaggedArguments | PythonArguments | None:
    """Return the rules of arguments that are not a JSON object."""
    syntax = form.calls.arguments if form.calls is not None else None
    if syntax == "python":
        return PythonArguments(grammar, form)
    return None if syntax is None else TaggedArguments(grammar, form, syntax)


def _arguments_of(tool: Tool, use: ToolUse) -> Mapping[str, Any]:
    """Return the schema of a call's arguments."""
    # A tool that is not strict has no grammar, unless it has to be called.
    if use.choice == "auto" and not use.named and not tool.strict:
        return ANY_OBJECT
    return {"type": "object", **tool.parameters}


@lru_cache(64)
def _plain_pattern(pattern: str) -> str:
    """Return a reader's regular expression for a grammar; "" if that is impossible.

    Only the place of a match counts: optional parts at its ends are dropped, and lookahead becomes
    part of it. It may match more, but not less: without counts its automaton is small; one that is
    too large would end texts that may go on.
    """
    space = r"(?:\\s(?:\*|\{0,\d+\}))"
    pattern = re.sub(rf"^{space}+|{space}+$", "", pattern)
    pattern = re.sub(r"\(\?(?:P<\w+>|=)", "(?:", pattern)
    pattern = re.sub(r"(?<!\\)\{\d+(?:,\d*)?\}", "*", pattern)
    return pattern if pattern and is_regex(pattern) else ""
