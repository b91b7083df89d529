"""Write the tables of compatibility.md from the structs that read the bodies of calls.

python docs/write_compatibility.py
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from nano_inference.gateway import api, serving
from nano_inference.gateway.serving.fields import EMPTY, RefusedField, structs_in

PAGE = Path(__file__).with_name("compatibility.md")
FIRST = "\n## "

NAMES = {
    "openai": "[OpenAI's interface](openai.md), with vLLM's additions",
    "anthropic": "[Anthropic's interface](anthropic.md)",
    "ollama": "[Ollama's interface](ollama.md)",
    "sglang": "[SGLang's interface](gateway.md)",
    "vllm": "[vLLM's control plane](vllm.md)",
    "kserve": "[KServe V2](kserve.md)",
}
"""The interfaces in the page's order; any other follows by its folder's name."""

SHARED = "Parts that several interfaces have"
KINDS = ("NEUTRAL", "REFUSED", "SAMPLING", "OPEN")
# Of structs from which others take their fields.
NO_CALL = "The fields "


def modules(package: ModuleType) -> Iterator[ModuleType]:
    """Import the modules of a package, at any depth."""
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(found.name)


def is_read(kind: Any, module: ModuleType) -> bool:
    """Return whether a module defines this as a struct that reads a body or a query."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return False
    named = kind.__name__.endswith(("Body", "Query"))
    return kind.__module__ == module.__name__ and (named or any(hasattr(kind, k) for k in KINDS))


def structs(package: ModuleType) -> list[type[msgspec.Struct]]:
    """Return a package's structs that read bodies, each followed by those of its fields."""
    found: dict[type[msgspec.Struct], None] = {}

    def add(kind: type[msgspec.Struct]) -> None:
        if kind not in found and kind.__module__.startswith(package.__name__):
            found[kind] = None
            for field in msgspec.structs.fields(kind):
                for inner in structs_in(field.type):
                    add(inner)

    for module in modules(package):
        for kind in vars(module).values():
            if is_read(kind, module):
                add(kind)
    return [kind for kind in found if not title(kind).startswith(NO_CALL)]


def all_structs() -> list[type[msgspec.Struct]]:
    """Return the structs of all interfaces, and those that they share."""
    return structs(api) + structs(serving)


def title(kind: type) -> str:
    """Return the first sentence of a struct's docstring."""
    line = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return line.partition(". ")[0].removesuffix(".")


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def rows(kind: type) -> Iterator[tuple[str, str, str]]:
    """Return the neutral and refused fields: names with the same reason, the kind, the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, why in getattr(kind, "NEUTRAL", {}).items():
        reasons.setdefault(("neutral", why), []).append(name)
    for name, refused in getattr(kind, "REFUSED", {}).items():
        reasons.setdefault((f"refused{accepted(refused)}", refused.why), []).append(name)
    for (becomes, why), names in reasons.items():
        yield code(names), becomes, why


def accepted(refused: RefusedField) -> str:
    values = [json.dumps(value) for value in refused.nothing if value not in EMPTY]
    return f", except {code(values)}" if values else ""


def described(kind: type[msgspec.Struct]) -> str:
    """Return the section of one struct."""
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    honoured = code(dict.fromkeys([*fields, *getattr(kind, "SAMPLING", ())]))
    parts = [f"### {title(kind)}", f"Honoured: {honoured or 'none'}."]
    if getattr(kind, "OPEN", False):
        parts[1] += " Unknown fields are neutral."
    if table := [f"| {' | '.join(row)} |" for row in rows(kind)]:
        parts.append("\n".join(["| field | | |", "|---|---|---|", *table]))
    return "\n\n".join(parts)


def page() -> str:
    """Return compatibility.md with new tables; the text before them stays."""
    before = PAGE.read_text().partition(FIRST)[0]
    folders = {each.name: each.name for each in pkgutil.iter_modules(api.__path__) if each.ispkg}
    sections = []
    for name, heading in (NAMES | {name: name for name in folders if name not in NAMES}).items():
        found = structs(importlib.import_module(f"{api.__name__}.{name}"))
        sections.append("\n\n".join([f"## {heading}", *map(described, found)]))
    sections.append("\n\n".join([f"## {SHARED}", *map(described, structs(serving))]))
    return f"{before}\n" + "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
