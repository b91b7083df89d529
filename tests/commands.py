"""`nano-inference` in processes of its own, without the seconds that importing torch takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .programs import Program, Ran

COMMAND = Path(__file__).with_name("command.py")
"""The program's code."""


class Command(Program):
    """`nano-inference`, which runs."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        """Args: its arguments, and the options of `Program`."""
        super().__init__(COMMAND, *arguments, **options)


def run_command(*arguments: str, text: str = "") -> Ran:
    """Run `nano-inference` to its end, with this text on standard input."""
    with tempfile.TemporaryDirectory() as folder:
        stdout = Path(folder) / "stdout"
        with Command(*arguments, stdout=stdout) as command:
            command.stdin.write(text)
            command.stdin.close()
            stderr = command.output.read()
            return Ran(command.wait(), stdout.read_text(), stderr)
