"""Write the tables of settings.md from the docstrings of the settings.

python docs/write_settings.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

from nano_inference.config import Config, ModelConfig

PAGE = Path(__file__).with_name("settings.md")


def meanings(kind: type) -> dict[str, str]:
    """Return the Attributes of a class's docstring, by name, each as one line."""
    attributes = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def default_of(field: Any) -> str:
    if field.required:
        return ""
    made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if made else field.default
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def table(section: str, kind: type) -> str:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    text = meanings(kind)
    for field in msgspec.structs.fields(kind):
        default = default_of(field)
        meaning = re.sub(r"docs/(\w[\w-]*\.md)", r"[\1](\1)", text[field.name])
        shown = f"`{default}`" if default else "(empty)"
        rows.append(f"| `{section}.{field.name}` | {shown} | {meaning} |")
    return "\n".join(rows)


def page() -> str:
    """Return settings.md with new tables; the text around them stays."""
    text = PAGE.read_text()
    for field in msgspec.structs.fields(Config):
        kind = ModelConfig if field.name == "models" else field.type
        heading = f"\n## {field.name}\n"
        before, after = text.split(heading)
        around, rest = re.split(r"^\| setting .*(?:\n\|.*)*", after, maxsplit=1, flags=re.M)
        text = f"{before}{heading}{around}{table(field.name, kind)}{rest}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
