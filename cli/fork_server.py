"""The fork server of `up`: a process that has imported what stages need, and forks.

    python -P -m nano_inference.cli.fork_server DESCRIPTOR STAGE... SPACES

Imports, above all of torch, take most of the time of starting a process; a fork has them already.
The first message is engine settings, or null. With settings it has loaded the model too, whose
weights its forks share.
Forking is safe because this process has one thread, no event loop, has computed nothing and
touched no device, and a model is loaded by this one thread. `children.ForkServer` is its client.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import msgspec
from setproctitle import getproctitle, setproctitle

from ..config import EngineConfig
from ..config.collector import collector_paused
from ..pipeline.supervisor import actor_class
from .children import GO, MOST_BYTES, READY
from .terminal import PROGRAM

_WITH_TOKENIZER = frozenset({"admission", "streaming", "gateway"})

# Set during the imports.
_FOR_IMPORTS = {
    # Numpy's linear algebra, which is unused here, would start threads.
    "OPENBLAS_NUM_THREADS": "1",
    # Command lines must not overwrite the environment, which tools read.
    "SPT_NOENV": "1",
}


def main() -> None:
    """Serve until the other end is closed, and run the command in each fork."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    os.environ.update(_FOR_IMPORTS)
    getproctitle()  # reads the environment the first time
    engine = msgspec.json.decode(connection.recv(MOST_BYTES), type=EngineConfig | None)
    with collector_paused():
        import_stages(sys.argv[2:-1])
    if engine is not None:
        from ..stages.executor.runner.preloaded import preload

        preload(engine)
    os.environ.clear()
    os.environ.update(before)
    arguments = serve(connection)
    if arguments is not None:
        from .app import main as run_command

        sys.exit(run_command(arguments))


def import_stages(names: Sequence[str]) -> None:
    """Import the modules of these stages, or of the gateway; torch only for the executor."""
    from ..bus.redis import bus  # noqa: F401
    from .app import prepare
    from .process import forbid_torch, import_tokenizers

    if "executor" not in names:
        forbid_torch()
    # Otherwise imported when the event loop starts.
    import_module("anyio._backends._asyncio")
    prepare()
    if _WITH_TOKENIZER.intersection(names):
        import_tokenizers()
    for name in names:
        if name == "gateway":
            from ..gateway import app as web  # noqa: F401
            from ..gateway.server import server  # noqa: F401
        else:
            actor_class(name)
    if "executor" in names:
        from ..stages.executor.runner.model import prepare_loading

        prepare_loading()


def why_not() -> str:
    """Return why this process can't be forked; "" if it can."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads"
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith("/dev/nvidia"):  # a fork could not use CUDA
                return f"it has opened {path}"
    return ""


def serve(connection: socket.socket) -> list[str] | None:
    """Fork at each request.

    A request is the arguments of a command as JSON, with two descriptors: standard input, and one
    for standard output and error. The answer is the process id of the fork, which by then is a
    child of the nearest subreaper (`PR_SET_CHILD_SUBREAPER`). The fork waits for `GO` on its
    standard input, and exits if that is closed instead.

    Returns:
        In each fork its arguments. In the server None, when the other end has been closed.
    """
    # Objects that are never collected are never written to, so their memory stays shared.
    gc.collect()
    gc.freeze()
    if reason := why_not():
        raise RuntimeError(f"this process can't be forked: {reason}")
    with suppress(BrokenPipeError):
        connection.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 2)
        if not message:
            return None
        reading, writing = os.pipe()
        # The process in between ends at once, so that the subreaper adopts its child.
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            # Before anything else: the terminal's Ctrl-C must not reach it.
            os.setsid()
            os.write(writing, str(os.getpid()).encode())
            for number in (connection.detach(), reading, writing):
                os.close(number)
            if os.read(descriptors[0], 1) != GO:
                os._exit(0)
            arguments: list[str] = json.loads(message)
            _become(arguments, descriptors)
            return arguments
        for number in (writing, *descriptors):
            os.close(number)
        os.waitpid(between, 0)
        child_id = os.read(reading, MOST_BYTES)
        os.close(reading)
        with suppress(BrokenPipeError):
            connection.send(child_id)


def _become(arguments: Sequence[str], descriptors: Sequence[int]) -> None:
    """Give this fork the streams, arguments and title of a program of its own."""
    given, output = descriptors
    for number, standard in ((given, 0), (output, 1), (output, 2)):
        os.dup2(number, standard)
    for number in descriptors:
        os.close(number)
    sys.argv = [PROGRAM, *arguments]
    setproctitle(" ".join(sys.argv))


if __name__ == "__main__":
    main()
