"""`nano-inference list`, `ps`, `logs`, `stop` and `version`: models and servers of this machine."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.filesize import decimal

from ..config import (
    BUNDLED_MODEL,
    BUNDLED_VISION_MODEL,
    ConfigError,
    EngineConfig,
    NanoInferenceError,
    nearest,
    shown,
)
from ..pipeline.models import ModelStatus
from .clients import ListedModel, client_at
from .connection import found_target, run_with
from .model_files import MODELS
from .options import AsJson, Options, argument, option, takes
from .processes import without_controls
from .running import Running, found, is_alive
from .terminal import PROGRAM, complain, harmless, print_json, print_table, waiting

_PATIENCE_S = 5.0
_LOOK_S = 0.2
_TAIL_BYTES = 1 << 20

Which = Annotated[
    str | None, argument("NAME", "A model, an address, a port or a process, as `ps` shows them.")
]


# --- models ---------------------------------------------------------------------------------------


class LocalModel(msgspec.Struct, frozen=True):
    """A model on this machine.

    Attributes:
        name: As `serve` takes it.
        size: Bytes of its files.
        modified: Seconds since 1970.
        folder: Its folder.
    """

    name: str
    size: int
    modified: float
    folder: str


def local_models() -> list[LocalModel]:
    """Return the models that `pull` has brought, the newest first, and the bundled ones."""
    folder = MODELS.expanduser()
    pulled = folder.iterdir() if folder.is_dir() else ()
    names = {
        each.name.replace("--", "/", 1): each
        for each in pulled
        if each.is_dir() and not each.name.startswith(".")
    }
    newest = sorted((_local(*each) for each in names.items()), key=lambda each: -each.modified)
    bundled = (BUNDLED_MODEL, BUNDLED_VISION_MODEL)
    return newest + [_local(each, EngineConfig(model_path=each).model_folder) for each in bundled]


def _local(name: str, folder: Path) -> LocalModel:
    files = [each.stat() for each in folder.rglob("*") if each.is_file()]
    modified = max((each.st_mtime for each in files), default=folder.stat().st_mtime)
    return LocalModel(name, sum(each.st_size for each in files), modified, str(folder))


def list_models(as_json: AsJson = False) -> None:
    """List the models on this machine: those that `pull` has brought, and the bundled ones.

        nano-inference list

        nano-inference serve Qwen/Qwen2.5-0.5B-Instruct

    `models` lists those of a running server.
    """
    if as_json:
        print_json(*local_models())
    else:
        print_local_models()


def print_local_models() -> None:
    """Print a table of `local_models`."""
    rows = [
        (harmless(each.name), decimal(each.size), _ago(time.time() - each.modified))
        for each in local_models()
    ]
    print_table(("NAME", "SIZE", "MODIFIED"), rows, right=("SIZE",), fold=("NAME",))


def _ago(seconds: float) -> str:
    """Return an age as "3 days ago"."""
    for size, unit in ((86_400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'s' * (number > 1)} ago"
    return "just now"


# --- servers --------------------------------------------------------------------------------------


class RunningModel(msgspec.Struct, frozen=True):
    """A model of a running server.

    Attributes:
        name: Its name in requests.
        state: As of `ModelStatus`; "unknown" if the server does not answer.
        size: Bytes of its weights and its KV cache, or of its processes; 0 if unknown.
        device: Device of the executors; "" if unknown.
        context: Most tokens of a prompt with its answer; 0 if unknown.
        address: Where it is served.
        command: The command that serves it.
        pid: Its process.
    """

    name: str
    state: str
    size: int
    device: str
    context: int
    address: str
    command: str
    pid: int


@takes(Options, "api_key")
def ps(options: Options, as_json: AsJson = False) -> None:
    """List the servers and pipelines that run on this machine, with their models.

        nano-inference ps

    SIZE is the memory of the weights and the KV cache. `stop` ends one, `logs` shows its log.
    """
    models = [model for running in found() for model in run_with_patience(running, options)]
    if as_json:
        print_json(*models)
        return
    rows = [
        (
            harmless(each.name),
            decimal(each.size) if each.size else "-",
            {"": "-", "cpu": "100% CPU"}.get(each.device, "100% GPU"),
            str(each.context or "-"),
            "Forever" if each.state == "ready" else each.state,
            each.address,
            str(each.pid),
        )
        for each in models
    ]
    columns = ("NAME", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL", "ADDRESS", "PID")
    nothing = "nothing runs; `nano-inference serve` starts a server"
    print_table(columns, rows, nothing, right=("SIZE", "CONTEXT", "PID"), fold=("NAME", "ADDRESS"))


def run_with_patience(running: Running, options: Options) -> list[RunningModel]:
    """Return the models of what runs; with the state "unknown" if it does not answer in time."""

    async def read() -> Sequence[ListedModel | ModelStatus]:
        async with (
            asyncio.timeout(_PATIENCE_S),
            client_at(found_target(running, options)) as client,
        ):
            return await client.details()

    models: Sequence[ListedModel | ModelStatus] = ()
    state = "loading"
    try:
        models = asyncio.run(read())
    except (NanoInferenceError, TimeoutError):
        state = "unknown"
    listed = [_running_model(running, each) for each in models]
    about = (running.url or running.bus or "", running.command, running.pid)
    return listed or [RunningModel(each, state, 0, "", 0, *about) for each in running.models]


def _running_model(running: Running, model: ListedModel | ModelStatus) -> RunningModel:
    about = (running.url or running.bus or "", running.command, running.pid)
    if isinstance(model, ListedModel):  # the key may not read more
        return RunningModel(model.id, "ready", 0, "", model.max_model_len or 0, *about)
    size = model.memory_bytes or model.weight_bytes + model.kv_bytes
    return RunningModel(model.id, model.state, size, model.device, model.max_model_len, *about)


def _named(running: Running, name: str) -> bool:
    """Return whether a name means what runs: its process, port, address, or one of its models."""
    place = running.url or running.bus or ""
    return name in (str(running.pid), place, place.rpartition(":")[2], *running.models) or (
        place.partition("://")[2] == name
    )


def _chosen(name: str | None) -> list[Running]:
    """Return what a name means; all without one.

    Raises:
        ConfigError: Nothing runs, or nothing of that name.
    """
    every = found()
    if not every:
        raise ConfigError("nothing runs on this machine; start a server by `nano-inference serve`")
    chosen = [each for each in every if name is None or _named(each, name)]
    if not chosen:
        assert name is not None
        names = sorted({model for each in every for model in each.models})
        raise ConfigError(
            f"nothing that runs is called {shown(name)}{nearest(name, names)}; "
            "see `nano-inference ps`"
        )
    return chosen


@takes(Options, "api_key")
def stop(
    options: Options,
    name: Which = None,
    everything: Annotated[bool, option("--all", "All that run.")] = False,
) -> None:
    """Stop a running server or pipeline, or unload one of its several models.

        nano-inference stop

        nano-inference stop tiny

        nano-inference stop --all

    Requests in flight may finish, within `pipeline.drain_timeout_s`.
    """
    if everything and name is not None:
        raise ConfigError(f"give {shown(name)} or --all, and not both")
    chosen = _chosen(name)
    if len(chosen) > 1 and not everything:
        places = ", ".join(f"{each.url or each.bus} (process {each.pid})" for each in chosen)
        raise ConfigError(f"{len(chosen)} run: {places}; name one of them, or give --all")
    for running in chosen:
        if name in running.models and len(running.models) > 1:
            _unload(running, options, str(name))
        else:
            _end(running)


def _unload(running: Running, options: Options, model: str) -> None:
    target = found_target(running, options)
    with waiting(f"unloading {harmless(model)}"):
        run_with(client_at(target), lambda client: client.unload(model))
    typer.echo(f"{harmless(model)} is unloaded; `nano-inference models load` loads it again")


def _end(running: Running) -> None:
    place = running.url or running.bus
    with waiting(f"stopping {place}; requests in flight may finish"):
        os.kill(running.pid, signal.SIGTERM)
        while is_alive(running):
            time.sleep(_LOOK_S)
    typer.echo(f"{place} is stopped")


# --- logs -----------------------------------------------------------------------------------------


def logs(
    name: Which = None,
    lines: Annotated[int, option("--lines -n NUMBER", "Lines before now.", min=0)] = 100,
    follow: Annotated[
        bool | None,
        option(
            "--follow/--no-follow -f/",
            "Print what is logged from now on, too; default: on a terminal.",
        ),
    ] = None,
) -> None:
    """Print the log of a running server or pipeline; on a terminal follow it until it ends.

        nano-inference logs

        nano-inference logs tiny -n 20 --no-follow

        nano-inference logs --follow | grep model_loaded

    Of one that was started on a terminal, or with its standard error in a file. Ctrl-C ends it, and
    so does the end of its reader, such as `head`.
    """
    if follow is None:
        follow = sys.stdout.isatty()
    running, *others = _chosen(name)
    if others:
        complain(f"{1 + len(others)} run; this is the log of the newest, process {running.pid}")
    if running.log is None:
        raise ConfigError(
            f"the log of process {running.pid} goes to a pipe, where its supervisor reads it, such "
            "as `journalctl` or `docker logs`"
        )
    try:
        for text in _followed(running, Path(running.log), lines, follow=follow):
            sys.stdout.write(text if sys.stdout.isatty() else _plain(text))
            sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise ConfigError(
            f"{running.log} can't be read: {error.strerror or error}", remedy="give a readable file"
        ) from None


def _followed(running: Running, log: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """Yield the last lines of a log, and then what is added, until its process has ended."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        last = file.read().splitlines(keepends=True)
        yield _text(last[len(last) - lines :] if lines else ())
        while follow:
            alive = is_alive(running)
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # it was cut
            if new := file.read():
                yield _text([new])
            elif not alive or _left_within(_LOOK_S):
                return


def _left_within(seconds: float) -> bool:
    """Return whether the reader of standard output has left, after a wait of so long if not."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)  # what is always reported: errors and ends
    except (OSError, ValueError):  # no file, as in a program that keeps the output
        time.sleep(seconds)
        return False
    return bool(watched.poll(1000 * seconds))


def _text(parts: Iterable[bytes]) -> str:
    return b"".join(parts).decode(errors="replace")


def _plain(text: str) -> str:
    return "\n".join(map(without_controls, text.split("\n")))


# --- version --------------------------------------------------------------------------------------


def version() -> None:
    """Print the version.

    nano-inference version
    """
    typer.echo(f"{PROGRAM} {metadata.version(PROGRAM)}")
