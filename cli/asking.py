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


class AnswerWriter:
    """Writes an answer to standard output as it comes; leaving it ends the line.

    Attributes:
        text: What has come.
    """

    def __init__(self) -> None:
        self.text = ""
        self._on_terminal = sys.stdout.isatty()

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self.text:
            self._write("\n")

    def write(self, piece: str) -> None:
        """The next piece."""
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
