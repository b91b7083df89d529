"""Workers of xdist as forks of one process that has imported the engine.

Each of them would otherwise import torch and Transformers, and each once more in the process that
its programs are forks of (`programs`). As a script this file is that one process, which has the
listening socket as an argument; `worker.py` is started in place of Python, and connects to it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAMS = Path(__file__).with_name("programs.py")
CONNECT = Path(__file__).with_name("worker.py")
FORK_SERVER = "TESTS_FORK_SERVER"
"""The variable with a worker's connection to the process that forks its programs."""

MOST_BYTES = 1 << 17


def preload(options: Any) -> None:
    """Have the processes that `--numprocesses` asks for be such forks.

    Args:
        options: Those of pytest, once xdist has read its own.
    """
    if set(options.tx) != {"popen"} or sys.platform != "linux":
        return
    folder = tempfile.TemporaryDirectory(prefix="nano-tests-")
    path = f"{folder.name}/workers"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,  # at whose end it ends
            # Pipes, as the programs that it becomes have: Python's files differ with what they are
            # on.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # As in the fork server of `up`: for Numpy's threads, and for command lines.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "SPT_NOENV": "1"},
        )
    atexit.register(folder.cleanup)
    atexit.register(process.kill)
    python = shlex.join([sys.executable, "-I", "-S", str(CONNECT), path])
    options.tx = [f"popen//python={python}"] * len(options.tx)


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    programs = runpy.run_path(str(PROGRAMS))
    programs["import_all"]()
    # These libraries take seconds; files of tests import them, and each worker collects all files.
    import anthropic  # noqa: F401
    import compressed_tensors  # noqa: F401
    import hypothesis  # noqa: F401
    import mcp  # noqa: F401
    import openai  # noqa: F401
    import peft  # noqa: F401
    import playwright.async_api  # noqa: F401
    import torch.nn.attention.varlen  # noqa: F401

    compile_kernels()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # An interrupt at the terminal is for pytest.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listening.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            arguments, variables, folder = json.loads(message)
            os.chdir(folder)
            # While standard output is a pipe, as those of programs are; a worker's may be a file.
            server = serving(programs, [connection.fileno(), *descriptors])
            if server is None:
                return
            os.environ.clear()
            os.environ.update(variables)
            os.environ[FORK_SERVER] = str(server.detach())
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            work(arguments, programs)
            return
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def compile_kernels() -> None:
    """Compile the kernels that most engines need, in children. On a new machine each worker, and
    each of its programs, would do so by itself: seconds of processor time."""
    import torch

    from nano_inference.stages.executor.runner.kernels import compile, cpu

    loads = (
        partial(cpu.library, torch.float32),
        partial(cpu.library, torch.bfloat16),
        cpu.sampling_library,
        partial(compile.load_library, compile.RANKS),
    )
    children = []
    for load in loads:
        if (child := os.fork()) == 0:
            with suppress(compile.KernelsUnavailable):
                load()
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def serving(programs: dict[str, Any], others: list[int]) -> socket.socket | None:
    """Have a child that forks programs; in the programs None.

    Args:
        others: Descriptors that it shall not have.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        for number in others:
            os.close(number)
        programs["serve_programs"](theirs)
        return None
    theirs.close()
    ours.recv(MOST_BYTES)  # that it is ready
    return ours


def work(arguments: list[str], programs: dict[str, Any]) -> None:
    """Be `python -u -c CODE`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.modules["__main__"] = ["-c"], (module := ModuleType("__main__"))
    programs["run_and_leave"](lambda: exec(arguments[-1], vars(module)))


if __name__ == "__main__":
    main()
