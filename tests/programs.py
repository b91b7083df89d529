"""Programs of their own, without the seconds that importing torch takes.

Each is a fork of one process that has imported the engine: the same way in which `up` starts its
processes. As a script this file is that process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from nano_inference.cli.children import GO, MOST_BYTES, READY, ROOM, adopting_orphans
from nano_inference.cli.fork_server import import_stages, serve
from nano_inference.config import STAGES
from nano_inference.config.collector import collector_paused

LIMIT_S = 120.0


class Ran(NamedTuple):
    """A program's status and output."""

    status: int
    stdout: str
    stderr: str


class Program:
    """A program that runs, in a session of its own; it is killed at the end of the block.

    Beside that it can be used like `subprocess.Popen`.

    Attributes:
        stdin: Its standard input.
        output: What it writes, to standard error too.
    """

    def __init__(
        self,
        file: Path,
        *arguments: str,
        stdout: Path | None = None,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        whole_end: bool = False,
        connection: tuple[socket.socket, socket.socket] | None = None,
    ) -> None:
        """Starts it.

        Args:
            file: Its code.
            stdout: A file for its standard output alone.
            log: A file after whose end all goes that it writes.
            environment: Its variables (None: those that this process has now).
            whole_end: Let Python take itself apart at the end, as a program does. With all that
                has been imported that takes longer than most programs here.
            connection: Our end of a connection, and the one that is its standard input; it writes
                to our standard error then.
        """
        server = _fork_server()
        (given, stdin), (output, written) = os.pipe(), os.pipe()
        if connection is not None:
            for number, end in ((stdin, connection[0]), (given, connection[1])):
                os.dup2(end.fileno(), number)
            os.dup2(2, written)
        variables = json.dumps(dict(os.environ if environment is None else environment))
        message = [str(file), str(stdout or ""), str(log or ""), "yes" if whole_end else ""]
        try:
            with _one_at_a_time, adopting_orphans():
                whole = json.dumps([*message, *arguments, variables]).encode()
                socket.send_fds(server, [whole], [given, written])
                self.pid = int(server.recv(MOST_BYTES))
            os.write(stdin, GO)
        finally:
            os.close(given)
            os.close(written)
        self.stdin, self.output = open(stdin, "w"), open(output)  # noqa: SIM115
        # Readable once the process has ended; and no other process can be meant by it.
        self._handle = os.pidfd_open(self.pid)
        self._status: int | None = None
        self._reaping = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        self.close()

    def poll(self) -> int | None:
        """Return the exit status; a signal's number as a negative one, None while it runs."""
        with self._reaping:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
                    os.close(self._handle)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; gives what it ended with.

        Raises:
            subprocess.TimeoutExpired: It has not ended within so many seconds.
        """
        if self.poll() is None:
            end = select.poll()
            end.register(self._handle)
            if not end.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(sys.argv[0], timeout or 0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills it and all that it has started, and waits for its end."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def close(self) -> None:
        """Lets go of its pipes."""
        self.stdin.close()
        self.output.close()


def run(code: str, folder: Path, *, whole_end: bool = False) -> Ran:
    """Runs code to its end.

    Args:
        folder: For its text and what it prints.
    """
    (folder / "code.py").write_text(code)
    with Program(folder / "code.py", stdout=folder / "stdout", whole_end=whole_end) as program:
        stderr = program.output.read()
        return Ran(program.wait(), (folder / "stdout").read_text(), stderr)


_one_at_a_time = threading.Lock()


# Of a worker that is a fork itself (`workers`).
_GIVEN = os.environ.pop("TESTS_FORK_SERVER", "")


@cache
def _fork_server() -> socket.socket:
    """One for as long as this process lives."""
    if _GIVEN:
        connection = socket.socket(fileno=int(_GIVEN))
        connection.settimeout(LIMIT_S)
        return connection
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), ROOM],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            # Pipes, as its forks will have: Python's files differ with what they are on.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # As in the fork server of `up`: for Numpy's threads, and for command lines.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "SPT_NOENV": "1"},
        )
    atexit.register(process.kill)
    connection.settimeout(LIMIT_S)
    if connection.recv(MOST_BYTES) != READY:
        raise AssertionError(process.communicate()[0].decode())
    return connection


def import_all() -> None:
    """Imports all that a program may need."""
    with collector_paused():
        import_stages((*STAGES, "gateway"))
        # What an engine imports when it is made, and its tokenizer and the bundled model.
        from transformers import AutoTokenizer, Qwen2ForCausalLM  # noqa: F401

        from nano_inference.pipeline import engine, pipeline  # noqa: F401


def serve_programs(connection: socket.socket) -> None:
    """Serves, and runs one program in each fork."""
    arguments = serve(connection)
    if arguments is None:
        return
    file, stdout, log, whole_end, *others, variables = arguments
    os.environ.clear()
    os.environ.update(json.loads(variables))
    # Who starts us in the background, or by `nohup`, has them ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for path, how, numbers in ((stdout, os.O_TRUNC, (1,)), (log, os.O_APPEND, (1, 2))):
        if path:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | how)
            for number in numbers:
                os.dup2(opened, number)
            os.close(opened)
    sys.argv = [file, *others]
    if whole_end:
        runpy.run_path(file, run_name="__main__")
    else:
        run_and_leave(lambda: runpy.run_path(file, run_name="__main__"))


def run_and_leave(run: Callable[[], object]) -> NoReturn:
    """Ends as forks of multiprocessing do: threads are waited for, and atexit's functions run."""
    status = 0
    try:
        run()
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
    import_all()
    serve_programs(socket.socket(fileno=int(sys.argv[1])))
