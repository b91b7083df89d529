"""A conversation read from a prompt of the bundled chat template."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

_SEGMENT = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", re.S)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)
_RESPONSE = re.compile(r"(?:^|\n)<tool_response>\n(.*?)\n</tool_response>", re.S)
_TOOLS = "Tools:\n{"
_TASK = re.compile(r"Write the text (\w+) into the file (\S+) with a tool, read it with a tool")


class Task(NamedTuple):
    """A person's wish.

    Attributes:
        text: Text to write.
        path: File to write it into.
    """

    text: str
    path: str

    @property
    def prompt(self) -> str:
        return (
            f"Write the text {self.text} into the file {self.path} with a tool, read it with a "
            "tool, and answer with the text that the tool returned."
        )


class Conversation(NamedTuple):
    """What the script decides by.

    Attributes:
        tools: The tools that are offered: name, description, parameters.
        task: The last task; None without one.
        calls: Tool calls of the model since then.
        responses: Texts of the tool responses since then.
    """

    tools: list[dict[str, Any]]
    task: Task | None
    calls: list[dict[str, Any]]
    responses: list[str]


def read_conversation(prompt: str) -> Conversation:
    """Read a prompt as the bundled template writes it."""
    segments = _SEGMENT.findall(prompt)
    tools: list[dict[str, Any]] = []
    for role, text in segments:
        if role not in ("user", "assistant"):
            start = text.rfind(_TOOLS) + len(_TOOLS) - 1
            if start >= len(_TOOLS) - 1:
                tools = [json.loads(line) for line in text[start:].splitlines()]
    task, calls, responses = None, [], []
    for role, text in segments:
        if role == "user":
            responses += (found := _RESPONSE.findall(text))
            if not found and (wishes := _TASK.findall(text)):
                task, calls, responses = Task(*wishes[-1]), [], []
        elif role == "assistant":
            calls += map(json.loads, _CALL.findall(text))
    return Conversation(tools, task, calls, responses)
