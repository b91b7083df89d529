"""Results of the runs: the table of docs/trainers.md, and reduced bodies for tests of every day."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..agents.recording import RecordedCall, Recorder
from .served import MODEL
from .trainers import Trainer

RESULTS = Path(__file__).parent / "results.json"
BODIES = Path(__file__).parent / "bodies.json"

_MOST_TOKENS = 4
# Texts that are no names: they say nothing about a body's form.
_LONG = re.compile(r"\s|/|.{40}", re.S)
# These change the server for the calls after them, and are tested with their interfaces.
_OF_STATE = re.compile(r"weight|lora|group|memory|sleep|wake|pause|resume|continue|collective")


def write_result(name: str, trainer: Trainer, recorder: Recorder) -> None:
    """Write a trainer's result, and the bodies of its calls, into the files of all."""
    calls = recorder.calls
    result = {
        "package": trainer.package,
        "version": trainer.version,
        "program": trainer.program,
        "runs": trainer.runs,
        "replayed": trainer.replayed,
        "calls": len(calls),
        "paths": sorted({f"{call.method} {path_of(call)}" for call in calls}),
        "headers": sorted({each for call in calls for each in call.headers if "session" in each}),
        "neutral": recorder.ignored,
    }
    _put(RESULTS, name, result)
    for key, body in _bodies(calls).items():
        _put(BODIES, f"{name} {key}", body)


def path_of(call: RecordedCall) -> str:
    """Return the path of a call without its query."""
    return call.path.partition("?")[0]


def _bodies(calls: Iterable[RecordedCall]) -> dict[str, Any]:
    """Return each form of a body once: method, address, headers, the body, and its neutral
    fields."""
    found: dict[str, Any] = {}
    for call in calls:
        if call.method != "POST" or call.status != 200 or _OF_STATE.search(call.path):
            continue
        body = reduced(call.body)
        form = json.dumps([call.path, fields_of(body)])
        own = {name: text for name, text in call.headers.items() if "session" in name}
        number = sum(key.startswith(path_of(call)) for key in found) + 1
        if not any(each[-1] == form for each in found.values()):
            found[f"{path_of(call)} {number}"] = [call.path, own, body, sorted(call.ignored), form]
    return {key: each[:-1] for key, each in found.items()}


def fields_of(value: Any) -> Any:
    """Return the fields of a body and of what it holds, without its values."""
    if isinstance(value, dict):
        return {name: fields_of(each) for name, each in sorted(value.items())}
    return type(value).__name__


def reduced(value: Any) -> Any:
    """Return a body with the same fields, short texts, and few tokens."""
    if isinstance(value, dict):
        made = {name: reduced(each) for name, each in value.items()}
        # A folder stands for the model by an alias of the run's server.
        return made | ({"model": MODEL} if "/" in str(value.get("model", "")) else {})
    if isinstance(value, list):
        return [reduced(each) for each in value[:_MOST_TOKENS]]
    if isinstance(value, str) and _LONG.search(value):
        return "text"
    return value


def _put(path: Path, name: str, value: object) -> None:
    """Put a value into a file with a line for each."""
    values = json.loads(path.read_text()) if path.exists() else {}
    values[name] = value
    lines = (f"{json.dumps(each)}: {json.dumps(values[each])}" for each in sorted(values))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
