"""The command line: `nano-inference`, or `python -m nano_inference`."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Runs the command that `sys.argv` names and ends the process with its exit status."""
    _open_missing_streams()
    from .cli.app import main as run_command

    sys.exit(run_command())


def _open_missing_streams() -> None:
    """Open /dev/null for standard streams that the parent process has closed.

    Otherwise a connection gets the number of one, and with it the lines that libraries write there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free number, which is the stream's: those below are open by now.
            file = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(file, True)
            setattr(sys, name, os.fdopen(file, "w" if number else "r"))


def _leave_working_folder() -> None:
    """`python -m` looks for all modules in the working folder first, also for those of others."""
    with contextlib.suppress(FileNotFoundError):  # it is gone
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]


if __name__ == "__main__":
    _leave_working_folder()
    main()
