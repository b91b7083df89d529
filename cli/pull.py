"""`nano-inference pull`: a model's folder, from a folder, a URL or a hub."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ..config import ConfigError
from .checks import check_folder
from .fetching import Source, fetch, source_of
from .terminal import complain, stderr, stdout

MODELS = Path("~/.cache/nano-inference/models")
"""Where models are put, unless it is said."""


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, or a GGUF file; the http(s) URL of an archive (.tar, .tar.gz, .zip) or "
            "of one file; or a name on the Hugging Face hub, as org/name or org/name@revision.",
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help=f"Where to put it; below {MODELS} by default."),
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(
            "--sha256",
            metavar="HEX",
            help="What the file at a URL has to be; may stand behind it, as #sha256=HEX.",
            show_default=False,
        ),
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Take what a URL gives, whatever it is.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Put it in the place of what is there.")
    ] = False,
) -> None:
    """Bring a model's folder here, and print where it is.

        nano-inference pull Qwen/Qwen2.5-0.5B-Instruct

        nano-inference pull https://example.org/model.tar.gz#sha256=5f70…

        nano-inference serve --model "$(nano-inference pull /mnt/models/mine)"

        nano-inference pull https://example.org/model.Q4_K_M.gguf#sha256=5f70…

    What was cut off goes on where it stopped when the command is given again. The folder is there
    only once all of it is, and what stood there before stays until then.
    """
    found = source_of(source, sha256, unverified=unverified)
    target = (to or MODELS / found.name).expanduser().resolve()
    if not target.name:
        raise ConfigError(f"--to is {target}, which can't be replaced")
    try:
        _check_apart(found, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            _check_replaced(target, force=force)
            _put(_fetched(found, target), target)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error}") from None
    check = check_folder(str(target))
    if check.state != "ok":
        complain(f"it may not be a model: {check.found}")
    stdout().print(str(target), soft_wrap=True)


def _check_apart(source: Source, target: Path) -> None:
    """Raises ConfigError: a folder would be copied into itself, or into the place of its own."""
    place = Path(source.place)
    if source.kind == "folder" and (target.is_relative_to(place) or place.is_relative_to(target)):
        raise ConfigError(f"{place} and {target} are one folder, or one is within the other")


def _check_replaced(target: Path, *, force: bool) -> None:
    """Raises ConfigError: what is there has to stay."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is there already, and is no folder; give another --to")
    if not force:
        raise ConfigError(f"{target} is there already; give --force to replace it, or --to")
    if not (target / "config.json").exists() and any(path.is_dir() for path in target.iterdir()):
        # It was meant as the place for a model's folder, perhaps beside others.
        raise ConfigError(f"{target} holds folders and is no model's, so it is not replaced")


def _fetched(source: Source, target: Path) -> Path:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = stderr()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        return fetch(source, _beside(target, f"partial-{source.key}"), progress)


def _put(folder: Path, target: Path) -> None:
    """In the place of what may be there, which is gone only when the new one stands there."""
    old = _beside(target, "old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(folder, target)
    shutil.rmtree(old, ignore_errors=True)
    for left in target.parent.glob(_beside(Path(glob.escape(str(target))), "partial-*").name):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Raises ConfigError: another process is at it."""
    path = _beside(target, "lock")
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"another pull to {target} is under way") from None
            if not _is_at(lock, path):
                continue  # its owner has removed it since it was opened, so it locks nothing
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(file: IO[str], path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")
