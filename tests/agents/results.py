"""Results of the runs: the table of docs/agents.md, and reduced bodies for tests of every day."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .programs import Program
from .recording import RecordedCall, Recorder

PATH = Path(__file__).parent / "results.json"
BODIES = Path(__file__).parent / "bodies.json"

_ASKING = ("messages", "input", "prompt")
_PLACE = re.compile(r"\[\d+\]")
# Texts that are no names: they say nothing about a body's form.
_LONG = re.compile(r"\s|.{40}", re.S)


def asks(call: RecordedCall) -> bool:
    """Whether it asks the model."""
    asked = call.method in ("POST", "WEBSOCKET") and isinstance(call.body, dict)
    return asked and any(name in call.body for name in _ASKING)


def write_result(name: str, program: Program, recorder: Recorder) -> None:
    """Write one program's result, and its last call, into the files of all."""
    asking = [call for call in recorder.calls if asks(call)]
    result = {
        "package": program.package,
        "version": program.version,
        "start": program.start,
        "calls": len(asking),
        "paths": sorted({_path(call) for call in asking}),
        "neutral": sorted({_PLACE.sub("[]", field) for field in recorder.ignored}),
        "failed": sorted({f"{call.method} {_path(call)}" for call in recorder.failed}),
    }
    _put(PATH, name, result)
    last = {_path(call): call for call in asking}
    _put(BODIES, name, {path: reduced(call.body) for path, call in last.items()})


def _path(call: RecordedCall) -> str:
    return call.path.partition("?")[0]


def _put(path: Path, name: str, value: object) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    values[name] = value
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


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
        return '{"path": "text"}' if value.startswith("{") else "text"
    return value


def _form(tool: Any) -> str:
    """Fields of a tool, and its type."""
    if not isinstance(tool, dict):
        return str(type(tool))
    inner = tool.get("function") or {}
    return f"{tool.get('type')} {sorted(tool)} {sorted(inner)} {bool(tool.get('strict'))}"
