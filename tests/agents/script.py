"""The script of the model: it writes a file by a tool, reads it by a tool, and reports it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

from .conversations import Conversation, Task, read_conversation

DONE = "The tool returned: "
"""Beginning of the last answer, before the text of the tool's response."""

_THOUGHT = "The script goes on.\n</think>\n\n"
_MOST_REPORTED = 400
_WRITERS = r"write|write_?file|write_?to_?file|create_?file|create_?new_?file|writer"
_READERS = r"read|read_?file|read_?files|view|view_?file|open_?file"
_SHELLS = (
    r"bash|shell|shell_?command|exec|exec_?command|execute_?command|local_?shell|run_?commands?"
    r"|run_?shell_?command|run_?terminal_?command|terminal"
)
_PATCHERS = r"apply_?patch"
# What ends the work of programs whose model must say so.
_ENDERS = r"attempt_?completion|final_?answer|submit_?and_?exit|submit"
_PATHS = r"(abs(olute)?|file|target)?_?(path|file|filename|name)s?"
_TEXTS = r"contents?|text|file_?text|new_?contents?|answer|result|summary"
_COMMANDS = r"cmd|commands?|script|input"
_SUBMITTED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def next_text(prompt: str, schema: Any = None) -> str:
    """Return the model's next text, in the bundled model's message format.

    Args:
        prompt: The rendered conversation.
        schema: JSON schema of the answer; None for any text.
    """
    thought = _THOUGHT if prompt.endswith("<think>\n") else ""
    conversation = read_conversation(prompt)
    task = conversation.task
    if schema is not None:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return thought + json.dumps(_by_schema(schema, task, prompt))
    if task is not None and conversation.tools:
        ends_by_shell = _SUBMITTED in prompt
        return thought + _next_call(conversation, task, ends_by_shell=ends_by_shell)
    # Programs ask for a title of the conversation too, without tools.
    return thought + ("A note." if task is None else _in_text(task, prompt))


def _next_call(conversation: Conversation, task: Task, *, ends_by_shell: bool) -> str:
    turn = len(conversation.calls)
    if turn == 0:
        return _call(_write(conversation, task))
    if turn == 1:
        return _call(_read(conversation, task))
    report = DONE + conversation.responses[-1][:_MOST_REPORTED]
    if turn == 2 and (ender := _found(conversation, _ENDERS)):
        return _call(_filled(ender, {_TEXTS: report}))
    if turn == 2 and ends_by_shell:
        return _call(_by_shell(conversation, f"echo {_SUBMITTED}; echo {shlex.quote(report)}"))
    return report


class ToolCall(NamedTuple):
    """A tool's name, and the arguments of a call."""

    name: str
    arguments: dict[str, Any]


def _call(call: ToolCall) -> str:
    body = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _write(conversation: Conversation, task: Task) -> ToolCall:
    if tool := _found(conversation, _WRITERS):
        return _filled(tool, {_PATHS: task.path, _TEXTS: f"{task.text}\n"})
    if tool := _found(conversation, _PATCHERS):
        patch = f"*** Begin Patch\n*** Add File: {task.path}\n+{task.text}\n*** End Patch\n"
        return _filled(tool, {f"{_COMMANDS}|patch": patch})
    return _by_shell(conversation, f"echo {task.text} > {task.path}")


def _read(conversation: Conversation, task: Task) -> ToolCall:
    if tool := _found(conversation, _READERS):
        return _filled(tool, {_PATHS: task.path})
    return _by_shell(conversation, f"cat {task.path}")


def _by_shell(conversation: Conversation, command: str) -> ToolCall:
    tool = _found(conversation, _SHELLS)
    assert tool is not None, [tool["name"] for tool in conversation.tools]
    return _filled(tool, {_COMMANDS: command})


def _found(conversation: Conversation, names: str) -> dict[str, Any] | None:
    """Return the first tool with such a name, also behind a prefix such as `builtin_`."""
    pattern = re.compile(f"(?:builtin_|default_|files?_)?(?:{names})", re.I)
    return next((each for each in conversation.tools if pattern.fullmatch(each["name"])), None)


def _filled(tool: dict[str, Any], meant: dict[str, str]) -> ToolCall:
    """Fill a tool's arguments: the first one with a meant name, and all that are required."""
    schema = tool.get("parameters") or {}
    properties: dict[str, Any] = schema.get("properties") or {}
    arguments: dict[str, Any] = {}
    for names, value in meant.items():
        for name, kind in properties.items():
            if name not in arguments and re.fullmatch(names, name, re.I):
                arguments[name] = _as_kind(value, kind, names)
                break
        else:
            raise AssertionError(f"{tool['name']} has none of {names}: {schema}")
    for name in schema.get("required") or ():
        if name not in arguments:
            arguments[name] = instance_of(properties.get(name, {}), schema)
    return ToolCall(tool["name"], arguments)


def _as_kind(value: str, kind: dict[str, Any], names: str) -> Any:
    if kind.get("type") != "array":
        return value
    items = kind.get("items") or {}
    if items.get("type") == "object":
        return [_filled({"name": "items", "parameters": items}, {names: value}).arguments]
    in_words = names == _COMMANDS and "array" not in json.dumps(items)
    return ["bash", "-lc", value] if in_words and "shell" in json.dumps(kind) else [value]


def instance_of(schema: dict[str, Any], whole: dict[str, Any] | None = None) -> Any:
    """Return a small instance of a JSON schema."""
    whole = schema if whole is None else whole
    if reference := schema.get("$ref"):
        found: Any = whole
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
        return instance_of(found, whole)
    for known in ("const", "default"):
        if known in schema:
            return schema[known]
    for name in ("enum", "examples"):
        if schema.get(name):
            return schema[name][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return instance_of(schema[name][0], whole)
    kind = schema.get("type", "string")
    return _OF_KIND[kind[0] if isinstance(kind, list) else kind](schema, whole)


def _object(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    needed = schema.get("required", list(properties))
    return {name: instance_of(properties.get(name, {}), whole) for name in needed}


def _array(schema: dict[str, Any], whole: dict[str, Any]) -> list[Any]:
    least = schema.get("minItems", 0)
    return [instance_of(schema.get("items", {}), whole)] * least


_OF_KIND: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "object": _object,
    "array": _array,
    "string": lambda schema, whole: "a note".ljust(schema.get("minLength", 0), "."),
    "integer": lambda schema, whole: schema.get("minimum", 1),
    "number": lambda schema, whole: schema.get("minimum", 1),
    "boolean": lambda schema, whole: False,
    "null": lambda schema, whole: None,
}


def _by_schema(schema: dict[str, Any], task: Task | None, prompt: str) -> Any:
    """Return an instance of a schema of the answer: of a file to write or read, or of a report."""
    made = instance_of(schema)
    if task is None or not isinstance(made, dict):
        return made
    shown = re.findall(r"<shown>(\w+)", prompt)
    for name in made:
        if re.fullmatch(_PATHS, name, re.I):
            made[name] = task.path
        elif re.fullmatch(_TEXTS, name, re.I):
            made[name] = DONE + shown[-1] if shown else f"{task.text}\n"
    return made


def _in_text(task: Task, prompt: str) -> str:
    """Act in the text itself: by edits, as Aider's models do, or by fields, as DSPy's do."""
    if "[[ ## " in prompt:
        return _in_fields(task, prompt)
    name = task.path.rpartition("/")[2]
    if shown := re.findall(rf"{re.escape(name)}\n```\n(\w+)\n```", prompt):
        return DONE + str(shown[-1])
    if "SEARCH/REPLACE" in prompt:
        return f"{name}\n```\n<<<<<<< SEARCH\n=======\n{task.text}\n>>>>>>> REPLACE\n```\n"
    return "A note."


def _in_fields(task: Task, prompt: str) -> str:
    seen = re.findall(r"\[\[ ## observation_\d ## \]\]\n(\w+)", prompt)
    report = DONE + "".join(seen[1:2])
    fields = {"reasoning": "It is done.", "answer": report}
    if "[[ ## next_tool_name ## ]]" in prompt:
        written = {"path": task.path, "content": f"{task.text}\n"}
        turns = [("write_file", written), ("read_file", {"path": task.path}), ("finish", {})]
        name, arguments = turns[min(len(seen), 2)]
        fields = {"next_thought": "Next.", "next_tool_name": name}
        fields["next_tool_args"] = json.dumps(arguments)
    return "".join(
        f"[[ ## {name} ## ]]\n{text}\n\n" for name, text in (fields | {"completed": ""}).items()
    )
