"""Lines of code by folder, without blank lines, comments and docstrings; kernels in C apart.

python benchmarks/size.py [REVISION] [--depth 2]
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
OTHER_ROOMS = ("tests", "benchmarks", "examples", "docs")
NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout


def lines_of_code(source: str) -> int:
    """Count the lines that hold a token of code; docstrings, of constants too, are none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(end)):
                lines.difference_update(range(node.lineno, end + 1))
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="", help="a commit; default: the files here")
    parser.add_argument("--depth", type=int, default=1, help="folders per line of the table")
    options = parser.parse_args()
    names = git("ls-tree", "-r", "--name-only", options.revision or "HEAD", ".").splitlines()
    totals: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for name in names:
        path = Path(name)
        if path.suffix not in (".py", ".c", ".h"):
            continue
        if options.revision:
            source = git("show", f"{options.revision}:{name}")
        elif (ROOT / name).exists():
            source = (ROOT / name).read_text()
        else:
            continue
        if path.suffix != ".py":
            totals["C"] += sum(bool(line.strip()) for line in source.splitlines())
            continue
        count = lines_of_code(source)
        folders["/".join(path.parts[:-1][: options.depth]) or "(root)"] += count
        room = path.parts[0]
        totals[room if room in OTHER_ROOMS else "product"] += count
    for folder, count in sorted(folders.items()):
        print(f"{count:8,}  {folder}")
    print(", ".join(f"{room} {count:,}" for room, count in totals.most_common()))


if __name__ == "__main__":
    main()
