"""Python programs of their own, without the seconds that importing torch takes.

Each is a fork of one process that has imported the engine: the same way in which `up` starts its
processes. As a script this file is that process.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from nano_inference.cli.children import adopt_orphans
from nano_inference.cli.fork_server import MOST_BYTES, READY, import_stages, serve
from nano_inference.config import STAGES

LIMIT_S = 120.0


class Ran(NamedTuple):
    """What a program did."""

    status: int
    stdout: str
    stderr: str


class Program:
    """A program that runs, in a session of its own; it is killed at the end of the block.

    Attributes:
        stdin: Its standard input.
        output: What it writes, to standard error too.
    """

    def __init__(
        self, file: Path, *arguments: str, stdout: Path | None = None, whole_end: bool = False
    ) -> None:
        """Starts it.

        Args:
            file: Its code.
            stdout: A file for its standard output.
            whole_end: Let Python take itself apart at the end, as a program does. With all that
                has been imported that takes longer than most programs here.
        """
        server = _fork_server()
        adopt_orphans()
        (given, stdin), (output, written) = os.pipe(), os.pipe()
        message = [str(file), str(stdout or ""), "yes" if whole_end else "", *arguments]
        try:
            with _one_at_a_time:
                socket.send_fds(server, [json.dumps(message).encode()], [given, written])
                self.pid = int(server.recv(MOST_BYTES))
        finally:
            os.close(given)
            os.close(written)
        self.stdin, self.output = open(stdin, "w"), open(output)  # noqa: SIM115
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self.stdin.close()
        self.output.close()

    def wait(self) -> int:
        """Waits for its end; gives its status, or a signal's number as a negative one."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        """Kills it and all that it has started."""
        if self._status is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def run(code: str, folder: Path, *, whole_end: bool = False) -> Ran:
    """Runs code to its end.

    Args:
        folder: For its text and what it prints.
    """
    (folder / "code.py").write_text(code)
    with Program(folder / "code.py", stdout=folder / "stdout", whole_end=whole_end) as program:
        stderr = program.output.read()
        return Ran(program.wait(), (folder / "stdout").read_text(), stderr)


async def run_beside(code: str, folder: Path) -> Ran:
    """As `run`, beside what the event loop has to do; killed when this is cancelled."""
    (folder / "code.py").write_text(code)
    await asyncio.to_thread(_fork_server)
    with Program(folder / "code.py", stdout=folder / "stdout") as program:
        reading = asyncio.create_task(asyncio.to_thread(program.output.read))
        try:
            stderr = await asyncio.shield(reading)
        except BaseException:
            program.kill()
            await reading
            raise
        status = await asyncio.to_thread(program.wait)
        return Ran(status, (folder / "stdout").read_text(), stderr)


_one_at_a_time = threading.Lock()


@cache
def _fork_server() -> socket.socket:
    """One for as long as this process lives."""
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Numpy's threads, as in the fork server of `up`.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
    atexit.register(process.kill)
    connection.settimeout(LIMIT_S)
    assert connection.recv(MOST_BYTES) == READY
    return connection


def main() -> None:
    """Serves, and runs one program in each fork."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    import_stages(STAGES)
    # What an engine imports when it is made, and its tokenizer and the bundled model.
    from transformers import AutoTokenizer, Qwen2ForCausalLM  # noqa: F401

    from nano_inference.pipeline import engine, pipeline  # noqa: F401

    arguments = serve(connection)
    if arguments is None:
        return
    file, stdout, whole_end, *others = arguments
    if stdout:
        number = os.open(stdout, os.O_WRONLY | os.O_CREAT)
        os.dup2(number, 1)
        os.close(number)
    sys.argv = [file, *others]
    if whole_end:
        runpy.run_path(file, run_name="__main__")
    else:
        _run_and_leave(file)


def _run_and_leave(file: str) -> None:
    """Ends as forks of multiprocessing do: threads are waited for, and atexit's functions run."""
    status = 0
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
