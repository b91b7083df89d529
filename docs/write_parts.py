"""Write the tables of parts.md from the parts of the stages and the sections of their messages.

python docs/write_parts.py
"""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nano_inference.config import STAGES

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_name("parts.md")
SIZE = runpy.run_path(str(ROOT / "benchmarks" / "size.py"))


class PartClass(NamedTuple):
    """A class of a part; `place`: its module, or its folder if the module is `part.py`."""

    stage: str
    place: Path
    node: ast.ClassDef

    @property
    def row(self) -> str:
        files = self.place.rglob("*.py") if self.place.is_dir() else [self.place]
        lines = sum(SIZE["lines_of_code"](file.read_text()) for file in files)
        named = [each.name for each in self.node.body if isinstance(each, ast.FunctionDef)]
        used = ", ".join(f"`{name}`" for name in named if name in hooks_of(self.stage))
        place = self.place.relative_to(ROOT)
        feature = place.parts[3].removesuffix(".py")
        link = f"[`{self.node.name}`](../{place})"
        return f"| {feature} | {self.stage} | {link} | {lines} | {used} |"


def classes_in(file: Path, base: str) -> Iterator[ast.ClassDef]:
    """Return the classes of a module that derive from one of this name."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and base in map(ast.unparse, node.bases):
            yield node


def parts() -> list[PartClass]:
    """Return all parts, by feature and stage."""
    found = [
        PartClass(stage, file.parent if file.stem == "part" else file, node)
        for stage in STAGES
        for file in sorted((ROOT / "stages" / stage / "parts").rglob("*.py"))
        for node in classes_in(file, "Part")
    ]
    return sorted(found, key=lambda part: part.place.relative_to(ROOT).parts[3].split(".")[0])


def hooks_of(stage: str) -> list[str]:
    """Return the hooks of a stage, in the order of its base class."""
    (base,) = classes_in(ROOT / "stages" / stage / "parts" / "__init__.py", "BasePart")
    names = [each.name for each in base.body if isinstance(each, ast.FunctionDef)]
    return [name for name in names if not name.startswith("_")]


def section_rows() -> Iterator[str]:
    """Return a row for each section: its message, and the stages that make and read it."""
    sources = {
        stage: "\n".join(file.read_text() for file in (ROOT / "stages" / stage).rglob("*.py"))
        for stage in STAGES
    }
    for file in sorted((ROOT / "bus").rglob("*.py")):
        for node in classes_in(file, "Section"):
            name, text = node.name, ast.get_docstring(node) or ""
            message = re.split(r"[.:]", text.removeprefix("In "), maxsplit=1)[0]
            made, read = (
                ", ".join(stage for stage in STAGES if re.search(pattern, sources[stage]))
                for pattern in (
                    rf"(?<! or ){name}\(",
                    rf"\b{name}\.find\(|reads = {name}\b|\"{name}\"",
                )
            )
            place = file.relative_to(ROOT)
            yield f"| [`{name}`](../{place}) | {message} | {made} | {read} |"


def tables() -> list[str]:
    """Return the tables of parts and of sections."""
    heads = (
        "| feature | stage | part | lines | hooks |",
        "| section | message | made in | read in |",
    )
    rows = [part.row for part in parts()], section_rows()
    return [
        "\n".join((head, "|" + "---|" * (head.count("|") - 1), *each))
        for head, each in zip(heads, rows, strict=True)
    ]


def page() -> str:
    """Return parts.md with new tables; the text around them stays."""
    new = iter(tables())
    return re.sub(r"^\|.*(?:\n\|.*)*", lambda _: next(new), PAGE.read_text(), flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(page())
