"""Answers as Markdown on a terminal, while they arrive."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.spinner import Spinner
from rich.text import Text

from .terminal import AnswerWriter, harmless, stdout

_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_LIST = re.compile(r"[-*+] |\d{1,9}[.)] ")
# Characters after an empty line that tell whether a list goes on.
_ENOUGH = 11


class MarkdownWriter(AnswerWriter):
    """Writes an answer as Markdown: whole blocks once, below them the one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self._console = stdout()
        self._rest = ""
        self._wrote = False
        self._live = Live(
            console=self._console,
            get_renderable=self._growing,
            refresh_per_second=12,
            transient=True,
        )

    def __enter__(self) -> MarkdownWriter:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_reasoning()
        rest, self._rest = self._rest, ""
        self._print(rest)
        self._live.stop()

    def reason(self, piece: str) -> None:
        """Write a piece of the reasoning, which is no part of the answer."""
        self._reasoning += harmless(piece)

    def write(self, piece: str) -> None:
        """Write the next piece."""
        if piece:
            self._end_reasoning()
        self.text += piece
        *whole, self._rest = blocks_of(self._rest + harmless(piece))
        for block in whole:
            self._print(block)

    def _end_reasoning(self) -> None:
        reasoning, self._reasoning = self._reasoning.strip(), ""
        if reasoning:
            self._put(Text(reasoning, "dim"))

    def _print(self, block: str) -> None:
        if block.strip():
            self._put(rendered(block))

    def _put(self, shown: RenderableType) -> None:
        """Print something above the growing block, with an empty line between blocks."""
        if self._wrote:
            self._console.print()
        self._wrote = True
        self._console.print(_of_lines(self._lines(shown)), end="")

    def _lines(self, shown: RenderableType) -> list[list[Segment]]:
        """Return the lines without empty ones at both ends, which Rich adds to some blocks."""
        lines = self._console.render_lines(shown, pad=False)
        full = [n for n, line in enumerate(lines) if any(part.text.strip() for part in line)]
        return lines[full[0] : full[-1] + 1] if full else []

    def _growing(self) -> RenderableType:
        """Return the end of the last block, as many lines as the terminal has."""
        if not (self._rest.strip() or self._reasoning):
            return "" if self._wrote else Spinner("dots", style="dim")
        shown = Text(self._reasoning, "dim") if self._reasoning else rendered(self._rest)
        lines = [*([[]] if self._wrote else []), *self._lines(shown)]
        return _of_lines(lines[-max(1, self._console.height - 1) :])


def _of_lines(lines: Iterable[list[Segment]]) -> Segments:
    return Segments([part for line in lines for part in (*line, Segment.line())])


def rendered(text: str) -> Markdown:
    """Return Markdown for a terminal. HTML stays text, lines keep their ends, and links show their
    address, so that nothing that a model writes is hidden."""
    made = Markdown("", code_theme="ansi_dark", hyperlinks=False)
    made.markup = text
    made.parsed = _PARSER.parse(text)
    _keep_line_ends(made.parsed)
    return made


def _keep_line_ends(tokens: Iterable[Token]) -> None:
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _keep_line_ends(token.children or ())


def blocks_of(text: str) -> list[str]:
    """Return the blocks of a Markdown text, split at empty lines. The last one may still grow."""
    blocks, start, position, fence = [], 0, 0, ""
    lines = text.splitlines(keepends=True)
    for line in lines:
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not line[found.end() :].strip():
            fence = ""
        position += len(line)
        following = text[position:].lstrip("\n")
        if fence or line.strip() or not text[start:position].strip():
            continue
        if len(following) < _ENOUGH and "\n" not in following:
            break
        # An indented line belongs to the list above; so does the next item.
        goes_on = following[0] in " \t" or bool(_LIST.match(following))
        if not (goes_on and _LIST.match(text[start:].lstrip())):
            blocks.append(text[start:position])
            start = position
    return [*blocks, text[start:]]
