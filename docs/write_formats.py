"""Write the table of message formats in tools.md from the formats.

python docs/write_formats.py
"""

from __future__ import annotations

from pathlib import Path

from nano_inference.text.messages import MessageFormat
from nano_inference.text.messages.message_format import known_formats

PAGE = Path(__file__).with_name("tools.md")

_HEAD = """| format | models | calls are enforced | reasoning |
|---|---|---|---|
"""


def page() -> str:
    """Return the page with a table of all formats."""
    before, _, rest = PAGE.read_text().partition(_HEAD)
    _, _, after = rest.partition("\n\n")
    return (
        before + _HEAD + "\n".join(map(_row, sorted(known_formats(), key=_name))) + "\n\n" + after
    )


def _name(form: MessageFormat) -> str:
    return form.name


def _row(form: MessageFormat) -> str:
    enforced = "" if not form.reads_calls else "no" if form.calls is None else "yes"
    mark = "" if form.reasoning is None else f"`{form.reasoning.open.strip()}`"
    cells = (f"`{form.name}`", form.models, enforced, mark.replace("|", r"\|"))
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())
