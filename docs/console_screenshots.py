"""Take the screenshots of docs/console/: each view, in both themes, at 1,600 and 375 pixels; with
`--widths` at others, to look at.

It runs a pipeline with the bundled model in this process, sends it requests of several tenants, and
drives a Chromium by Playwright, which the extra `test` brings:

    python docs/console_screenshots.py [--chromium /usr/bin/chromium] [--only pipeline]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

from nano_inference import Pipeline, load_config
from nano_inference.gateway.gateway import Gateway

FOLDER = Path(__file__).parent / "console"
WIDTHS = (1600, 375)

PROMPTS = (
    "How much is 12 + 30?",
    "How much is 9 - 4?",
    "Turn into JSON: Ben is a pilot, 44 years old.",
    "Tell a story about Iris, a parrot and a green hat.",
    "Tell a story about Leo, a fox and a red kite.",
    "What is the weather in Oslo and Paris?",
)
REFUSED: tuple[dict[str, Any], ...] = (
    {"model": "gpt-4o"},
    {"messages": []},
    {"max_tokens": "all"},
    {"temperature": 9},
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY}
TOOLS = json.dumps([{"type": "function", "function": WEATHER}])
TENANTS = ("acme", "blue-lab", "northwind")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument("--only", default="", help="views whose name contains this")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--idle", action="store_true", help="send no requests")
    parser.add_argument("--url", default="", help="a gateway that runs, instead of an own one")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    if options.url:
        await _shoot_all(options.url, options)
        return
    settings = {"gateway.port": 0, "pipeline.replicas": 2, "engine.kv_host_bytes": 8 << 20}
    config = load_config(env={}, overrides=settings)
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        load = None if options.idle else asyncio.create_task(_load(gateway.url))
        await asyncio.sleep(5 if options.idle else 60)
        await _shoot_all(gateway.url, options)
        if load is not None:
            load.cancel()


async def _shoot_all(url: str, options: argparse.Namespace) -> None:
    chromium, only, folder = options.chromium, options.only, options.folder
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in ("light", "dark"):
            for width in options.widths:
                suffix = "" if width == WIDTHS[0] else f"-{width}"
                await _shoot(browser, url, theme, width, folder, f"-{theme}{suffix}", only)
        await browser.close()


async def _load(url: str) -> None:
    """Send requests of several tenants until cancelled."""
    rng = random.Random(1)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one() -> None:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
                "max_tokens": rng.choice((16, 64, 160)),
                "n": rng.choice((1, 1, 2)),
            }
            if rng.random() < 0.04:
                body["budget_ms"] = 40
            if rng.random() < 0.03:
                body |= rng.choice(REFUSED)
            headers = {"X-Tenant": rng.choices(TENANTS, (6, 3, 1))[0]}
            await client.post("/v1/chat/completions", json=body, headers=headers)

        async def worker() -> None:
            while True:
                await one()
                await asyncio.sleep(rng.random())

        await asyncio.gather(*(worker() for _ in range(10)))


async def _shoot(
    browser: Browser, url: str, theme: str, width: int, folder: Path, name: str, only: str
) -> None:
    height = 780 if width < 760 else 950
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = await context.new_page()
    await page.goto(f"{url}/console/")
    await page.wait_for_selector(".composer")
    for view, prepare in VIEWS.items():
        if only in view and (width < 1000 or view not in NARROW):
            await prepare(page, url)
            if view == "pipeline" and width > 1000:  # down to its charts
                await page.set_viewport_size({"width": width, "height": 1200})
                await page.wait_for_timeout(500)
            path = folder / f"{view}{name}.png"
            await page.screenshot(path=path)
            await page.set_viewport_size({"width": width, "height": height})
            _pack(path)
    await context.close()


def _pack(path: Path) -> None:
    """Save an image with 256 colours: the commonest, so that flat areas keep theirs, and those of
    small things, which are unlike them."""
    image = Image.open(path).convert("RGB")
    counts = sorted(image.getcolors(image.width * image.height) or [], reverse=True)
    colors = np.array([color for _, color in counts], int)
    chosen = colors[:192]
    for color in colors[192:]:
        if len(chosen) == 256:
            break
        if np.abs(chosen - color).sum(axis=1).min() > 24:
            chosen = np.vstack([chosen, color])
    palette = Image.new("P", (1, 1))
    palette.putpalette(chosen.flatten().tolist())
    packed = image.quantize(palette=palette, dither=Image.Dither.NONE)
    packed.save(path, optimize=True)


async def _playground(page: Page, url: str) -> None:
    await page.goto(f"{url}/console/#/playground")
    # Hot, so that there are tokens of which the model was not sure.
    temperature = page.get_by_label("Temperature")
    await temperature.evaluate(_FILL, "1.6")
    prompt = "Tell a story about Iris, a parrot and a green hat."
    await page.fill(".composer textarea", prompt)
    await page.click("button:text-is('Send')")
    await page.wait_for_selector(".message .meta span", timeout=60_000)
    await page.click("button:text-is('Tokens')")
    await page.wait_for_timeout(300)
    tokens = page.locator(".text.tokens:visible span[class^='sure']")
    if not await tokens.count():
        tokens = page.locator(".text.tokens:visible span")
    await tokens.nth(min(5, await tokens.count() - 1)).hover()
    await page.wait_for_timeout(200)


async def _side_by_side(page: Page, url: str) -> None:
    """Two sides with a tool, one of them with reasoning."""
    await page.goto(f"{url}/console/#/playground")
    await page.mouse.move(0, 0)
    await page.click("header button:has-text('New chat')")
    await page.click("header button:has-text('Side by side')")
    settings = page.locator(".settings")
    for side, reasoning in (("Left", ""), ("Right", "low")):
        await settings.get_by_role("button", name=side, exact=True, include_hidden=True).evaluate(
            "it => it.click()"
        )
        tools = settings.get_by_label("Functions, as OpenAI's tools")
        await tools.evaluate(_FILL, TOOLS)
        await settings.get_by_label("Temperature").evaluate(_FILL, "0")
        await settings.get_by_label("Reasoning").evaluate(_FILL, reasoning)
    await page.fill(".composer textarea", "What is the weather in Oslo and Paris?")
    await page.click("button:text-is('Send')")
    await page.wait_for_function("() => document.querySelectorAll('.meta > a').length === 2")
    await page.wait_for_timeout(300)


# The settings may be hidden, where the page is narrow.
_FILL = "(it, text) => { it.value = text; it.dispatchEvent(new Event('input')); }"


async def _pipeline(page: Page, url: str) -> None:
    await page.goto(f"{url}/console/#/pipeline")
    await page.wait_for_selector(".flow")
    await page.wait_for_timeout(6000)


async def _requests(page: Page, url: str) -> None:
    await page.goto(f"{url}/console/#/requests")
    await page.wait_for_selector(".list-row, .empty:visible")
    if page.viewport_size and page.viewport_size["width"] > 760:
        await _open(page)
    await page.wait_for_timeout(400)


async def _open(page: Page) -> None:
    """Open a request that is done, if there are some."""
    await page.click(".chips button[data-state='done']")
    await page.wait_for_timeout(300)
    rows = page.locator(".list-row")
    if await rows.count() > 4:
        await rows.nth(4).click()
        await page.wait_for_selector(".detail .fall")


async def _operations(page: Page, url: str) -> None:
    await page.goto(f"{url}/console/#/operations")
    await page.wait_for_selector("table")
    await page.wait_for_timeout(800)


async def _request(page: Page, url: str) -> None:
    """One request, which covers the list where the page is narrow."""
    await _open(page)
    await page.wait_for_timeout(400)


NARROW = ("request",)
"""Views that are shot at 375 pixels alone: a wide page shows them beside another one."""

VIEWS = {
    "playground": _playground,
    "side-by-side": _side_by_side,
    "pipeline": _pipeline,
    "requests": _requests,
    "request": _request,
    "operations": _operations,
}


if __name__ == "__main__":
    asyncio.run(main())
