"""The running servers and pipelines of this user: each registers itself, and commands find it.

A record is a JSON file of mode 600 in a folder that only this user can enter: in the runtime folder
(`$XDG_RUNTIME_DIR`), or in the cache folder where there is none. The file is removed when its
process ends; that of a killed process is ignored and removed.
"""

from __future__ import annotations

import os
import platform
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

import msgspec
from msgspec import field
from msgspec.structs import replace

from ..config import Config, redact
from ..config.temporary import cache_folder, only_we_write
from ..store.process_state import identity_of, state_of
from ..telemetry import LogOutput

MOST_LOG_BYTES = 4 << 20
"""Size of a kept log; then its older half is dropped."""

_SUFFIX, _LOG_SUFFIX = ".json", ".nano-inference-log"


def _log_file() -> str | None:
    """Return the file to which this process's standard error goes; None for anything else."""
    try:
        found = os.fstat(2)
        if stat.S_ISREG(found.st_mode) and found.st_nlink:
            return os.readlink("/proc/self/fd/2")
    except OSError:
        pass
    return None


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A running server or pipeline.

    Attributes:
        command: The command that started it.
        url: The root of its HTTP interfaces; None without HTTP.
        bus: The URL of its bus without password and options; None for a bus in its memory.
        prefix: `bus.prefix`.
        secret: Whether the URL of the bus has more than `bus`, and a command must be given it.
        models: The ids of its models at the start.
        pid: Its process.
        process: The process's identity, since PIDs are reused.
        started_at: Seconds since 1970.
        log: The file that has its log; None if its standard error is a pipe.
    """

    command: Literal["serve", "up", "gateway"]
    url: str | None = None
    bus: str | None = None
    prefix: str = ""
    secret: bool = False
    models: tuple[str, ...] = ()
    pid: int = field(default_factory=os.getpid)
    process: str = field(default_factory=lambda: identity_of(os.getpid()))
    started_at: float = field(default_factory=time.time)
    log: str | None = field(default_factory=_log_file)


def record(
    command: Literal["serve", "up", "gateway"],
    config: Config,
    url: str | None,
    *,
    embedded: bool = False,
) -> Running:
    """Return this process's record.

    Args:
        command: The command.
        config: Its settings.
        url: The root of its HTTP interfaces, if it has any.
        embedded: Whether the bus is the embedded server, whose password commands find.
    """
    # Connections from this machine reach these by the loopback address.
    for every, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url and url.replace(every, loopback)
    bus = None if config.bus.url == "memory" else redact(config.bus.url)
    return Running(
        command=command,
        url=url,
        bus=bus,
        prefix=config.bus.prefix,
        secret=bus not in (None, config.bus.url) and not embedded,
        models=tuple(model.id for model in config.models) or (config.engine.model_name,),
    )


@contextmanager
def registered(running: Running) -> Iterator[None]:
    """Keep a record while its process runs. Without a folder for it there is none.

    On a terminal the log is also kept in a file beside the record.
    """
    with ExitStack() as until_the_end:
        with suppress(OSError):
            if (folder := _folder()) is not None:
                if sys.stderr.isatty():
                    log = until_the_end.enter_context(_kept_log(folder))
                    running = replace(running, log=log)
                until_the_end.enter_context(_kept(folder, running))
        yield


@contextmanager
def _kept(folder: Path, running: Running) -> Iterator[None]:
    with NamedTemporaryFile(dir=folder, delete=False) as file:  # its mode is 600
        file.write(msgspec.json.encode(running))
    path = Path(f"{file.name}{_SUFFIX}")
    os.replace(file.name, path)
    try:
        yield
    finally:
        _remove(path)


@contextmanager
def _kept_log(folder: Path) -> Iterator[str]:
    """Copy the lines of the log to a file of at most `MOST_LOG_BYTES`; yield its path."""
    with NamedTemporaryFile(dir=folder, suffix=_LOG_SUFFIX, buffering=0, delete=False) as file:

        def copy(text: str) -> None:
            with suppress(OSError):
                if file.tell() > MOST_LOG_BYTES:
                    file.seek(-MOST_LOG_BYTES // 2, os.SEEK_END)
                    newest = file.read()
                    file.seek(0)
                    file.write(newest)
                    file.truncate()
                file.write(text.encode(errors="backslashreplace"))

        LogOutput.copy = copy
        try:
            yield file.name
        finally:
            LogOutput.copy = None
            _remove(Path(file.name))


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def found() -> list[Running]:
    """Return the running servers and pipelines of this user on this machine, newest first."""
    if (folder := _folder()) is None:
        return []
    alive: list[Running] = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            running = msgspec.json.decode(path.read_bytes(), type=Running)
        except (OSError, ValueError):
            continue  # it has just ended, or is of another version
        match _state_of(running):
            case "gone":
                _remove(path)
                if running.log is not None and running.log.endswith(_LOG_SUFFIX):
                    _remove(folder / Path(running.log).name)
            case "running" | "stopped":
                alive.append(running)
    return sorted(alive, key=lambda each: each.started_at, reverse=True)


def is_alive(running: Running) -> bool:
    """Return whether the process of a record still runs."""
    return _state_of(running) in ("running", "stopped")


def _state_of(running: Running) -> str:
    if running.process:
        return state_of(running.pid, running.process)
    try:  # a system without /proc
        os.kill(running.pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        return "unknown"
    return "running"


def _folder() -> Path | None:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    with suppress(OSError):
        if os.path.isabs(base) and only_we_write(os.stat(base)):
            folder = Path(base, "nano-inference", "running")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return folder if only_we_write(folder.stat()) else None
    # A home folder may be shared by several machines.
    return cache_folder("running", platform.node() or "localhost")
