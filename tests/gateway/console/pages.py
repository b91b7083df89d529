"""A headless Chromium, and the console in it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("NANO_INFERENCE_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium here: apt-get install chromium"
)

AXE = Path(__file__).parent / "axe" / "axe.min.js"

RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")

_VIOLATIONS = """rules => axe.run(document, {runOnly: rules}).then(found =>
    found.violations.map(each => [each.id, ...each.nodes.map(node => node.html.slice(0, 200))]))"""


class ConsolePage:
    """The console in a tab.

    Attributes:
        page: Playwright's page.
        said: What the browser's console has had, errors of the page included.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))

    async def open(self, view: str = "playground") -> None:
        await self.page.goto(f"{self.url}/console/#/{view}")
        name = re.split("[/?]", view)[0]
        await self.page.wait_for_selector(f"main[data-view='{name}'] > *")

    async def send(self, text: str) -> None:
        await self.page.fill(".composer textarea", text)
        await self.page.click("button:text-is('Send')")

    async def answered(self, number: int = 1) -> str:
        """Wait until so many answers are complete; return the last one."""
        await self.page.wait_for_function(
            "n => document.querySelectorAll('.message .meta span').length && "
            "document.querySelectorAll('[aria-busy=false]').length >= n",
            arg=number,
        )
        text: str = await self.page.locator(".message.assistant .text:visible").last.inner_text()
        return text

    async def violations(self) -> list[Any]:
        """Return what axe-core finds wrong."""
        await self.page.evaluate(AXE.read_text())
        found: list[Any] = await self.page.evaluate(_VIOLATIONS, RULES)
        return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Run a browser while the context is open."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def console(browser: Any, url: str, **options: Any) -> AsyncIterator[ConsolePage]:
    """Open a tab with storage of its own."""
    context = await browser.new_context(**options)
    context.set_default_timeout(60_000)
    try:
        yield ConsolePage(await context.new_page(), url)
    finally:
        await context.close()
