"""Lines of code by folder: no comments, no docstrings, no blank lines.

`python benchmarks/size.py REVISION` prints those of an earlier revision beside those of the working
tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BESIDE = ("tests", "benchmarks", "examples", "docs", "models")
"""Folders that are no part of the product."""

_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def code_lines(source: str) -> int:
    """Return the number of lines with code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def sources(revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each Python file of a revision, or of the working tree."""
    if revision is None:
        names = _git("ls-files", "-co", "--exclude-standard", "*.py")
        for name in names.splitlines():
            if (path := ROOT / name).exists():
                yield name, path.read_text(encoding="utf-8")
        return
    for name in _git("ls-tree", "-r", "--name-only", revision).splitlines():
        if name.endswith(".py"):
            yield name, _git("show", f"{revision}:{name}")


def by_folder(revision: str | None) -> Counter[str]:
    """Return the lines of code in each folder of the root."""
    counted: Counter[str] = Counter()
    for name, source in sources(revision):
        counted[name.split("/")[0] if "/" in name else "(root)"] += code_lines(source)
    return counted


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?", help="an earlier revision to count too")
    revision = parser.parse_args().revision
    now = by_folder(None)
    before = by_folder(revision) if revision else None
    folders = sorted({*now, *(before or ())})
    product = [folder for folder in folders if folder not in BESIDE]
    rows = [(each, [each]) for each in (*product, *BESIDE)]
    rows.insert(len(product), ("product", product))
    for name, members in rows:
        cells = [sum(each[member] for member in members) for each in (before, now) if each]
        print(f"{name:14}" + "".join(f"{cell:10,}" for cell in cells))


if __name__ == "__main__":
    main()
