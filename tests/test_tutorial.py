"""The tutorial's pages as a reader goes through them, and every command in the documents."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from nano_inference.cli.app import app

from .cli.servers import free_port
from .test_docs import DOCUMENTS, ROOT

PAGES = sorted((ROOT / "docs" / "tutorial").glob("*.md"))
LIMIT_S = 240
FENCE = re.compile(r'^```(\w+)(?: (norun))?(?: title="(.+?)")?\n(.*?)^```$', re.M | re.S)

TIMED = re.compile(r"[▀-▟▲]|\bms\b|\d s\b")
"""A line with measured times, which are others in each run."""

SHELL = """
set -em
exec 2>&1
trap 'for job in $(jobs -p); do kill -TERM -- -$job; done; wait' EXIT
nano-inference() {
  case $1 in
    serve) command nano-inference serve --port $GATEWAY "${@:2}";;
    up) command nano-inference up --port $BUS "${@:2}";;
    submit) command nano-inference submit --bus redis://127.0.0.1:$BUS "${@:2}";;
    *) command nano-inference "$@";;
  esac
}
"""
"""Ports are free ones, so that no other server on this machine is met."""

SERVER = """
{{ {code}; }} > terminal-1.txt 2>&1 &
until nano-inference status > /dev/null 2>&1; do kill -0 $!; done
cat terminal-1.txt
"""


class Block(NamedTuple):
    """A block that runs, and the output that the page shows, in which … is any text.

    A title of a block of bash names the terminal of a server that runs beside the later blocks; the
    title of a block of Python is its file.
    """

    language: str
    title: str
    code: str
    output: str

    @property
    def script(self) -> str:
        match self:
            case Block("python", title, code):
                return f"cat > {title} <<'END OF FILE'\n{code}END OF FILE\n"
            case Block("bash", "", code):
                return code
            case Block("bash", _, code):
                return SERVER.format(code=code.strip())
        raise AssertionError(f"a block of {self.language}")

    def is_printed(self, text: str) -> bool:
        """Return whether a text has the output, apart from measured times and spaces."""
        pattern = ".*?".join(map(re.escape, untimed(self.output).split("…")))
        return re.search(pattern, untimed(text), re.S) is not None


def untimed(text: str) -> str:
    """Return a text without its measured times and their bars."""
    lines = (
        re.sub(r"[▀-▟▲]", "", re.sub(r"[\d.,]+", "0", line)) if TIMED.search(line) else line
        for line in text.splitlines()
    )
    return " ".join(" ".join(lines).split())


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page; those of `norun` need a download, or a program."""
    found: list[Block] = []
    for language, left_out, title, code in FENCE.findall(page.read_text()):
        if language == "text":
            found[-1] = found[-1]._replace(output=code)
        elif not left_out:
            found.append(Block(language, title, code, ""))
    return found


@pytest.mark.slow
@pytest.mark.soak(only=True)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tutorial_runs_as_it_stands_and_prints_what_it_shows(
    page: Path, tmp_path: Path
) -> None:
    """In a folder that has what a clone has, where the environment is active already."""
    blocks = blocks_of(page)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    (tmp_path / "runtime").mkdir(mode=0o700)
    gateway = str(free_port())
    script = SHELL + "\n".join(f"echo '@@ {n}'\n{block.script}" for n, block in enumerate(blocks))
    ran = subprocess.run(
        ["bash", "-c", script.replace("127.0.0.1:8000", f"127.0.0.1:{gateway}")],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
            "GATEWAY": gateway,
            "BUS": str(free_port()),
            "COLUMNS": "100",
            # As on the terminals of the page.
            "NANO_INFERENCE_TELEMETRY__LOG_FORMAT": "text",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    printed = re.split(r"^@@ \d+\n", ran.stdout, flags=re.M)[1:]
    for block, text in zip(blocks, printed, strict=True):
        assert block.is_printed(text.replace(gateway, "8000")), f"{block.output}\n!=\n{text}"


def commands_in(text: str) -> list[str]:
    """Return the program's command lines in the blocks of a document, and in its inline code."""
    fences = re.findall(r"^```(?!python|text|json|yaml)[^\n]*\n(.*?)^```", text, re.M | re.S)
    lines = "\n".join(fences).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`(nano-inference [^`]+)`", text)
    return [found for line in (*lines, *inline) if (found := command_in(line))]


def command_in(line: str) -> str:
    found = re.search(r"(?:^|[|(&;] ?|\$ |\w\$ )(nano-inference [^|&;<>#)]*)", line)
    return found[1].strip() if found else ""


def test_commands_in_the_documents_are_commands_of_the_program() -> None:
    """With options that it has; values are the reader's."""
    program = get_command(app)
    for document in DOCUMENTS:
        for line in commands_in(document.read_text()):
            assert not unknown_in(program, line.split()[1:]), f"{document.name}: {line}"


def unknown_in(command: Any, words: list[str]) -> str:
    """Return the first word that is no command, or no option of it."""
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        if name.isupper():
            return ""
        command = command.commands.get(name)
        if command is None:
            return name
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    known |= {"--help", "-h"}
    given = words[: words.index("--")] if "--" in words else words
    options = (word.partition("=")[0] for word in given if re.match("--?[a-z]", word))
    return next((option for option in options if option not in known), "")
