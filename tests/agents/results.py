"""Results of the runs: the table of docs/agents.md, and reduced bodies for tests of every day."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .programs import Program
from .recording import RecordedCall, Recorder

RESULTS = Path(__file__).parent / "results.json"
BODIES = Path(__file__).parent / "bodies.json"

_ASKING = ("messages", "input", "prompt")
# The header names no places.
_TOOL = "tools[]"
_OFFERED = ("function", "custom", "namespace")
_HEADER = re.compile(r"x-[a-z-]+: ")
# Texts that are no names: they say nothing about a body's form.
_LONG = re.compile(r"\s|.{40}", re.S)


def asks(call: RecordedCall) -> bool:
    """Whether it asks the model."""
    asked = call.method in ("POST", "WEBSOCKET") and isinstance(call.body, dict)
    return asked and any(name in call.body for name in _ASKING)


def write_result(name: str, program: Program, recorder: Recorder) -> None:
    """Write a program's result, and its last call over each interface, into the files of all."""
    asking = [call for call in recorder.calls if asks(call)]
    result = {
        "package": program.package,
        "version": program.version,
        "start": program.start,
        "calls": len(asking),
        "paths": sorted({_path(call) for call in asking}),
        "neutral": recorder.ignored,
        "left_out": sorted({kind for call in asking for kind in _tools_left_out(call)}),
        "failed": sorted({f"{call.method} {_path(call)}" for call in recorder.failed}),
    }
    _put(RESULTS, name, result)
    for path, call in {_path(call): call for call in asking}.items():
        _put(BODIES, f"{name} {path}", [path, reduced(call.body), sorted(call.ignored)])


def _tools_left_out(call: RecordedCall) -> Iterator[str]:
    """Types of the tools that the gateway left out."""
    if _TOOL in call.ignored:
        yield from (each["type"] for each in call.body["tools"] if each["type"] not in _OFFERED)


def _path(call: RecordedCall) -> str:
    return call.path.partition("?")[0]


def _put(path: Path, name: str, value: object) -> None:
    """Put a value into a file with a line for each."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values[name] = value
    lines = (f"{json.dumps(each)}: {json.dumps(values[each])}" for each in sorted(values))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def reduced(value: Any) -> Any:
    """Return a body with the same fields and short texts, and with one tool of each form."""
    if isinstance(value, dict):
        made = {name: reduced(each) for name, each in value.items()}
        if isinstance(made.get("properties"), dict):
            return {"type": "object", "properties": {}}
        if isinstance(made.get("tools"), list):
            made["tools"] = [*{_form(tool): tool for tool in made["tools"]}.values()]
        return made
    if isinstance(value, list):
        return [reduced(each) for each in value]
    if isinstance(value, str) and _LONG.search(value):
        header = _HEADER.match(value)
        return '{"path": "text"}' if value.startswith("{") else f"{header[0] if header else ''}text"
    return value


def _form(tool: Any) -> str:
    """Fields of a tool, and its type."""
    if not isinstance(tool, dict):
        return str(type(tool))
    inner = tool.get("function") or {}
    return f"{tool.get('type')} {sorted(tool)} {sorted(inner)} {bool(tool.get('strict'))}"
