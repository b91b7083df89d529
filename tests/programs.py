"""Python code as a program of its own, without the seconds that importing torch takes.

Each is a fork of one process that has imported the engine: the same way in which `up` starts its
processes. As a script this file is that process.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from nano_inference.cli.children import ForkServer
from nano_inference.cli.fork_server import import_stages, serve


class Ran(NamedTuple):
    """What a program did."""

    status: int
    stdout: str
    stderr: str


class Programs(ForkServer):
    """Starts programs with the environment of this process as it is now."""

    def __init__(self) -> None:
        super().__init__(["executor"], dict(os.environ))

    def _command(self, connection: int) -> list[str]:
        return [sys.executable, "-P", __file__, str(connection)]

    async def run(self, code: str, folder: Path) -> Ran:
        """Runs code to its end.

        Args:
            folder: An empty one, for its text and what it prints.
        """
        (folder / "code.py").write_text(code)
        child = await self.start([str(folder)])
        try:
            stderr = b"".join([chunk async for chunk in child.output()])
            status = await child.wait()
        finally:
            child.send_signal(signal.SIGKILL)  # if there was no time left
        return Ran(status, (folder / "stdout").read_text(), stderr.decode())


def main() -> None:
    """Serves, and runs one program in each fork."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import_stages(["executor"])
    arguments = serve(connection)
    if arguments is not None:
        folder = Path(arguments[0])
        stdout = os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT)
        os.dup2(stdout, 1)
        os.close(stdout)
        runpy.run_path(str(folder / "code.py"), run_name="__main__")


if __name__ == "__main__":
    main()
