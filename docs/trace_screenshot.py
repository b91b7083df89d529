"""Take docs/images/trace-phoenix.png: a chat's trace in Phoenix, by a Chromium.

It starts Phoenix (`pip install arize-phoenix`) and the server with the bundled model, sends a chat
with a trace id of its own, and waits until Phoenix shows the trace:

    python docs/trace_screenshot.py [--phoenix phoenix] [--chromium /usr/bin/chromium]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
from PIL import Image
from playwright.async_api import async_playwright

PICTURE = Path(__file__).parent / "images" / "trace-phoenix.png"
PHOENIX, GRPC, SERVER = 26006, 24317, 28000
TRACE = "5ca1ab1e" * 4
LIMIT_S = 120


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--phoenix", default=shutil.which("phoenix") or "phoenix")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    options = parser.parse_args()
    viewer = f"http://127.0.0.1:{PHOENIX}"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        own = {
            "PHOENIX_WORKING_DIR": folder,
            "PHOENIX_HOST": "127.0.0.1",
            "PHOENIX_PORT": str(PHOENIX),
            "PHOENIX_GRPC_PORT": str(GRPC),
            "PHOENIX_TELEMETRY_ENABLED": "false",
        }
        serve = [sys.executable, "-m", "nano_inference", "serve", "--port", str(SERVER)]
        for command, env in (
            ([options.phoenix, "serve"], own),
            ([*serve, "--set", f"telemetry.otlp_endpoint={viewer}"], {}),
        ):
            process = subprocess.Popen(  # noqa: ASYNC220  (before anything else runs)
                command, env={**os.environ, **env}, stdout=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        await chat(viewer)
        await shoot(viewer, options.chromium)


async def chat(viewer: str) -> None:
    """Wait for both servers, and send one chat."""
    async with asyncio.timeout(LIMIT_S), httpx.AsyncClient() as http:
        for url in (f"{viewer}/healthz", f"http://127.0.0.1:{SERVER}/health"):
            while True:
                try:
                    (await http.get(url)).raise_for_status()
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.5)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How much is 12 + 30?"}],
            "stream": True,
            "temperature": 0,
        }
        url = f"http://127.0.0.1:{SERVER}/v1/chat/completions"
        # The first call waits until the gateway has the tokenizer.
        for headers in ({}, {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}):
            (await http.post(url, json=body, headers=headers)).raise_for_status()


async def shoot(viewer: str, chromium: str) -> None:
    """Open the trace, and take its picture once all spans are there."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport={"width": 1500, "height": 820})
        stored = {
            "arize-phoenix-theme": "light",
            # Halves: the tree has room for times.
            "react-resizable-panels:trace-details-layout": '{"trace-tree":45,"span-details":55}',
        }
        for key, value in stored.items():
            await page.add_init_script(f"localStorage.setItem({key!r}, {value!r})")
        async with asyncio.timeout(LIMIT_S):
            while True:
                await page.goto(f"{viewer}/redirects/traces/{TRACE}")
                await page.wait_for_timeout(4000)
                if await page.get_by_text("streaming", exact=True).count():
                    break
        await page.get_by_role("tab", name="Attributes").click()
        await page.wait_for_timeout(1000)
        await page.screenshot(path=PICTURE, clip={"x": 376, "y": 47, "width": 1124, "height": 773})
        await browser.close()
    colours = Image.open(PICTURE).convert("RGB").quantize(128)
    colours.save(PICTURE, optimize=True)


if __name__ == "__main__":
    asyncio.run(main())
