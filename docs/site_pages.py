"""A hook of mkdocs (see mkdocs.yml): pages for the files outside docs/ that the documents link to.

On GitHub a link leads to any file of the repository. The site has a page for each file so linked:
Markdown as a page, code as a block, a folder as a list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)|(?<= src=\")([^\":]+)|(?<= srcset=\")([^\":]+)")
LANGUAGES = {".c": "c", ".h": "c", ".mjs": "js", ".cjs": "js", ".yaml": "yaml", ".json": "json"}
FOR_TESTS = re.compile(r"^( *```\w+) no-?run$", re.M)
"""A mark of code that the tests don't run; here it would end the block."""
MOST_BYTES = 50_000


def on_files(files: Files, config: Any) -> Files:
    for path in sorted(_outside()):
        if path.suffix == ".png":
            files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
        else:
            files.append(File.generated(config, _uri(path), content=_content(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let each link lead to the page of its file."""
    uri = page.file.src_uri
    own = _path(uri)

    def moved(found: re.Match[str]) -> str:
        path = _target(own, found[0])
        return os.path.relpath(_uri(path), Path(uri).parent) if path else found[0]

    return FOR_TESTS.sub(r"\1", LINK.sub(moved, markdown)) if own.suffix == ".md" else markdown


def _outside() -> set[Path]:
    """Return the files outside docs/, and the folders, that a page leads to."""
    waiting = list(DOCS.rglob("*.md"))
    found: set[Path] = set()
    while waiting:
        for target in _targets(waiting.pop()):
            if (target.is_dir() or DOCS not in target.parents) and target not in found:
                found.add(target)
                waiting += [target] if target.suffix == ".md" else []
    return found


def _targets(page: Path) -> Iterator[Path]:
    for link in LINK.finditer(page.read_text()):
        if target := _target(page, link[0]):
            yield target


def _target(page: Path, link: str) -> Path | None:
    path = Path(os.path.normpath(page.parent / unquote(link)))
    return path if path.exists() and ROOT in path.parents else None


def _uri(path: Path) -> str:
    """Return the source of a page as mkdocs names it."""
    if DOCS in path.parents and not path.is_dir():
        return str(path.relative_to(DOCS))
    uri = f"repository/{path.relative_to(ROOT)}"
    return uri if path.suffix in (".md", ".png") else f"{uri}.md"


def _path(uri: str) -> Path:
    outside = uri.removeprefix("repository/")
    if outside == uri:
        return DOCS / uri
    path = ROOT / outside
    return path if path.exists() else path.with_suffix("")


def _content(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    name = path.relative_to(ROOT)
    head = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n"
    if path.is_dir():
        inside = sorted(each.name for each in path.iterdir() if each.name[0] not in "._")
        return head + "".join(f"- `{each}`\n" for each in inside)
    text = path.read_text()
    if len(text) > MOST_BYTES:
        return f"{head}{len(text):,} characters, in the repository.\n"
    language = LANGUAGES.get(path.suffix, path.suffix.removeprefix("."))
    return f"{head}````` {{.{language or 'text'}}}\n{text.rstrip()}\n`````\n"
