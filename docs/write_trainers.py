"""Write the table of trainers.md from the results of the runs.

python docs/write_trainers.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("trainers.md")
RESULTS = Path(__file__).parent.parent / "tests" / "trainers" / "results.json"
PROGRAMS = "../tests/trainers/by_trainer"
BEGIN, END = "<!-- begin trainers -->\n", "<!-- end trainers -->\n"


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def row(result: dict[str, Any]) -> str:
    """Return the row of a trainer."""
    package, version = result["package"], result["version"]
    named = f"{package} {version}" if version else f"[{package.rpartition('/')[2]}]({package})"
    program = result["program"]
    headers = f"; header {code(result['headers'])}" if result["headers"] else ""
    cells = [
        f"{named}, [{program}]({PROGRAMS}/{program})",
        result["runs"],
        code(result["paths"]) + headers,
        code(result["neutral"]),
        result["replayed"],
    ]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return trainers.md with a new table; the text around it stays."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    results = json.loads(RESULTS.read_text())
    rows = [row(results[name]) for name in sorted(results)]
    head = ["| trainer | what runs unmodified | calls | neutral fields | made by our program |"]
    head += ["|---|---|---|---|---|"]
    return before + BEGIN + "\n".join([*head, *rows]) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
