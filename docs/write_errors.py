"""Write the errors of docs/errors.md for the console, which shows what to do about each.

python docs/write_errors.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WRITTEN = ROOT / "gateway" / "console" / "static" / "errors.json"

_ROW = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| (.+?) \|$", re.MULTILINE)


def remedies() -> dict[str, str]:
    """Return cause and remedy of each code, as plain text."""
    found: dict[str, str] = {}
    for codes, text in _ROW.findall((ROOT / "docs" / "errors.md").read_text()):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text).replace("`", "")
        for code in re.findall(r"`(\w+)`", codes):
            found.setdefault(code, plain)
    return found


def text() -> str:
    """Return the file."""
    return json.dumps(remedies(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(text())
