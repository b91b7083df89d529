"""`nano-inference weights log` and `export`: the log of weights, read here."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.filesize import decimal

from ..config import ConfigError, EngineConfig
from .operations import weights
from .options import AsJson, Options, argument, option, takes
from .terminal import print_json, print_table

Log = Annotated[
    Path | None, option("--log FOLDER", "The log of weights; default: engine.weight_log.")
]
Run = Annotated[str, option("--run NAME", "A run in the log; default: the newest.")]


def engine_config(options: Options, log: Path | None) -> EngineConfig:
    """Return the settings of the engine, with a log of weights.

    Raises:
        ConfigError: None is named.
    """
    engine = options.config().engine
    if log is not None:
        engine = replace(engine, weight_log=str(log.absolute()))
    if not engine.weight_log:
        raise ConfigError("name the log of weights with --log FOLDER, or set engine.weight_log")
    return engine


@weights.command("log")
@takes(Options, "config_file", "settings")
def log_(options: Options, log: Log = None, as_json: AsJson = False) -> None:
    """List the versions in a log of weights, each run's oldest first.

    nano-inference weights log --log /data/weights
    """
    # Imports torch.
    from ..stages.executor.runner.weights.log import WeightLog

    found = WeightLog(engine_config(options, log).weight_log).versions()
    if as_json:
        print_json(
            *(each._replace(path=str(each.path))._asdict() for each in found)  # type: ignore[arg-type]
        )
        return
    rows = [
        (
            each.run,
            str(each.version),
            each.kind,
            decimal(each.num_bytes),
            datetime.fromtimestamp(each.written, UTC).isoformat(" ", "seconds"),
        )
        for each in found
    ]
    print_table(("run", "version", "kind", "size", "written (UTC)"), rows, "The log is empty.")


@weights.command("export")
@takes(Options, "model", "config_file", "settings")
def export(
    options: Options,
    folder: Annotated[Path, argument("FOLDER", "The new folder.")],
    version: Annotated[int, option("--version V", "The version.")],
    log: Log = None,
    run: Run = "",
) -> None:
    """Write a past version as a model's folder; print its path.

    nano-inference weights export --version 17 checkpoints/17 --log /data/weights
    """
    from ..pipeline.past import export_version

    export_version(engine_config(options, log), version, folder.absolute(), run=run)
    typer.echo(folder)
