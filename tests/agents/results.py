"""Results of the runs, from which docs/agents.md has its table."""

from __future__ import annotations

import json
from pathlib import Path

from .programs import Program
from .recording import RecordedCall, Recorder

PATH = Path(__file__).parents[2] / "benchmarks" / "results" / "agents.json"

_ASKING = ("messages", "input", "prompt")


def asks(call: RecordedCall) -> bool:
    """Whether it asks the model."""
    asked = call.method in ("POST", "WEBSOCKET") and isinstance(call.body, dict)
    return asked and any(name in call.body for name in _ASKING)


def result(program: Program, recorder: Recorder) -> dict[str, object]:
    """Return the result of a program's run."""
    asking = [call for call in recorder.calls if asks(call)]
    failed = {f"{call.method} {call.path.partition('?')[0]}" for call in recorder.failed}
    return {
        "package": program.package,
        "version": program.version,
        "calls": len(asking),
        "paths": sorted({call.path.partition("?")[0] for call in asking}),
        "ignored": recorder.ignored,
        "failed": sorted(failed),
    }


def write_result(name: str, found: dict[str, object]) -> None:
    """Write one program's result into the file of all."""
    results = json.loads(PATH.read_text()) if PATH.exists() else {}
    results[name] = found
    PATH.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
