"""The playground in a real browser: files, exports, keys of the keyboard, and long answers.
Skipped where there is no Chromium."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from nano_inference.bus.public import CompletionSample, GenerateRequest, Output, TokenLogprob

from ..fake import chunk, completion, report
from ..sampled import WORDS
from .pages import chromium, console, needs_chromium
from .test_browser import ConsoleEngine, gateway, speaking

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.soak(only=True)]
pytest.importorskip("playwright.async_api")

FRAMES = """() => {
    window.frames_ = [];
    let last = performance.now();
    const frame = () => {
        const now = performance.now();
        frames_.push(now - last);
        last = now;
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
}"""

P95 = """() => frames_.sort((one, other) => one - other)[Math.floor(frames_.length * 0.95)]"""

SMOOTH_MS = 32

MARKDOWN = """## Part

Some **text** with `code`, a [link](https://example.com) and *more*.

- one
- two, with **weight**

| a | b |
|---|--:|
| 1 | 2 |

```python
def add(one, other):
    return one + other  # a sum
```

"""


class PacedEngine(ConsoleEngine):
    """A fake engine that makes some hundreds of tokens a second."""

    async def _made(self, request: GenerateRequest) -> AsyncGenerator[Output, None]:
        number = 0
        async for output in super()._made(request):
            yield output
            number += 1
            if number % 8 == 0:
                await anyio.sleep(0.012)


def long_answer(request: GenerateRequest) -> list[Output]:
    """10,000 tokens of four characters, each with five alternatives."""
    text = (MARKDOWN * 200)[:40_000]
    tops = (TokenLogprob(token_id=5, logprob=-0.5),) * 5
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    chunks: list[Output] = [
        chunk(request, (5,), each, token_offset=at, logprobs=(-0.5,), top_logprobs=(tops,))
        for at, each in enumerate(pieces)
    ]
    sample = CompletionSample(
        sample_index=0, text=text, token_ids=(5,) * len(pieces), finish_reason="length",
        logprobs=(-0.5,) * len(pieces), top_logprobs=(tops,) * len(pieces),
        weight_versions=((3, 0),),
    )  # fmt: skip
    return [*chunks, completion(request, sample)]


async def test_ten_thousand_tokens_of_markdown_stay_smooth() -> None:
    """At the 95th percentile of the times between frames."""
    async with (
        gateway(PacedEngine(long_answer)) as (url, _, _),
        chromium() as browser,
        console(browser, url, viewport={"width": 1280, "height": 800}) as page,
    ):
        await page.open()
        await page.page.evaluate(FRAMES)
        await page.send("Write")
        await page.answered()
        assert await page.page.locator(".md figure.code").count() > 100
        assert await page.page.evaluate(P95) < SMOOTH_MS


async def test_files_exports_and_branches(tmp_path: Path) -> None:
    """A text file becomes a part of the prompt; an exported chat can be imported."""
    engine = ConsoleEngine(speaking("It is **sunny**."))
    async with (
        gateway(engine) as (url, _, _),
        chromium() as browser,
        console(browser, url) as page,
    ):
        tab = page.page
        await page.open()
        file: Any = {"name": "a.md", "mimeType": "", "buffer": b"notes with ``` in them"}
        await tab.set_input_files(".composer input[type=file]", file)
        await tab.wait_for_selector(".thumb:has-text('a.md')")
        await page.send("Read")
        await page.answered()
        prompt = WORDS.text(engine.requests[-1].prompt_token_ids or (), skip_special=False)
        assert "a.md:\n````\nnotes with ``` in them\n````\n\nRead" in prompt
        await tab.click("[aria-label='Branch into a new chat']")
        await tab.wait_for_selector("h1:has-text('(branch)')")
        await tab.locator(".chat-row").first.hover()
        await tab.locator(".chat-row .icon").first.click()
        assert await page.violations() == []
        async with tab.expect_download() as download:
            await tab.click("button:text-is('Export as JSON')")
        await (await download.value).save_as(tmp_path / "chat.json")
        written = json.loads((tmp_path / "chat.json").read_text())
        assert [each["role"] for each in written["messages"]] == ["user", "assistant"]
        await tab.click("button:text-is('As a request')")
        await tab.click("dialog button:text-is('JSON')")
        body = json.loads(await tab.inner_text("dialog pre"))
        assert body["messages"][1] == {"role": "assistant", "content": "It is **sunny**."}
        await tab.click("dialog button:text-is('Close')")
        await tab.set_input_files(".chats input[type=file]", tmp_path / "chat.json")
        await tab.wait_for_selector(".chat-row >> nth=2")
        assert await tab.inner_text(".md strong") == "sunny"
        assert page.said == []


async def test_the_keyboard_sends_stops_begins_anew_and_opens_the_palette() -> None:
    engine = ConsoleEngine(speaking("It is sunny."))
    async with (
        gateway(engine) as (url, _, _),
        chromium() as browser,
        console(browser, url) as page,
    ):
        tab = page.page
        await page.open()
        engine.hold()
        await tab.keyboard.press("/")
        await tab.keyboard.type("Hello")
        await tab.keyboard.press("Enter")
        await tab.wait_for_selector("button:text-is('Stop')")
        await tab.wait_for_selector(".md p")
        await tab.keyboard.press("Escape")
        await tab.wait_for_selector(".meta:has-text('stopped')")
        await engine.until(lambda: bool(engine.left or engine.ended))
        await tab.keyboard.press("Control+Shift+O")
        await tab.wait_for_selector(".starter")
        await tab.keyboard.press("Control+k")
        await tab.keyboard.type("chat: hello")
        await tab.wait_for_selector("dialog.palette [aria-selected=true]:has-text('Chat: Hello')")
        assert await page.violations() == []
        await tab.keyboard.press("Enter")
        await tab.wait_for_selector(".user:has-text('Hello')")
        assert page.said == []


async def test_the_box_opens_by_itself_when_the_model_is_loaded() -> None:
    engine = ConsoleEngine(speaking("It is sunny."))
    engine.stage_reports = [report(stage="executor", state="starting", load={"loaded": 0.45})]
    async with (
        gateway(engine) as (url, _, _),
        chromium() as browser,
        console(browser, url) as page,
    ):
        tab = page.page
        await page.open()
        await tab.wait_for_selector("textarea:disabled[placeholder='tiny is loading, 45 %']")
        assert await page.violations() == []
        engine.stage_reports = [report(stage="executor")]
        await tab.wait_for_selector(".composer textarea:enabled:focus")
        assert page.said == []


async def test_each_chat_has_its_own_draft_and_the_right_side_begins_with_the_left() -> None:
    async with (
        gateway(ConsoleEngine(speaking("It is sunny."))) as (url, _, _),
        chromium() as browser,
        console(browser, url) as page,
    ):
        tab = page.page
        box = tab.get_by_label("Your message")
        await page.open()
        await page.send("- **Hello** `you`")
        await page.answered()
        await tab.get_by_label("Max tokens").fill("5")
        await tab.wait_for_selector(".given:has-text('at most 5 tokens')")
        await box.fill("half a message")
        file: Any = {"name": "a.md", "mimeType": "", "buffer": b"notes"}
        await tab.set_input_files(".composer input[type=file]", file)
        await tab.wait_for_selector(".thumb")
        await tab.click("header button:has-text('New chat')")
        await tab.wait_for_selector(".thumb", state="detached")
        assert await box.input_value() == ""
        await tab.click("button:text-is('Reset')")
        assert await tab.get_by_label("Max tokens").input_value() == ""
        await tab.click(".chat-row button:text-is('Hello you')")
        await tab.wait_for_selector(".thumb")
        assert await box.input_value() == "half a message"
        await tab.click("header button:has-text('Side by side')")
        await tab.wait_for_selector("[aria-label=Right] .md:has-text('It is sunny.')")
        assert await page.violations() == []
        assert page.said == []
