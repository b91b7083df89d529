"""Bodies of calls: whether a closing mark stands within a value, and whether a parser reads all.

Transformers' parsers search a body for values and ignore the rest. A call without the ignored part
would be another call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from transformers.utils.chat_parsing.response_templates import load_response_template

from .own_bodies import STRING, values_in_a_row

_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_STRING = re.compile(STRING, re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")

_MOST_LOOKS = 64
"""Bound of parses of a whole call that check whether a mark is in one of its strings."""

_MOST_LOOKED_CHARS = 1 << 18
"""Characters of a call that are searched for open values, at less than a microsecond each."""


class CallBody:
    """The body of a call so far, in a syntax whose values can't hold the closing mark."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        """Add text."""
        self._pieces.append(text)

    def head(self, chars: int) -> str:
        """Return the first characters."""
        return "".join(self._pieces[:chars])[:chars]

    def ends_in_value(self) -> bool:
        """Return whether a value is open, so that a closing mark would be part of it."""
        return False


class JsonBody(CallBody):
    """JSON."""

    def __init__(self) -> None:
        super().__init__()
        # The first piece that was not scanned for quotes, and the half of an escape before it.
        self._new = 0
        self._half = ""
        self._quoted = False
        self._in_string = False
        self._looks = 0

    def ends_in_value(self) -> bool:
        """Return whether the body is the beginning of JSON, and ends within a string."""
        new = self._half + "".join(self._pieces[self._new :])
        self._new = len(self._pieces)
        same = self._in_string and not _CONTROL.search(new)
        end = 0
        for found in _QUOTE.finditer(new):
            end = found.end()
            if found[0] == '"':
                self._quoted, same = not self._quoted, False
        self._half = new[end:][-1:] if new[end:].endswith("\\") else ""
        if not self._quoted or same:
            self._in_string = self._quoted
        # Each parses the whole text; after so many, invalid JSON may end later than it could.
        elif self._looks < _MOST_LOOKS:
            self._looks += 1
            self._in_string = self._is_cut_in_string()
        else:
            self._in_string = True
        return self._in_string

    def _is_cut_in_string(self) -> bool:
        try:
            self._load("".join(self._pieces))
        except json.JSONDecodeError as error:
            return error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):
            pass
        return False

    def _load(self, text: str) -> None:
        json.loads(text)


class RowBody(JsonBody):
    """JSON values one after another."""

    def _load(self, text: str) -> None:
        values_in_a_row(text)


class _SearchedBody(CallBody):
    """A body whose unread rest is searched at each closing mark."""

    def __init__(self) -> None:
        super().__init__()
        self._new = 0
        self._rest = ""
        self._looked_chars = 0

    def ends_in_value(self) -> bool:
        """Return whether the rest is an open value. After so many characters a call stays open
        until the message ends."""
        self._rest += "".join(self._pieces[self._new :])
        self._new = len(self._pieces)
        self._looked_chars += len(self._rest)
        return self._looked_chars > _MOST_LOOKED_CHARS or self._is_open()

    def _is_open(self) -> bool:
        raise NotImplementedError


class DelimitedBody(_SearchedBody):
    """JSON whose strings have delimiters of their own."""

    def __init__(self, delimiters: list[tuple[str, str]]) -> None:
        super().__init__()
        self._delimiters = [
            (begin, re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL))
            for begin, end in delimiters
        ]

    def _is_open(self) -> bool:
        return any(begin in text.sub("", self._rest) for begin, text in self._delimiters)


class PythonBody(_SearchedBody):
    """Calls as in Python."""

    def _is_open(self) -> bool:
        self._rest = _STRING.sub("", self._rest)
        return '"' in self._rest or "'" in self._rest


class TaggedBody(_SearchedBody):
    """Values between tags, such as XML's."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = _tag_re(tag)

    def _is_open(self) -> bool:
        while True:
            self._rest = self._rest.lstrip()
            found = self._tag.match(self._rest)
            if found is None or not found[0]:
                break
            self._rest = self._rest[found.end() :]
        begun = self._tag.fullmatch(self._rest, partial=True)
        return begun is not None and begun.partial and begun["key"] is not None


OWN_BODIES: Mapping[str, Callable[[], CallBody]] = {
    "python": PythonBody,
    "named": JsonBody,
    "in a row": RowBody,
    "elements": CallBody,
}
"""Bodies that Transformers' parsers don't read, by their names in `content_args.as`."""


def new_body(content: str, args: dict[str, Any]) -> CallBody:
    """Return an empty body for one of Transformers' content parsers and its arguments."""
    if content == "xml-inline":
        return TaggedBody(args["tag_pattern"])
    if content == "json":
        delimiters = args.get("string_delims")
        return DelimitedBody(delimiters) if delimiters else JsonBody()
    if kind := args.get("as"):
        return OWN_BODIES[kind]()
    return CallBody()


def names_in(args: dict[str, Any], body: str) -> list[str]:
    """Return the names of the values between tags, as the pattern of tags finds them."""
    return [found["key"] for found in _tag_re(args["tag_pattern"]).finditer(body)]


def check_all_is_read(content: str, args: dict[str, Any], body: str) -> None:
    """Check that the content parser reads the whole body, each name once.

    Raises:
        ValueError: It ignores a part.
    """
    if content == "xml-inline":
        tag = _tag_re(args["tag_pattern"])
        names = names_in(args, body)
        rest = tag.sub("", body)
    elif content == "kv-lines":
        lines = [line for line in body.split(args.get("line_sep", "\n")) if line.strip()]
        between = args.get("kv_sep", ":")
        names = [line.split(between)[0].strip() for line in lines]
        rest = "".join(line for line in lines if between not in line)
    else:
        return
    if rest.strip():
        raise ValueError("a part of it is no argument")
    if len(set(names)) < len(names) and not args.get("merge_duplicates"):
        raise ValueError("an argument stands there twice")


def texts_in(content: str, args: dict[str, Any], body: str) -> dict[str, bool]:
    """Return whether values are texts, by their names, where tags say so: the pattern then has a
    group `text`, which matches in tags of texts only."""
    if content != "xml-inline":
        return {}
    tag = _tag_re(args["tag_pattern"])
    if "text" not in tag.groupindex:
        return {}
    return {found["key"]: found["text"] is not None for found in tag.finditer(body)}


@lru_cache(32)
def _tag_re(pattern: str) -> Any:
    """Compile a pattern as Transformers does: with the module `regex`, which has partial matches.

    Raises:
        ValueError: It is invalid.
    """
    spec = {"start_anchor_pattern": pattern, "fields": {"content": {}}}
    return load_response_template(spec).start_anchor_re
