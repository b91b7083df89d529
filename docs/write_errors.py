"""Write the tables of errors.md from config/error_codes.toml.

python docs/write_errors.py
"""

from __future__ import annotations

import re
from pathlib import Path

from nano_inference.config.error_codes import ErrorCode, error_codes

PAGE = Path(__file__).with_name("errors.md")


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


if __name__ == "__main__":
    PAGE.write_text(page())
