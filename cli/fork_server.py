"""The process that those of `up` are forked from: it has imported what they need, and waits.

    python -P -m nano_inference.cli.fork_server DESCRIPTOR STAGE... SPACES

Python's imports are most of what starting a process costs, those of torch above all; in a fork they
are done. A fork is sound here because nothing runs in this process: it has one thread, no event
loop, has computed nothing and touched no device. `children.py` is the other end.
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

from setproctitle import getproctitle, setproctitle

from ..pipeline.supervisor import actor_class
from .terminal import PROGRAM

READY = b"ready"
"""What is sent once, when everything has been imported."""

GO = b"\n"
"""Sent to a fork once the watchdog has it: none runs whose parent is killed before."""

MOST_BYTES = 1 << 16
"""Of one message."""

_WITH_TOKENIZER = frozenset({"admission", "streaming", "gateway"})

ROOM = " " * 512
"""The last argument: the command lines of forks are written over that of the server."""

# While modules are imported.
_MEANWHILE = {
    # Numpy's linear algebra, which nothing of ours uses, would start threads.
    "OPENBLAS_NUM_THREADS": "1",
    # Command lines are not written over the environment too, which tools read.
    "SPT_NOENV": "1",
}


def main() -> None:
    """Serves until nobody has the other end any more, and runs the command in each fork."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    before = {name: os.environ.get(name) for name in _MEANWHILE}
    os.environ.update(_MEANWHILE)
    getproctitle()  # which looks at the environment the first time
    import_stages(sys.argv[2:-1])
    for name, value in before.items():
        del os.environ[name]
        if value is not None:
            os.environ[name] = value
    arguments = serve(connection)
    if arguments is not None:
        from .app import main as run_command

        sys.exit(run_command(arguments))


def import_stages(names: Sequence[str]) -> None:
    """Imports what these stages, or the gateway, use. Without the executor there is no torch."""
    from ..bus.redis import bus  # noqa: F401
    from .app import prepare
    from .process import forbid_torch

    if "executor" not in names:
        forbid_torch()
    # Which otherwise is imported when the event loop begins.
    import_module("anyio._backends._asyncio")
    prepare()
    if _WITH_TOKENIZER.intersection(names):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401
    for name in names:
        if name == "gateway":
            from ..gateway import app as web  # noqa: F401
            from ..gateway.server import server  # noqa: F401
        else:
            actor_class(name)


def why_not() -> str:
    """Why this process can't be forked; empty when it can."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"it has {threads} threads"
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith("/dev/nvidia"):  # a fork could not use CUDA any more
                return f"it has opened {path}"
    return ""


def serve(connection: socket.socket) -> list[str] | None:
    """Forks as often as it is asked to.

    A request is the arguments of a command as JSON, with two descriptors: standard input, and one
    for standard output and error. The answer is the process id of the fork, which by then is a
    child of the nearest ancestor that takes orphans (`PR_SET_CHILD_SUBREAPER`). The fork then waits
    for `GO` on its standard input, and exits if that is closed instead.

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
        # The one between ends at once, so that its child is the other end's.
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            # Before anybody knows of it: Ctrl-C in the terminal is not for it.
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
    """Makes this fork what a program of its own would be."""
    given, output = descriptors
    for number, standard in ((given, 0), (output, 1), (output, 2)):
        os.dup2(number, standard)
    for number in descriptors:
        os.close(number)
    sys.argv = [PROGRAM, *arguments]
    setproctitle(" ".join(sys.argv))


if __name__ == "__main__":
    main()
