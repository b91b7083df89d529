"""`nano-inference models`: the models that are served; loading and unloading them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ..config import ConfigError, ModelConfig, ModelError, RequestError
from ..pipeline.models import ModelStatus
from .clients import Client, ListedModel, Unreachable, client_at
from .connection import DEFAULT_SERVER, ServerAddress, Target, run_with, target_of
from .help import Commands
from .local import print_local_models
from .options import AsJson, Options, argument, option, takes_server_options
from .status import duration
from .terminal import (
    complain,
    failures_exit,
    harmless,
    one_line,
    print_json,
    stdout,
    table,
    waiting,
)

T = TypeVar("T")

_BYTES = {1 << 30: " GiB", 1 << 20: " MiB", 1: " B"}

app = Commands(invoke_without_command=True)

Name = Annotated[str, argument("ID", "The model, by one of its names.")]
Timeout = Annotated[float | None, option("--timeout SECONDS", "Limit for its requests.", min=0)]


@app.callback()
@takes_server_options
def models(options: Options, context: typer.Context, as_json: AsJson = False) -> None:
    """Print the models of a server or a pipeline; load and unload them.

    One per line, with the most tokens of prompt and answer together if known; for a deployment of
    several models a table with their states:

        nano-inference models

        nano-inference models --url http://127.0.0.1:8000

        nano-inference models --bus redis://127.0.0.1:6390

    While nothing runs, those on this machine are printed, as by `list`. With --url, a key with the
    scope "admin" sees all details and may change models:

        nano-inference models load code --url http://127.0.0.1:8000

    Options follow `load`, `unload` and `remove`.
    """
    if context.invoked_subcommand is not None:
        if as_json or options != Options():
            raise ConfigError(f"give options after `{context.invoked_subcommand}`")
        return
    target = target_of(options, or_serve=True)
    try:
        found = _run_at(target, lambda client: client.statuses())
    except Unreachable:
        if target != ServerAddress(DEFAULT_SERVER) or as_json:
            raise
        complain("nothing runs; `nano-inference serve NAME` serves one of these")
        print_local_models()
        return
    statuses = [model for model in found if isinstance(model, ModelStatus)]
    if as_json:
        print_json(*found)
    elif statuses == found and (
        len(statuses) > 1 or any(each.state != "ready" for each in statuses)
    ):
        _print_table(statuses)
    else:
        for model in found:
            typer.echo(_line(model))


@app.command()
@takes_server_options
def load(
    options: Options,
    name: Name,
    path: Annotated[str | None, option("--path FOLDER", "The folder of a new model.")] = None,
    alias: Annotated[list[str] | None, option("--alias NAME", "Another name. Repeatable.")] = None,
    pinned: Annotated[bool, option("--pinned", "Never unload a new model to free memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Load a model while the others serve; return when it is ready.

        nano-inference models load code

        nano-inference models load math --path ~/models/qwen2.5-math --alias calculator

    A model that is loaded is unchanged. A failed load changes nothing.
    """
    if path is None and (alias or pinned):
        raise ConfigError("--alias and --pinned are for a new model; give its --path too")
    wanted: str | ModelConfig = name
    if path is not None:
        folder = Path(path).expanduser()
        # The deployment may run in another folder, or on another machine.
        found = str(folder.absolute()) if folder.exists() else path
        wanted = ModelConfig(id=name, path=found, aliases=tuple(alias or ()), pinned=pinned)
    loaded = _run(options, lambda client: client.load(wanted), f"loading {harmless(name)}")
    _print(loaded.id, "is loaded", loaded if as_json else None)


@app.command()
@takes_server_options
def unload(options: Options, name: Name, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Unload a model while the others serve; return when its processes have ended.

    It takes no new requests; those in flight are answered first:

        nano-inference models unload code --timeout 60
    """
    what = f"unloading {harmless(name)}"
    found = _run(options, lambda client: client.unload(name, timeout_s=timeout), what)
    _print(found.id, "is unloaded", found if as_json else None)


@app.command()
@takes_server_options
def remove(options: Options, name: Name, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Unload a model and remove it from the deployment.

    nano-inference models remove code
    """
    found = _run(options, lambda client: client.unload(name, timeout_s=timeout, remove=True))
    _print(found.id, "is removed", {"id": found.id} if as_json else None)


def _run(
    options: Options, work: Callable[[Client], Awaitable[T]], what: str = "waiting for the server"
) -> T:
    return _run_at(target_of(options, or_serve=True), work, what)


def _run_at(
    target: Target, work: Callable[[Client], Awaitable[T]], what: str = "waiting for the server"
) -> T:
    with failures_exit((RequestError, ModelError)), waiting(what):
        return run_with(client_at(target), work)


def _print(name: str, what: str, shown: object | None) -> None:
    """Print a sentence, or if there is an object the object as JSON."""
    if shown is not None:
        print_json(shown)
    else:
        typer.echo(f"{harmless(name)} {what}")


def _line(model: ListedModel | ModelStatus) -> str:
    length = model.max_model_len
    return harmless(f"{model.id}  {length} tokens" if length else model.id)


def _print_table(models: Sequence[ModelStatus]) -> None:
    rows: list[Sequence[str]] = []
    for model in models:
        rows.append(
            (
                harmless(model.id) + (" (default)" if model.default else ""),
                model.state,
                harmless(", ".join((*model.aliases, *model.adapters))) or "-",
                duration(max(0, time.time_ns() - model.since_ns) / 1e9) if model.since_ns else "-",
                _short(model.memory_bytes, _BYTES),
                _short(model.parameters, {10**9: "B", 10**6: "M", 10**3: "k", 1: ""}),
                _short(model.kv_bytes, _BYTES),
                f"{model.waiting + model.in_flight}",
            )
        )
        if model.reason and model.state == "failed":
            rows.append(("", harmless(one_line(model.reason))))
    right = ("for", "memory", "parameters", "KV", "requests")
    made = table("model", "state", "other names", *right, right=right, fold=("other names",))
    made.columns[2].min_width = 11
    for row in rows:
        made.add_row(*row)
    stdout().print(made)


def _short(number: int, units: dict[int, str]) -> str:
    for size, unit in units.items():
        if number >= size:
            return f"{number / size:,.{size > 1:d}f}{unit}"
    return "-"
