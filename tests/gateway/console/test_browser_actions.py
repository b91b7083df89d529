"""Actions of the console in a real browser: models, adapters, images. Skipped without Chromium."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from PIL import Image

from nano_inference import Pipeline
from nano_inference.bus.dead_letters import DeadLetter
from nano_inference.config import ModelConfig, load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.models import ModelStatus

from ...rig import load
from ..deployment.deployed import SETTINGS, Deployment, Front
from ..fake import report
from ..served import listening
from .pages import chromium, console, needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.soak(only=True)]
pytest.importorskip("playwright.async_api")


class SlowDeployment(Deployment):
    """A deployment whose loads and unloads wait for `gate`, and are seen meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.bus.requests = self  # type: ignore[attr-defined]

    async def dead_letters(self) -> list[DeadLetter]:
        return []

    async def _slowly(self, model: str, state: str) -> None:
        await self.put(model, state)
        await self.gate.wait()
        self.gate = anyio.Event()

    async def load_model(self, model: str | ModelConfig) -> ModelStatus:
        name = model if isinstance(model, str) else model.id
        await self._slowly(name, "loading")
        return await super().load_model(name)

    async def unload_model(
        self, model: str, *, timeout_s: float | None = None, remove: bool = False
    ) -> ModelStatus:
        await self._slowly(model, "draining")
        return await super().unload_model(model)


@asynccontextmanager
async def front(deployment: Deployment) -> AsyncIterator[str]:
    models = json.dumps([{"id": name, "path": "tiny"} for name in ("small", "cold")])
    config = load_config(env={"NANO_INFERENCE_MODELS": models}, overrides=SETTINGS)
    made = Front(deployment, config)
    await made.seen()
    async with listening(made.server) as port:
        yield f"http://127.0.0.1:{port}"
        made.app.stop()
        for each in list(made.server.connections._all):
            each.transport.abort()
    await made.app.aclose()


async def test_a_model_is_loaded_and_unloaded_with_its_progress() -> None:
    deployment = SlowDeployment()
    await deployment.put("small", default=True)
    await deployment.put("cold", "unloaded")
    deployment.stage_reports = [
        report(stage="executor", model="cold", state="starting", load={"loaded": 0.25})
    ]
    async with (
        chromium() as browser,
        front(deployment) as url,
        console(browser, url) as page,
    ):
        await page.open("operations")
        row = page.page.locator("tr:has(b:text-is('cold'))")
        await row.locator("button:text-is('Load')").click()
        await page.page.wait_for_selector("tr:has(b:text-is('cold')) progress[value='0.25']")
        assert await page.violations() == []
        deployment.gate.set()
        await row.locator("button:text-is('Unload')").click()
        await page.page.locator("dialog[open] button:text-is('Unload')").click()
        await row.locator(".tag:text-is('draining')").wait_for()
        deployment.gate.set()
        await row.locator(".tag:text-is('unloaded')").wait_for()
        assert [what for what, _ in deployment.asked] == ["load", "unload"]
        assert page.said == []


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (48, 48), "red").save(file, "PNG")
    return file.getvalue()


async def test_an_adapter_and_an_image_with_the_bundled_vision_model(tmp_path: Path) -> None:
    """The adapter is loaded, asked with an image from the playground, and unloaded."""
    write_adapter: Any = load("mixed_requests").write_adapter
    write_adapter(tmp_path / "poet")
    config = load_config(env={}, overrides={"engine.model_path": "tiny-vision", "gateway.port": 0})
    async with (
        Pipeline(config) as pipeline,
        Gateway(pipeline.client, config) as gateway,
        chromium() as browser,
        console(browser, gateway.url) as page,
    ):
        await page.open("operations")
        await page.page.click("button:text-is('Load an adapter')")
        dialog = page.page.locator("dialog[open]")
        await dialog.get_by_label("Id, the name").fill("poet")
        await dialog.get_by_label("Folder").fill(str(tmp_path / "poet"))
        await dialog.locator("button:text-is('Load')").click()
        row = page.page.locator("tr:has(b:text-is('poet'))")
        await row.wait_for()
        for model in ("tiny-vision", "poet"):
            await page.open("playground")
            await page.page.get_by_label("Model", exact=True).select_option(model)
            file = {"name": "red.png", "mimeType": "image/png", "buffer": picture()}
            await page.page.locator(".composer input[type=file]").set_input_files(file)  # type: ignore[arg-type]
            await page.page.wait_for_selector(".thumb img")
            await page.send("What colour is it?")
            assert await page.answered()
            shown = await page.page.locator(".message.user img").last.get_attribute("src")
            assert base64.b64decode(str(shown).partition(",")[2]) == picture()
            await page.page.click("header button:has-text('New chat')")
        await page.open("operations")
        await row.locator("button:text-is('Unload')").click()
        await row.wait_for(state="detached")
        assert page.said == []
