"""The command line: `nano-inference`, or `python -m nano_inference`."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Run the command of `sys.argv` and exit with its status."""
    _open_missing_streams()
    from .cli.app import main as run_command

    sys.exit(run_command())


def _open_missing_streams() -> None:
    """Open /dev/null for standard streams that the parent process has closed.

    Otherwise a connection gets the descriptor of a stream, and the lines that libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # This is the lowest free number, the stream's, since lower ones are open by now.
            file = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(file, True)
            setattr(sys, name, os.fdopen(file, "w" if number else "r"))


def _leave_working_folder() -> None:
    """Remove the working folder, where `python -m` looks for all modules first."""
    with contextlib.suppress(FileNotFoundError):  # it is gone
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]


if __name__ == "__main__":
    _leave_working_folder()
    main()
