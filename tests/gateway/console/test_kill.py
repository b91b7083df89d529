"""A gateway is killed before the eyes of somebody who reads an answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import httpx
import pytest

from nano_inference import Pipeline, load_config

from .pages import chromium, console, needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow]
pytest.importorskip("playwright.async_api")

LONG = {"ignore_eos": True, "max_tokens": 1500, "temperature": 1.0}
"""So that the answer is far from its end when the gateway dies."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def started(redis_url: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "nano_inference", "gateway", "--bus", redis_url]
    # However long the next gateway takes to start.
    grace = ["--set", "gateway.resume_grace_s=300"]
    return subprocess.Popen([*command, "--port", str(port), *grace], stderr=subprocess.DEVNULL)


async def text_of(url: str, stream: str) -> str:
    """The whole text of a stream, as the bus has it."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        answer = await http.get(f"/v1/streams/{stream}")
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    return "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )


@pytest.mark.soak(only=True)
async def test_a_stream_survives_the_kill_of_its_gateway(redis_url: str) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    config = load_config(env={}, overrides={"bus.url": redis_url})
    gateway = started(redis_url, port)

    async def longer(route: Any) -> None:
        await route.continue_(post_data=json.dumps(route.request.post_data_json | LONG))

    try:
        async with Pipeline(config), chromium() as browser, console(browser, url) as page:
            page.page.set_default_timeout(300_000)
            await page.page.route("**/v1/chat/completions", longer)
            async with httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(retries=8), base_url=url
            ) as http:
                await http.get("/livez")
            await page.open()
            await page.send("Tell a story about Iris, a parrot and a green hat.")
            shown = "document.querySelectorAll('.assistant .tokens span').length"
            await page.page.wait_for_function(f"() => {shown} > 20")
            os.kill(gateway.pid, signal.SIGKILL)
            gateway.wait()
            await page.page.wait_for_selector("text=Connection lost")
            before = await page.page.evaluate(shown)
            gateway = started(redis_url, port)
            await page.page.wait_for_function(f"() => {shown} > {before} + 20")
            await page.answered()
            answer = page.page.locator(".message.assistant")
            (stream,) = await page.page.evaluate(
                "JSON.parse(sessionStorage['console.chat']).panes[0].turns"
                ".filter(turn => turn.answer).map(turn => turn.answer.stream)"
            )
            assert "resumed" in await answer.locator(".meta").inner_text()
            text = await answer.locator(".tokens:visible").last.text_content()
            assert text == await text_of(url, stream), "nothing lost, nothing twice"
    finally:
        gateway.kill()
        gateway.wait()
