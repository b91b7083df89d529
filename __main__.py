"""The command line: `nano-inference`, or `python -m nano_inference`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command that `sys.argv` names and ends the process with its exit status."""
    from .pipeline.commands.app import main as run_command

    sys.exit(run_command())


if __name__ == "__main__":
    main()
