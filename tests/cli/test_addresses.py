"""Each command that sends something: over a bus, at a server, and without an address."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nano_inference.cli import app
from nano_inference.cli.running import Running, registered
from nano_inference.config import Config

from .conftest import Run, assert_refused, until_ready, use_bus
from .test_operations import CALLS as OPERATIONS


class Line(NamedTuple):
    """A command line, a part of its output, and its exit status."""

    words: str
    output: str = ""
    status: int = 0


COMMANDS = {
    "submit": Line("submit '98 + 25 =' --trace", " 123"),
    "complete": Line("complete '98 + 25 ='", " 123"),
    "chat": Line("chat", "42"),
    "embed": Line("embed a b", '"index":1'),
    "score": Line("score FILE", '"sample_index":0'),
    "trace": Line("trace ID", "time by cause"),
    "replay": Line("replay ID", "equal"),
    "digest": Line("digest ID --by-version", " 1 results; 1 samples"),
    "samples": Line("samples none", "there is no session 'none'", 2),
    "cancel": Line("cancel ID", "had ended before (done)", 1),
    "status": Line("status", "ready"),
    "health": Line("health", "ready"),
    "top": Line("top --once", "ready"),
    "models": Line("models", "tiny"),
    "dlq show": Line("dlq show none", "there is no dead letter", 1),
}

OTHERS = {
    "of this machine": "demo, doctor, list, ps, version, pull, quantize, serve, stop, logs, up, "
    "down, run, gateway, weights log, weights export",
    "of servers only": "launch, admin keys list, admin keys create, admin keys change, "
    "admin keys revoke, admin tenants list, admin tenants set, admin tenants remove, "
    "admin guardrails show, admin guardrails set",
    "of operations, in other tests": "dlq retry, dlq drop, tail, kv-events, weights roll-back",
    "of several models": "models load, models unload, models remove",
    "of batches, in tests/cli/test_batch.py": "batch run, batch submit, batch status, batch list, "
    "batch cancel, batch results, files list, files upload, files get, files delete",
}
"""Commands that need no address, or are in other tests."""


def commands(group: Any, *before: str) -> Iterator[str]:
    """The names of all commands."""
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        if is_group:
            yield from commands(command, *before, name)
        if not is_group or command.invoke_without_command:
            yield " ".join((*before, name))


def test_every_command_is_in_the_table() -> None:
    known = {name for words in OTHERS.values() for name in words.split(", ")}
    every = set(commands(app._group()))
    called = {" ".join(words[: 1 + (words[0] not in every)]) for words in OPERATIONS.values()}
    assert every == known | called | COMMANDS.keys()


@pytest.mark.parametrize(
    "place", ["bus", "nothing", pytest.param("server", marks=pytest.mark.soak(only=True))]
)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_wherever_its_pipeline_is(
    run: Run,
    served: Config,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    place: str,
) -> None:
    options: list[str] = ["--url", url] if place == "server" else []
    file = tmp_path / "answer"
    words, output, status = COMMANDS[name]
    with registered(Running(command="serve", url=url, models=("tiny",))):
        if place == "bus":
            use_bus(monkeypatch, served.bus.url, served.bus.prefix)
            until_ready(run)
        request = {"request_id": f"{name}-{place}", "prompt": "98 + 25 ="}
        if "ID" in words or "FILE" in words:
            file.write_text(json.dumps(request))
            file.write_text(run("submit", "--json", "--file", str(file), *options).stdout)
        words = words.replace("ID", request["request_id"]).replace("FILE", str(file))
        ran = run(*shlex.split(words), *options, stdin="What is 12 + 30?\n")
    assert ran.status == status, ran
    assert output in ran.stdout + ran.stderr


def test_what_needs_a_bus_is_refused_at_a_server(run: Run, url: str) -> None:
    assert_refused(run("submit", "x", "--no-wait", "--url", url), "name its bus with --bus")
