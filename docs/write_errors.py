"""Write the tables of errors.md, and the console's errors.json, from config/error_codes.toml.

python docs/write_errors.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nano_inference.config.error_codes import ErrorCode, error_codes

PAGE = Path(__file__).with_name("errors.md")
CONSOLE = PAGE.parent.parent / "gateway" / "console" / "static" / "errors.json"

# Link and code marks of Markdown.
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def table(entries: list[ErrorCode]) -> str:
    rows = ["| code | HTTP | cause | remedy |", "|---|---|---|---|"]
    for codes, status, cause, remedy in entries:
        names = ", ".join(f"`{code}`" for code in codes)
        rows.append(f"| {names} | {status or ''} | {cause} | {remedy} |")
    return "\n".join(rows)


def page() -> str:
    """Return errors.md with new tables; the text around them stays."""
    text = PAGE.read_text()
    for section, entries in error_codes().items():
        pattern = rf"(\n## {section.capitalize()}\n.*?)\| code .*?(?=\n\n|\n*\Z)"
        before, rows = r"\1", table(entries).replace("\\", r"\\")
        text = re.sub(pattern, before + rows, text, count=1, flags=re.S)
    return text


def remedies() -> str:
    """Return errors.json: the remedy of each code, as plain text."""
    found = {
        code: _LINK.sub(r"\1", remedy).replace("`", "")
        for entries in error_codes().values()
        for codes, _, _, remedy in entries
        for code in codes
    }
    return json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    CONSOLE.write_text(remedies())
