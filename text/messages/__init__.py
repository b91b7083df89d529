"""Messages of the assistant: their formats, their parser, and their grammars."""

from __future__ import annotations

from .grammar import constraint_of
from .lark import lark_of_gbnf
from .message_format import MessageFormat, find_format, format_of, opening_of
from .message_reader import Delta, MessageReader, Reading, ToolCall
from .tools import EFFORT, SWITCHES, Tool, ToolUse, asked_to_reason

__all__ = [
    "EFFORT",
    "SWITCHES",
    "Delta",
    "MessageFormat",
    "MessageReader",
    "Reading",
    "Tool",
    "ToolCall",
    "ToolUse",
    "asked_to_reason",
    "constraint_of",
    "find_format",
    "format_of",
    "lark_of_gbnf",
    "opening_of",
]
