"""Messages of the assistant: their formats, their parser, and their grammars."""

from __future__ import annotations

from .call_rules import may_have_grammar as may_have_grammar
from .finding import find_format as find_format
from .grammar import constraint_of as constraint_of
from .lark import lark_of_gbnf as lark_of_gbnf
from .message_format import MessageFormat as MessageFormat
from .message_format import opening_of as opening_of
from .message_reader import Delta as Delta
from .message_reader import MessageReader as MessageReader
from .message_reader import Reading as Reading
from .message_reader import ToolCall as ToolCall
from .tools import EFFORT as EFFORT
from .tools import SWITCHES as SWITCHES
from .tools import Tool as Tool
from .tools import ToolUse as ToolUse
from .tools import asked_to_reason as asked_to_reason
from .tools import tool_of as tool_of
from .tools import tools_of as tools_of
