"""The way of a newcomer, timed: clone, `make demo`, `nano-inference serve`, the console.

python benchmarks/newcomer.py [--source .] [--folder DIR] [--chromium /usr/bin/chromium]

Prints the seconds of each leg, the last of which ends when the alternatives of a token can be read.
The environment is new, so packages are installed; a folder with one is used as it is. Needs
Playwright's package and a Chromium.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import cpu_s, descendants, free_port, options, print_table, record, stop

LEGS: dict[str, dict[str, float]] = {}


@contextmanager
def leg(name: str) -> Iterator[None]:
    """Time a leg, and the processor time of programs that it runs to their end."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    LEGS[name] = {"seconds": time.perf_counter() - start, "cpu_s": cpu}
    print(f"{name}: {LEGS[name]['seconds']:.1f} s", file=sys.stderr, flush=True)


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read standard output up to a line with a text. Raises EOFError."""
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise EOFError(f"the server has ended: {process.wait()}")


async def look(url: str, chromium: str) -> str:
    """Open the console, ask, and return the alternatives of a token."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        with leg("the console is open"):
            browser = await playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
            )
            page: Any = await browser.new_page()
            await page.goto(f"{url}/console/")
            await page.wait_for_selector(".composer textarea")
        with leg("a token's alternatives are read"):
            await page.fill(".composer textarea", "How much is 12 + 30?")
            await page.click("button:text-is('Send')")
            await page.wait_for_selector(".message .meta span", timeout=60_000)
            await page.locator(".message.assistant .tokens:visible span").first.hover()
            shown: str = await page.inner_text(".tip")
        await browser.close()
        return shown


def main() -> None:
    arguments = options(
        __doc__,
        source=(".", "the repository"),
        folder=(Path, "where to clone to; default: a temporary folder"),
        chromium=(shutil.which("chromium") or "chromium", "the browser"),
    ).parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)) / "nano-inference"
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VENV")}
        quiet = {"stdout": subprocess.DEVNULL, "env": environment}
        if not (folder / ".venv/.installed").exists():
            with leg("git clone"):
                subprocess.run(["git", "clone", "-q", arguments.source, folder], check=True)
            with leg("make .venv/.installed"):
                make = ["make", ".venv/.installed"]
                subprocess.run(make, cwd=folder, check=True, **quiet)
        with leg("make demo"):
            subprocess.run(["make", "demo"], cwd=folder, check=True, **quiet)
        port = free_port()
        command = [folder / ".venv/bin/nano-inference", "serve", "--port", str(port)]
        with leg("serve is ready"):
            process = subprocess.Popen(
                [*map(str, command)], stdout=subprocess.PIPE, env=environment, cwd=folder, text=True
            )
            wait_for_line(process, "is served at")
        LEGS["serve is ready"]["cpu_s"] = cpu_s(*descendants(process.pid))
        try:
            shown = asyncio.run(look(f"http://127.0.0.1:{port}", arguments.chromium))
        finally:
            stop(process)
    print(shown)
    LEGS["together"] = {"seconds": sum(each["seconds"] for each in LEGS.values())}
    print_table({"seconds": "{seconds:.1f}", "CPU s": "{cpu_s:.1f}"}, LEGS, "leg")
    load, _, _ = os.getloadavg()
    print(f"load average at the end: {load:.1f} on {os.cpu_count()} cores")
    record(arguments, legs=LEGS, load=load)


if __name__ == "__main__":
    main()
