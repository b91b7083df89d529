"""`nano-inference models`: the models that are served; loading and unloading them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from ..config import ConfigError, ModelConfig, ModelError, RequestError
from ..pipeline.models import ModelStatus
from .clients import ListedModel, PipelineClient, ServerClient, client_at
from .connection import place_of
from .options import AsJson, Options, argument, option, takes_server_options
from .status import duration
from .terminal import failures_exit, harmless, one_line, print_json, stdout, table

T = TypeVar("T")

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)

Name = Annotated[str, argument("ID", "The model, by one of its names.")]
Timeout = Annotated[
    float | None,
    option("--timeout", "Time limit for its requests; default: none.", "SECONDS", min=0),
]


@app.callback()
@takes_server_options
def models(options: Options, context: typer.Context, as_json: AsJson = False) -> None:
    """Print the models of a server or a pipeline; load and unload them.

    One per line, with the most tokens of prompt and answer together if known; for a deployment of
    several models a table with their states:

        nano-inference models

        nano-inference models --url http://127.0.0.1:8000/v1

        nano-inference models --bus redis://127.0.0.1:6390

    With --url, a key with the scope "admin" sees all details and may change models:

        nano-inference models load code --url http://127.0.0.1:8000

    Options follow `load`, `unload` and `remove`.
    """
    if context.invoked_subcommand is not None:
        if as_json or options != Options():
            raise ConfigError(f"give options behind `{context.invoked_subcommand}`")
        return
    found = _run(options, lambda client: client.statuses())
    statuses = [model for model in found if isinstance(model, ModelStatus)]
    if as_json:
        for model in found:
            print_json(model)
    elif statuses == found and (
        len(statuses) > 1 or any(each.state != "ready" for each in statuses)
    ):
        stdout().print(_table(statuses))
    else:
        for model in found:
            typer.echo(_line(model))


@app.command()
@takes_server_options
def load(
    options: Options,
    name: Name,
    path: Annotated[
        str | None, option("--path", "The folder of a new model of the deployment.", "FOLDER")
    ] = None,
    alias: Annotated[
        list[str] | None, option("--alias", "Another name of a new model. Repeatable.", "NAME")
    ] = None,
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
    _print(_run(options, lambda client: client.load(wanted)), "is loaded", as_json)


@app.command()
@takes_server_options
def unload(options: Options, name: Name, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Unload a model while the others serve; return when its processes have ended.

    It takes no new requests; those in flight are answered first:

        nano-inference models unload code --timeout 60
    """
    _print(_run(options, lambda client: client.unload(name, timeout)), "is unloaded", as_json)


@app.command()
@takes_server_options
def remove(options: Options, name: Name, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Unload a model and remove it from the deployment.

    nano-inference models remove code
    """
    _print(_run(options, lambda client: client.remove(name, timeout)), "is removed", as_json)


def _run(options: Options, work: Callable[[PipelineClient | ServerClient], Awaitable[T]]) -> T:
    place = place_of(options)

    async def run() -> T:
        async with client_at(place) as client:
            return await work(client)

    with failures_exit((RequestError, ModelError)):
        return asyncio.run(run())


def _print(model: ModelStatus | str, what: str, as_json: bool) -> None:
    name = model if isinstance(model, str) else model.id
    if as_json:
        print_json({"id": model} if isinstance(model, str) else model)
    else:
        typer.echo(f"{harmless(name)} {what}")


def _line(model: ListedModel | ModelStatus) -> str:
    length = model.max_model_len
    return harmless(f"{model.id}  {length} tokens" if length else model.id)


def _table(models: Sequence[ModelStatus]) -> Table:
    right = ("for", "memory", "parameters", "KV", "requests")
    made = table("model", "state", "other names", *right, right=right, fold=("other names",))
    made.columns[2].min_width = 11
    for model in models:
        made.add_row(
            harmless(model.id) + (" (default)" if model.default else ""),
            model.state,
            harmless(", ".join((*model.aliases, *model.adapters))) or "-",
            duration(max(0, time.time_ns() - model.since_ns) / 1e9) if model.since_ns else "-",
            _short(model.memory_bytes, {1 << 30: " GiB", 1 << 20: " MiB"}, " B"),
            _short(model.parameters, {10**9: "B", 10**6: "M", 10**3: "k"}),
            _short(model.kv_bytes, {1 << 30: " GiB", 1 << 20: " MiB"}, " B"),
            f"{model.waiting + model.in_flight}",
        )
        if model.reason and model.state == "failed":
            made.add_row("", harmless(one_line(model.reason)))
    return made


def _short(number: int, units: dict[int, str], plain: str = "") -> str:
    for size, unit in units.items():
        if number >= size:
            return f"{number / size:,.1f}{unit}"
    return f"{number}{plain}" if number else "-"
