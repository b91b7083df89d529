"""Reads cases out of llama.cpp's `tests/test-chat.cpp`, which are calls of a builder in C++.

Only what cases are made of is understood: texts, lists, variables, loops over lists, and calls of a
few functions. Any other statement is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)
    |R"(?P<fence>[^(\s]*)\((?P<raw>.*?)\)(?P=fence)"
    |"(?P<text>(?:[^"\\]|\\.)*)"
    |(?P<name>[A-Za-z_][\w]*(?:::[A-Za-z_]\w*)*)
    |(?P<number>\d[\w.]*)
    |(?P<sign>'(?:[^'\\]|\\.)+'|->|<<|>>|&&|\|\||.)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|([0-7]{1,3})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_PAIRS = {"(": ")", "{": "}", "[": "]"}
_CALL_NAMES = ("name", "arguments", "id")


class NotRead(Exception):
    """An expression that no case needs."""


@dataclass
class Message:
    """A message: what a case expects, or one of its conversation."""

    role: str = "assistant"
    content: str = ""
    content_parts: list[Any] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)
    reasoning_content: str = ""
    tool_name: str = ""
    tool_call_id: str = ""


@dataclass
class Case:
    """A text that a model wrote, and the message that is expected.

    Attributes:
        place: The number of the case in the file.
        statement: The place of its statement, which a loop may run for several templates.
        asked: What the builder was given, by the names of its functions.
    """

    place: int
    template: str
    text: str
    statement: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    expected: Message = field(default_factory=Message)


def cases_of(source: str, functions: tuple[str, ...]) -> list[Case]:
    """Return the cases in these functions of a source file."""
    reader = _Reader(_tokens(source))
    found: list[Case] = []
    reader.found = found
    reader.globals()
    for name in functions:
        reader.run_function(name, [None] * 2)
    return found


def _tokens(source: str) -> list[tuple[str, str]]:
    found = []
    for token in _TOKEN.finditer(source):
        kind = token.lastgroup or ""
        if kind == "space":
            continue
        if token["raw"] is not None:
            found.append(("text", token["raw"]))
        elif token["text"] is not None:
            found.append(("text", _unescaped(token["text"])))
        else:
            found.append((kind, token[0]))
    return [*found, ("end", "")]


def _unescaped(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        if found[1]:
            # A byte of UTF-8.
            return (
                chr(0xDC00 + int(found[1], 16))
                if int(found[1], 16) > 127
                else chr(int(found[1], 16))
            )
        if found[2]:
            return chr(int(found[2], 16))
        if found[3]:
            return chr(int(found[3], 8))
        return _PLAIN.get(found[4], found[4])

    return _ESCAPE.sub(plain, text).encode("utf-8", "surrogateescape").decode()


def _assistant(content: str = "", reasoning: str = "", name: str = "", arguments: str = "",
               call_id: str = "") -> Message:  # fmt: skip
    calls = [[name, arguments, call_id]] if name or call_id else []
    return Message(content=content, reasoning_content=reasoning, tool_calls=calls)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "std::string": str,
    "simple_assist_msg": _assistant,
    "message_with_tool_calls": lambda name, given: _assistant("", "", name, given),
    "message_with_tool_calls_and_reasoning": lambda name, given, reasoning: _assistant(
        "", reasoning, name, given
    ),
    "message_with_content_and_tool_call": lambda content, name, given: _assistant(
        content, "", name, given
    ),
    "message_with_reasoning_and_tool_call": lambda reasoning, name, given: _assistant(
        "", reasoning, name, given
    ),
    "message_with_reasoning_content_and_multiple_tool_calls": lambda reasoning, content, calls: (
        Message(
            content=content,
            reasoning_content=reasoning,
            tool_calls=[[*call, ""] for call in calls],
        )
    ),
    "peg_tester": lambda template, *_: _Tester(template),
}


@dataclass
class _Tester:
    template: str


class _Reader:
    """Runs statements; a scope is a dict."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._scopes: list[dict[str, Any]] = [{"true": True, "false": False, "nullptr": None}]
        self._places: dict[str, tuple[int, list[str]]] = {}
        self.found: list[Case] = []

    # --- statements ------------------------------------------------------------------------------

    def globals(self) -> None:
        """Read what stands outside of functions; find the functions."""
        while self._kind() != "end":
            begin = self._at
            while self._kind() != "end" and self._text() not in (";", "{", "="):
                self._skip_one()
            head = [text for _, text in self._tokens[begin : self._at]]
            if self._text() == "{" and ")" in head and head[0] != "common_chat_msg":
                name = next((t for t, n in pairwise(head) if n == "("), "")
                inner = " ".join(head[head.index("(") + 1 :])
                names = re.findall(r"(\w+) (?:,|\))", inner)
                self._places[name] = (self._at, names)
                self._skip_one()
            elif self._text() in ("{", "="):
                self._at = begin
                self._declaration()
            else:
                self._at += 1

    def run_function(self, name: str, given: list[Any]) -> None:
        """Run a function's body."""
        place, names = self._places[name]
        back, self._at = self._at, place
        self._scopes.append(dict(zip(names, given, strict=False)))
        self._block()
        self._scopes.pop()
        self._at = back

    def _block(self) -> None:
        self._take("{")
        self._scopes.append({})
        while self._text() != "}" or self._kind() == "text":
            self._statement()
        self._scopes.pop()
        self._take("}")

    def _statement(self) -> None:
        text = self._text() if self._kind() != "text" else ""
        if text == "{":
            self._block()
        elif text == "for":
            self._loop()
        elif text in ("if", "try", "while", "else", "catch"):
            while self._text() not in ("{", ";") or self._kind() == "text":
                self._skip_one()
            self._skip_one()
        elif self._is_declaration():
            self._declaration()
        else:
            begin = self._at
            try:
                self._assignment_or_call()
                self._take(";")
            except NotRead:
                self._at = begin
                self._skip_statement()

    def _is_declaration(self) -> bool:
        at = self._at
        if self._text() in ("auto", "const", "static", "constexpr"):
            return True
        return self._tokens[at][0] == "name" and self._tokens[at + 1][0] == "name"

    def _declaration(self) -> None:
        name = ""
        while self._text() not in (";", "{", "="):
            if self._kind() == "name":
                name = self._text()
            self._skip_one()
        value: Any = None
        given = self._text()
        begin = self._at
        try:
            if given == "=":
                self._at += 1
            value = Message() if given == ";" else self._expression()
            if name == "message_user":
                value = Message(*value[:2])
            self._scopes[-1][name] = value
            self._take(";")
        except NotRead:
            self._at = begin
            self._skip_statement()

    def _loop(self) -> None:
        self._take("for")
        self._take("(")
        name = ""
        while self._text() != ":":
            if self._text() in (";", "="):
                raise ValueError("a loop that counts")
            name = self._text()
            self._at += 1
        self._take(":")
        values = self._expression()
        self._take(")")
        body = self._at
        for value in values:
            self._at = body
            self._scopes.append({name: value})
            self._block()
            self._scopes.pop()

    def _assignment_or_call(self) -> None:
        if self._kind() == "name" and self._text() in self._places:
            name = self._text()
            self._at += 1
            self.run_function(name, self._arguments("("))
            return
        if self._tokens[self._at + 1][1] == "." and self._tokens[self._at + 3][1] == "=":
            owner, attribute = self._name(self._text()), self._tokens[self._at + 2][1]
            self._at += 4
            setattr(owner, attribute, self._expression())
            return
        self._expression()

    def _skip_statement(self) -> None:
        while self._kind() == "text" or self._text() not in (";", "}", ""):
            self._skip_one()
        if self._text() == ";":
            self._at += 1

    def _skip_one(self) -> None:
        """Pass over a token, or over all between brackets."""
        text = self._text() if self._kind() != "text" else ""
        self._at += 1
        if text in _PAIRS:
            while self._kind() == "text" or self._text() != _PAIRS[text]:
                if self._kind() == "end":
                    raise ValueError("a bracket is open")
                self._skip_one()
            self._at += 1

    # --- expressions -----------------------------------------------------------------------------

    def _expression(self) -> Any:
        value = self._value()
        while self._kind() == "sign" and self._text() == "+":
            self._at += 1
            value = value + self._value()
        return value

    def _value(self) -> Any:
        kind, text = self._tokens[self._at]
        if kind == "text":
            found = ""
            while self._kind() == "text":
                found += self._text()
                self._at += 1
            return self._with_members(found)
        if kind == "number":
            self._at += 1
            return int(text) if text.isdecimal() else text
        if text == "{":
            return self._arguments("{")
        if kind != "name":
            raise NotRead(text)
        self._at += 1
        if self._text() == "(" and text in _FUNCTIONS:
            return self._with_members(_FUNCTIONS[text](*self._arguments("(")))
        if text.startswith("COMMON_"):
            return text
        return self._with_members(self._name(text))

    def _with_members(self, value: Any) -> Any:
        while self._kind() == "sign" and self._text() == ".":
            name = self._tokens[self._at + 1][1]
            self._at += 2
            if self._text() != "(":
                value = getattr(value, name)
                continue
            value = self._method(value, name, self._arguments("("))
        return value

    def _method(self, value: Any, name: str, given: list[Any]) -> Any:
        if isinstance(value, _Tester) and name == "test":
            return Case(0, value.template, *given)
        if not isinstance(value, Case):
            raise NotRead(name)
        if name == "run":
            value.place, value.statement = len(self.found) + 1, self._at
            self.found.append(value)
        elif name == "expect":
            (value.expected,) = given
        elif name.startswith("expect_") and name != "expect_reconstruction":
            kind = {"expect_reasoning": "reasoning_content"}.get(name, name[len("expect_") :])
            old = value.expected
            value.expected = Message(**{**vars(old), kind: given[0]})
        else:
            value.asked[name] = given[0] if given else True
        return value

    def _arguments(self, bracket: str) -> list[Any]:
        self._take(bracket)
        found = []
        while self._kind() == "text" or self._text() != _PAIRS[bracket]:
            if self._kind() == "sign" and self._text() in (",", "."):
                # A name of a field in a list: `.name = "x"`.
                self._at += 1 if self._text() == "," else 3
                continue
            found.append(self._expression())
        self._at += 1
        return found

    def _name(self, name: str) -> Any:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise NotRead(name)

    # --- tokens ----------------------------------------------------------------------------------

    def _kind(self) -> str:
        return self._tokens[self._at][0]

    def _text(self) -> str:
        return self._tokens[self._at][1]

    def _take(self, text: str) -> None:
        if self._text() != text:
            raise NotRead(f"{self._text()!r} is not {text!r}")
        self._at += 1


def calls_of(message: Message) -> Iterator[dict[str, str]]:
    """Yield the calls of a message."""
    for call in message.tool_calls:
        known = [each if isinstance(each, str) else "" for each in call]
        yield dict(zip(_CALL_NAMES, [*known, "", ""], strict=False))
