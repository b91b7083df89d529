"""The command line: `nano-inference`, or `python -m nano_inference`."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Runs the command that `sys.argv` names and ends the process with its exit status."""
    from .cli.app import main as run_command

    sys.exit(run_command())


def _leave_working_folder() -> None:
    """`python -m` looks for all modules in the working folder first, also for those of others."""
    with contextlib.suppress(FileNotFoundError):  # it is gone
        if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]


if __name__ == "__main__":
    _leave_working_folder()
    main()
