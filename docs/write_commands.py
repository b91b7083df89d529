"""Write commands.md from the commands of the program.

python docs/write_commands.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from nano_inference.cli.app import app

PAGE = Path(__file__).with_name("commands.md")
HEAD = """\
# Commands

Written by `python docs/write_commands.py` from the program's own texts. The options of each are in
`nano-inference COMMAND --help`; every [setting](settings.md) is one too, as `--set NAME=VALUE`.
Commands that send something to a server or a pipeline take `--url` or `--bus`
([operations.md](operations.md#over-a-bus-or-at-a-server)).

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | a request, a check or a stage failed |
| 2 | the command could not run, for the reason on standard error |
| 3 | another process serves the lane |
| 130 | Ctrl-C |
"""
PAGES = {
    "adapters": "adapters",
    "admin": "policy",
    "batch": "batches",
    "files": "batches",
    "chat": "serving",
    "console": "console",
    "digest": "replay",
    "dlq": "operations",
    "embed": "embeddings",
    "experts": "ranks",
    "fairness": "fairness",
    "flush-cache": "weights",
    "gateway": "gateway",
    "health": "operations",
    "kv-events": "kv-events",
    "kv-session": "kv-sessions",
    "launch": "serving",
    "models": "many-models",
    "pull": "models",
    "quantize": "quantization",
    "release-memory": "weights",
    "replay": "replay",
    "roles": "roles",
    "run": "operations",
    "samples": "token-tree",
    "score": "python",
    "serve": "serving",
    "shards": "redis",
    "status": "operations",
    "submit": "redis",
    "tail": "redis",
    "top": "operations",
    "trace": "telemetry",
    "up": "operations",
    "weights": "weights",
}
"""The page that says more about a command, where there is one."""


def sections() -> dict[str, list[str]]:
    """Return the rows of each panel of `nano-inference --help`."""
    rows: dict[str, list[str]] = {}
    program = get_command(app)
    for name, command in commands_of(program, "nano-inference"):
        panel = rows.setdefault(getattr(command, "rich_help_panel", None) or "Others", [])
        panel.append(_row(name, command.help or ""))
        if isinstance(command, TyperGroup):
            inner = commands_of(command, name)
            panel += [_row(f"{name} {each}", found.help or "") for each, found in inner]
    return rows


def commands_of(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Return the commands of a group that its help lists."""
    context = group.make_context(name, [], resilient_parsing=True)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        if not command.hidden:
            yield each, command


def _row(name: str, text: str) -> str:
    words = " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
    page = PAGES.get(name)
    return f"| `{name}` | {words} | {f'[{page}]({page}.md)' if page else ''} |"


def page() -> str:
    parts = [HEAD]
    for panel, rows in sections().items():
        parts.append(f"\n## {panel}\n\n| command | what it does | more |\n|---|---|---|\n")
        parts.append("\n".join(rows) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
