"""Lines of code by folder, without blank lines, comments and docstrings; kernels in C apart.

python benchmarks/size.py [REVISION] [--depth 2]
python benchmarks/size.py --closure pipeline/engine.py    # and all that importing it loads
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = "nano_inference"
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


def imports_of(path: Path) -> set[tuple[str, ...]]:
    """Return the package's modules that a file names in imports run at load, from the root."""
    found: set[tuple[str, ...]] = set()
    todo: list[ast.stmt] = list(ast.parse((ROOT / path).read_text()).body)
    while todo:
        match todo.pop():
            case ast.Import(names=names):
                paths = [tuple(name.name.split(".")) for name in names]
                found.update(path[1:] for path in paths if path[0] == PACKAGE)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = (PACKAGE, *path.parent.parts)[: 1 + len(path.parts) - level] if level else ()
                base += tuple(module.split(".")) if module else ()
                if base[:1] == (PACKAGE,):
                    found.update((base[1:], *((*base[1:], name.name) for name in names)))
            case ast.If(test=test, body=body, orelse=orelse):
                todo += orelse if ast.unparse(test) == "TYPE_CHECKING" else [*body, *orelse]
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                todo += [*body, *(each for h in handlers for each in h.body), *orelse, *final]
            case ast.With(body=body):
                todo += body
    return found


def closure(start: Path) -> dict[Path, int]:
    """Return the files that importing a file loads, and their lines of code."""
    found: dict[Path, int] = {}
    todo = [start]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = lines_of_code((ROOT / path).read_text())
        for module in (path.parent.parts, *imports_of(path)):
            for depth in range(1, len(module) + 1):
                of = Path(*module[:depth])
                files = (of / "__init__.py", of.with_suffix(".py"))
                todo += [file for file in files if (ROOT / file).exists()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="", help="a commit; default: the files here")
    parser.add_argument("--depth", type=int, default=1, help="folders per line of the table")
    parser.add_argument("--closure", type=Path, help="a file; count what importing it loads")
    options = parser.parse_args()
    if options.closure:
        files = closure(options.closure)
        print(f"{options.closure}: {len(files)} files, {sum(files.values()):,} lines")
        return
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
