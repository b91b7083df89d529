"""Commands of the documentation that use a gateway."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs"
LIMIT_S = 60
# The gateway's address in the documentation.
TOLD_URL = "http://127.0.0.1:8000"


def commands_of(document: str) -> list[str]:
    """Return the bash blocks of a document, at least one."""
    found = re.findall(r"^```bash\n(.*?)^```", (FOLDER / document).read_text(), re.M | re.S)
    assert found, document
    return found


async def told_by(command: str, url: str) -> str:
    """Run a command against the gateway at `url`, successfully; return its output."""
    ran = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-c", command.replace(TOLD_URL, url)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
