"""What `chat`, `complete`, `cancel` and `models` share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ..config import RequestError
from .terminal import complain, harmless

CompletedText = Annotated[
    str | None,
    typer.Argument(metavar="TEXT", help="The prompt; - or nothing reads standard input."),
]
AskedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model, by the name that `models` prints; the first of them by default.",
        show_default=False,
    ),
]


_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


class AnswerWriter:
    """Writes an answer to standard output as it comes; leaving it ends the line.

    Attributes:
        text: What has come.
    """

    def __init__(self) -> None:
        self.text = ""
        self._reasoning = ""
        self._on_terminal = sys.stdout.isatty()

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self.text or self._reasoning:
            self._write("\n")

    def reason(self, piece: str) -> None:
        """The next piece of the reasoning, which is no part of the answer: dim on a terminal, and
        nowhere else."""
        if self._on_terminal and piece:
            self._reasoning += harmless(piece)
            self._write(f"{_DIM}{harmless(piece)}{_PLAIN}")

    def write(self, piece: str) -> None:
        """The next piece."""
        if self._reasoning and piece:
            self._write("\n" if self._reasoning.endswith("\n") else "\n\n")
            self._reasoning = ""
        self.text += piece
        self._write(harmless(piece) if self._on_terminal else piece)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def failures_told() -> Iterator[None]:
    """Says why a request was refused or failed, and ends the program with status 1."""
    try:
        yield
    except RequestError as error:
        complain(f"{error.message} ({error.code})")
        raise typer.Exit(1) from None
