"""Anthropic's tools that clients execute, as functions with a schema.

The client sends a tool's type alone, since Anthropic's models are trained on its input. Other
models read what is here: the inputs that such a client executes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from ....text.messages import Tool
from .bodies import CACHE_MARK

DIRECT = "direct"
"""The caller of a tool that the model itself calls."""


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all tools that clients execute.

    Attributes:
        defer_loading: Whether the tool is offered only once the conversation refers to it.
        allowed_callers: The model itself may call it if there are none, or `DIRECT` is one.
    """

    OPEN: ClassVar = True
    NEUTRAL: ClassVar = CACHE_MARK | {"eager_input_streaming": "a call is sent when it is complete"}

    name: str
    strict: bool = False
    defer_loading: bool = False
    input_examples: list[dict[str, Any]] = []
    allowed_callers: list[str] = []


class ClientTool(ToolBody, frozen=True, kw_only=True):
    """A tool of a type that Anthropic defines."""

    NEUTRAL: ClassVar = ToolBody.NEUTRAL | {
        "display_number": "the client has one display",
        "max_characters": "the client cuts off a file that it shows",
    }

    type: str
    display_width_px: int = 0
    display_height_px: int = 0
    enable_zoom: bool = False


_TEXT = {"type": "string"}
_INTEGER = {"type": "integer"}
_POINT = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_LINES = {
    "type": "array",
    "items": _INTEGER,
    "minItems": 2,
    "maxItems": 2,
    "description": "First and last line to show; -1 is the last line of the file.",
}


def _about(kind: dict[str, Any], description: str) -> dict[str, Any]:
    return kind | {"description": description}


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


_FILE_FIELDS = {
    "file_text": _about(_TEXT, "For create: the content of the file."),
    "old_str": _about(_TEXT, "For str_replace: the text to replace, which occurs once."),
    "new_str": _about(_TEXT, "For str_replace: the new text."),
    "insert_line": _about(_INTEGER, "For insert: the line after which the text is inserted."),
    "view_range": _LINES,
}


def _bash(tool: ClientTool) -> tuple[str, dict[str, Any]]:
    return (
        "Run a command in a bash session that persists between calls.",
        _object(
            [],
            command=_about(_TEXT, "The command; required unless the session is restarted."),
            restart=_about({"type": "boolean"}, "Whether to restart the session."),
        ),
    )


def _text_editor(tool: ClientTool) -> tuple[str, dict[str, Any]]:
    commands = ["view", "create", "str_replace", "insert"]
    text = {"insert_text": _about(_TEXT, "For insert: the text.")}
    if tool.name == "str_replace_editor":  # the versions before 2025-04-29
        commands.append("undo_edit")
        text = {"new_str": _about(_TEXT, "For str_replace and insert: the new text.")}
    return (
        "View, create and edit text files; view lists a folder.",
        _object(
            ["command", "path"],
            command=_choice(*commands),
            path=_about(_TEXT, "The absolute path of the file or folder."),
            **_FILE_FIELDS | text,
        ),
    )


def _memory(tool: ClientTool) -> tuple[str, dict[str, Any]]:
    return (
        "Read and write files in the folder /memories, which persists between conversations. Look "
        "into it before a task, and keep in it what later conversations need.",
        _object(
            ["command"],
            command=_choice("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_about(_TEXT, "The path of a file or folder, beginning with /memories."),
            insert_text=_about(_TEXT, "For insert: the text."),
            old_path=_about(_TEXT, "For rename: the path."),
            new_path=_about(_TEXT, "For rename: the new path."),
            **_FILE_FIELDS,
        ),
    )


def _computer(tool: ClientTool) -> tuple[str, dict[str, Any]]:
    actions = [
        *("screenshot", "left_click", "right_click", "middle_click", "double_click"),
        *("triple_click", "left_click_drag", "left_mouse_down", "left_mouse_up", "mouse_move"),
        *("scroll", "type", "key", "hold_key", "wait", "cursor_position"),
    ]
    zoom = {"region": {"type": "array", "items": _INTEGER}} if tool.enable_zoom else {}
    if zoom:
        actions.append("zoom")
        zoom["region"]["description"] = "For zoom: x and y of two corners, [x0, y0, x1, y1]."
    size = f"{tool.display_width_px} x {tool.display_height_px}"
    return (
        f"Use the mouse, the keyboard and the screen of a computer, of {size} pixels.",
        _object(
            ["action"],
            action=_choice(*actions),
            coordinate=_about(_POINT, "x and y in pixels, from the upper left corner."),
            start_coordinate=_about(_POINT, "For left_click_drag: where the mouse is pressed."),
            text=_about(_TEXT, "The text to type, or the keys, such as ctrl+s."),
            scroll_direction=_choice("up", "down", "left", "right"),
            scroll_amount=_about(_INTEGER, "Clicks of the wheel."),
            duration=_about({"type": "number"}, "For hold_key and wait: seconds."),
            **zoom,
        ),
    )


_MADE: dict[str, Callable[[ClientTool], tuple[str, dict[str, Any]]]] = {
    "bash_": _bash,
    "text_editor_": _text_editor,
    "memory_": _memory,
    "computer_2": _computer,
}
"""By the beginning of the type, which ends with a date."""


def is_client_tool(kind: str) -> bool:
    """Return whether a type is one of these."""
    return kind.startswith(tuple(_MADE))


def function_of(tool: ClientTool) -> Tool:
    """Return the function that is offered to the model."""
    made = next(made for begin, made in _MADE.items() if tool.type.startswith(begin))
    description, schema = made(tool)
    return Tool(name=tool.name, description=description, parameters=schema, strict=tool.strict)
