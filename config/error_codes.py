"""The table of error codes: `error_codes.toml`, beside this file."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from typing import NamedTuple

# Link and code marks of Markdown.
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


class ErrorCode(NamedTuple):
    """An entry of the table.

    Attributes:
        codes: Codes with the same cause and remedy.
        status: The status over HTTP; 0 for that of the exception's class.
        cause: The cause, in Markdown.
        remedy: What a person can do, in Markdown.
    """

    codes: tuple[str, ...]
    status: int
    cause: str
    remedy: str


def error_codes() -> dict[str, list[ErrorCode]]:
    """Return the entries of each section of docs/errors.md, in its order."""
    text = (files(__package__) / "error_codes.toml").read_text(encoding="utf-8")
    return {
        section: [ErrorCode(tuple(codes.split()), *rest) for codes, *rest in entries]
        for section, entries in tomllib.loads(text).items()
    }


def statuses() -> dict[str, int]:
    """Return the HTTP status of each code that has one."""
    return {
        code: entry.status
        for entries in error_codes().values()
        for entry in entries
        for code in entry.codes
        if entry.status
    }


def remedies() -> dict[str, str]:
    """Return the remedy of each code, as plain text."""
    return {
        code: _LINK.sub(r"\1", entry.remedy).replace("`", "")
        for entries in error_codes().values()
        for entry in entries
        for code in entry.codes
    }
