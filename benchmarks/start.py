"""Time from the start of a program to its first token, beside peers in turns; and of commands.

    python benchmarks/start.py [--peers llamacpp] [--python llamacpp=PATH] [--repeat 5] [--shape S]
        [--folder DIR] [--json FILE]

Engines are those of `run.py`. Each turn starts the engine's program, which loads the model and
completes a prompt of 128 tokens. nano-inference imports torch and Transformers while the model is
read, so that the model's time includes these imports. All files are in the page cache after a first
turn, which doesn't count. Commands are nano-inference's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import machine
from harness import (
    engine_command,
    free_port,
    model_folder,
    options,
    print_table,
    progress,
    record,
    rotated,
    stop,
    timed,
    wait_until_answered,
)
from run import Peer

Times = dict[str, list[float]]

IMPORT = "from nano_inference import InferenceEngine"
COLUMNS = {"median s": "{median:.2f}", "[least-most]": "[{least:.2f}-{most:.2f}]"}


def start(name: str, python: str, folder: Path, shape: str, threads: int) -> dict[str, float]:
    """Return the seconds of each part of an engine's start."""
    os.environ["TIMED_START"] = "1"
    begun = time.time()
    with Peer(name, python, folder, shape, threads) as peer:
        loaded = time.time()
        first_s = peer.ask(["W1-short", 0])["prefill_s"]
    imported = peer.about["imported_at"]
    parts = {"imports": imported - begun, "model": loaded - imported, "first token": first_s}
    return {**parts, "all": sum(parts.values())}


def serve(folder: Path) -> None:
    """Start a server, and end it once it is ready."""
    port = free_port()
    command = engine_command("serve", folder, "--port", port)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_answered(f"http://127.0.0.1:{port}/readyz", process)
    finally:
        process.kill()
        stop(process)


def run(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Times], list[dict[str, float]]]:
    """Return the seconds by engine or command and part, and the states of the machine."""
    folder = model_folder(arguments.folder, arguments.shape)
    pythons = dict(choice.split("=", 1) for choice in arguments.python)
    threads = os.cpu_count() or 1
    found: dict[str, Times] = {}
    states: list[dict[str, float]] = []
    commands = {
        "serve, until it is ready": lambda: serve(folder),
        "--help": lambda: run(*engine_command("--help")),
        IMPORT: lambda: run(sys.executable, "-c", IMPORT),
    }
    for repetition in range(arguments.repeat + 1):
        machine.note(states)
        for name in rotated(["ours", *arguments.peers, *commands], repetition):
            if name in commands:
                times = {"all": timed(commands[name])}
            else:
                python = pythons.get(name, sys.executable)
                times = start(name, python, folder, arguments.shape, threads)
            if repetition:
                for part, seconds in times.items():
                    found.setdefault(name, {}).setdefault(part, []).append(seconds)
        progress(repetition, arguments.repeat)
    return found, states


def main() -> None:
    parser = options(
        __doc__, peers=["llamacpp"], repeat=5, shape="S", folder=Path("build/benchmarks")
    )
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    arguments = parser.parse_args()
    found, states = measure(arguments)
    rows = {
        f"{name}: {part}": {
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        for name, parts in found.items()
        for part, values in parts.items()
    }
    print_table(COLUMNS, rows)
    record(arguments, turns=found, states=states)


if __name__ == "__main__":
    main()
