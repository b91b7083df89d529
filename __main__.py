"""The command line: `nano-inference`, or `python -m nano_inference`."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

_INTERRUPTED = 130
# Address space of a command that loads no model.
_LEAST_BYTES = 300_000_000


def main() -> None:
    """Run the command of `sys.argv` and exit with its status.

    Ctrl-C during imports, and after the command has cleaned up, ends the process at once.
    """
    python_s = signal.getsignal(signal.SIGINT)  # SIG_IGN in a script's background job
    _replace_handler(python_s, signal.SIG_DFL)
    _open_missing_streams()
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _LEAST_BYTES:  # RLIM_INFINITY is -1
        # Libraries would abort.
        sys.stderr.write("nano-inference: `ulimit -v` is below 300 MB; raise or remove it\n")
        sys.exit(2)
    from .cli.app import main as run_command

    _replace_handler(python_s, python_s)
    status = run_command()
    _replace_handler(python_s, signal.SIG_DFL)
    if status == _INTERRUPTED and python_s is signal.default_int_handler:
        # Python ends itself by SIGINT then, so that a shell's loop ends too.
        sys.excepthook = lambda *error: None
        raise KeyboardInterrupt
    sys.exit(status)


def _replace_handler(found: signal._HANDLER, handler: signal._HANDLER) -> None:
    """Set the handler of Ctrl-C, unless it was found ignored, or is not Python's."""
    if found is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)


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
