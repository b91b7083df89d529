"""Write the tables of agents.md from the results of the runs.

python docs/write_agents.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("agents.md")
FIRST = "\n## "
RESULTS = Path(__file__).parent.parent / "tests" / "agents" / "results.json"
PROGRAMS = "../tests/agents/by_library"


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def row(result: dict[str, Any]) -> str:
    """Return the row of a program."""
    start, types = result["start"], result.get("left_out")
    left_out = f" ({code(types)})" if types else ""
    cells = [
        f"{result['package']} {result['version']}",
        code(result["paths"]),
        f"`{start}`" if " " in start else f"[{start}]({PROGRAMS}/{start})",
        code(result["neutral"]) + left_out,
    ]
    return f"| {' | '.join(cells)} |"


def table(heading: str, start: str, results: list[dict[str, Any]]) -> str:
    """Return a section with the rows of some programs, in order of their names."""
    rows = sorted(map(row, results), key=str.lower)
    head = [f"| program | calls | {start} | neutral fields |", "|---|---|---|---|"]
    return "\n".join([f"## {heading}", "", *head, *rows])


def page() -> str:
    """Return agents.md with new tables; the text before them stays."""
    before = PAGE.read_text().partition(FIRST)[0]
    results = json.loads(RESULTS.read_text()).values()
    programs = [each for each in results if " " in each["start"]]
    libraries = [each for each in results if " " not in each["start"]]
    sections = [
        table("Programs", "start", programs),
        table("Libraries", "tried by", libraries),
    ]
    return f"{before}\n" + "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
