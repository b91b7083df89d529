"""`nano-inference models`: what is served, and having models loaded and unloaded."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.table import Table

from ..config import ConfigError, ModelConfig, ModelError
from ..pipeline.models import ModelStatus
from .answerer import Place, ServedModel, place_of
from .asking import failures_told
from .model_administering import AdministersModels, administering_models
from .options import Options, takes_asking_options
from .status_view import duration
from .terminal import complain, harmless, one_line, stdout

T = TypeVar("T")

app = typer.Typer(
    context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print each model as a line of JSON.")]
Name = Annotated[str, typer.Argument(metavar="ID", help="The model, by one of its names.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0,
        metavar="SECONDS",
        help="How long its requests may take; any time when not given.",
        show_default=False,
    ),
]


@app.callback()
@takes_asking_options
def models(options: Options, context: typer.Context, as_json: AsJson = False) -> None:
    """Print the models that a server, or a pipeline, serves; have them loaded and unloaded.

    One a line, with the most tokens of a prompt and its answer together where that is told; of a
    deployment of several models a table of how each is:

        nano-inference models

        nano-inference models --url http://127.0.0.1:8000/v1

        nano-inference models --bus redis://127.0.0.1:6390

    With --url a key with the scope "admin" is told all, and may change them:

        nano-inference models load code --url http://127.0.0.1:8000

    Options stand behind `load`, `unload` and `remove`.
    """
    if context.invoked_subcommand is not None:
        if as_json or options != Options():
            raise ConfigError(f"give options behind `{context.invoked_subcommand}`")
        return
    shown = _run(options, lambda place: place.models())
    if as_json:
        for model in shown:
            sys.stdout.write(f"{msgspec.json.encode(model).decode()}\n")
        return
    told = [model for model in shown if isinstance(model, ModelStatus)]
    if told == shown and (len(told) > 1 or any(each.state != "ready" for each in told)):
        stdout().print(_table(told))
        return
    for model in shown:
        sys.stdout.write(f"{_line(model)}\n")


@app.command()
@takes_asking_options
def load(
    options: Options,
    name: Name,
    path: Annotated[
        str | None,
        typer.Option(
            "--path",
            metavar="FOLDER",
            help="Where it is, for a model that the deployment does not have yet.",
            show_default=False,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME", help="Another name of a new one. Repeatable."),
    ] = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="A new one stays, whoever needs the memory.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Load a model while the others serve; return when it is ready.

        nano-inference models load code

        nano-inference models load math --path ~/models/qwen2.5-math --alias calculator

    One that is loaded is left as it is. What can't be loaded leaves everything as it was.
    """
    if path is None and (alias or pinned):
        raise ConfigError("--alias and --pinned are for a new model; give its --path too")
    wanted: str | ModelConfig = name
    if path is not None:
        folder = Path(path).expanduser()
        # Where the deployment is in another folder, or on another machine, it stays as it is.
        found = str(folder.absolute()) if folder.exists() else path
        wanted = ModelConfig(id=name, path=found, aliases=tuple(alias or ()), pinned=pinned)
    _print(_run(options, lambda place: place.load(wanted)), "is loaded", as_json)


@app.command()
@takes_asking_options
def unload(options: Options, name: Name, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Unload a model while the others serve; return when its processes have ended.

    It takes no more requests, and those that it has are answered first:

        nano-inference models unload code --timeout 60
    """
    _print(_run(options, lambda place: place.unload(name, timeout)), "is unloaded", as_json)


@app.command()
@takes_asking_options
def remove(options: Options, name: Name, timeout: Timeout = None, as_json: AsJson = False) -> None:
    """Unload a model for good: the deployment does not have it any more.

    nano-inference models remove code
    """
    _print(_run(options, lambda place: place.remove(name, timeout)), "is removed", as_json)


# --- inside ---------------------------------------------------------------------------------------


def _run(options: Options, work: Callable[[AdministersModels], Awaitable[T]]) -> T:
    place = place_of(options)
    with failures_told(), _refusals_told():
        return asyncio.run(_at(place, work))


async def _at(place: Place, work: Callable[[AdministersModels], Awaitable[T]]) -> T:
    async with administering_models(place) as models:
        return await work(models)


@contextmanager
def _refusals_told() -> Iterator[None]:
    """What could not be loaded or unloaded ends the program as a request that failed does, over
    the bus as over HTTP."""
    try:
        yield
    except ModelError as error:
        complain(f"{error.message} ({error.code})")
        raise typer.Exit(1) from None


def _print(model: ModelStatus | str, what: str, as_json: bool) -> None:
    name = model if isinstance(model, str) else model.id
    if as_json:
        told = {"id": model} if isinstance(model, str) else model
        sys.stdout.write(f"{msgspec.json.encode(told).decode()}\n")
    else:
        typer.echo(f"{harmless(name)} {what}")


def _line(model: ServedModel | ModelStatus) -> str:
    length = model.max_model_len
    return harmless(f"{model.id}  {length} tokens" if length else model.id)


def _table(models: Sequence[ModelStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("model", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("other names", overflow="fold", min_width=11)
    for name in ("for", "memory", "parameters", "KV", "requests"):
        table.add_column(name, no_wrap=True, justify="right")
    for model in models:
        table.add_row(
            harmless(model.id) + (" (default)" if model.default else ""),
            model.state,
            harmless(", ".join((*model.aliases, *model.adapters))) or "-",
            duration(max(0, time.time_ns() - model.since_ns) / 1e9) if model.since_ns else "-",
            _bytes(model.memory_bytes),
            _count(model.parameters),
            _bytes(model.kv_bytes),
            f"{model.waiting + model.in_flight}",
        )
        if model.reason and model.state == "failed":
            table.add_row("", harmless(one_line(model.reason)))
    return table


def _bytes(number: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number} B" if number else "-"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return str(number) if number else "-"
