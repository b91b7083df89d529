"""The console's page in a browser: first paint, bytes, scripts, long tasks, and scrolling.

python benchmarks/console_page.py [--requests 0,10000] [--repeat 5] [--json FILE]

A gateway runs in this process, with no lane and so many requests in its list. A headless Chromium
opens each view with an empty cache, and the DevTools protocol measures it. Columns, medians of all
repetitions:

- paint: first contentful paint after the navigation's start.
- KB, answers: of all that came over the wire until the view stood still, compressed.
- scripts, tasks: the main thread's time in scripts, and of all its work.
- long: time of tasks beyond 50 ms each (total blocking time).
- DOM: elements of the page.
- frame p50, p95, worst: between frames while the list of requests is scrolled, a page a frame.

`nice` and a busy machine change all times, not bytes and elements: state the load beside them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from console import CHUNKS, END
from harness import options, percentile, print_table, progress, record
from playwright.async_api import Browser, async_playwright

from nano_inference import BusClient, load_config
from nano_inference.bus.memory.bus import MemoryBus
from nano_inference.bus.public import GenerateRequest
from nano_inference.config import BusConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.server.server import HttpServer

VIEWS = ("playground", "pipeline", "requests", "operations")

_OBSERVE = """
window.seen = {paint: 0, long: 0};
new PerformanceObserver(list => { for (const each of list.getEntries())
    if (each.name === "first-contentful-paint") seen.paint = each.startTime; })
    .observe({type: "paint", buffered: true});
new PerformanceObserver(list => { for (const each of list.getEntries())
    seen.long += each.duration - 50; }).observe({type: "longtask", buffered: true});
"""

_SCROLL = """async frames => {
    const list = document.querySelector(".list"), times = [];
    await new Promise(done => {
        let before = 0;
        const step = now => {
            if (before) times.push(now - before);
            before = now;
            list.scrollTop += list.clientHeight;
            times.length < frames ? requestAnimationFrame(step) : done();
        };
        requestAnimationFrame(step);
    });
    return times;
}"""


@asynccontextmanager
async def gateway(requests: int) -> AsyncIterator[str]:
    """Run a gateway with so many requests in its list; yields its address."""
    config = load_config(env={}, overrides={"gateway.message_format": "off"})
    app = make_app(BusClient(MemoryBus(BusConfig())), config)
    log = app.request_log
    assert log is not None
    for number in range(requests):
        asked = GenerateRequest(request_id=f"request-{number:05}", prompt=f"How much is {number}?")
        log.arrived("acme" if number % 3 else "blue-lab", [asked], "tiny")
        log.began(asked.request_id)
        log.output(asked, CHUNKS[0])
        log.output(asked, END)
    server = HttpServer(app, config.gateway)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        app.stop()
        server.should_exit = True
        await task


async def open_view(browser: Browser, url: str, view: str, frames: int) -> dict[str, Any]:
    """Open a view in a new profile, and measure it."""
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(180_000)  # the first view waits for the tokenizer
    await context.add_init_script(_OBSERVE)
    page: Any = await context.new_page()
    devtools = await context.new_cdp_session(page)
    sizes: list[float] = []
    devtools.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    await devtools.send("Network.enable")
    await devtools.send("Performance.enable")
    await page.goto(f"{url}/console/#/{view}")
    await page.wait_for_selector(f"main[data-view='{view}'] > *")
    if view == "requests":
        await page.wait_for_selector(".list-row, .empty:visible")
    await page.wait_for_timeout(1500)
    metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
    times = {each["name"]: each["value"] for each in metrics}
    seen = await page.evaluate("seen")
    found = {
        "paint_ms": seen["paint"],
        "long_ms": seen["long"],
        "kb": sum(sizes) / 1000,
        "answers": len(sizes),
        "scripts_ms": times["ScriptDuration"] * 1000,
        "tasks_ms": times["TaskDuration"] * 1000,
        "elements": await page.evaluate("document.querySelectorAll('*').length"),
    }
    if view == "requests" and await page.locator(".list-row").count():
        gaps = await page.evaluate(_SCROLL, frames)
        found |= {"p50": percentile(gaps, 0.5), "p95": percentile(gaps, 0.95), "worst": max(gaps)}
    await context.close()
    return found


async def measure(numbers: list[int], repeat: int, frames: int, chromium: str) -> dict[str, Any]:
    """Return the medians of each view, by the number of requests."""
    rows: dict[str, Any] = {}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for number in numbers:
            async with gateway(number) as url:
                found: dict[str, list[dict[str, Any]]] = {view: [] for view in VIEWS}
                for turn in range(repeat + 1):
                    for view in VIEWS:
                        one = await open_view(browser, url, view, frames)
                        found[view] += [one] if turn else []  # the first one warms up
                    progress(turn, repeat)
            for view, some in found.items():
                rows[f"{view}, {number}"] = {
                    name: statistics.median(each[name] for each in some) for name in some[0]
                }
        await browser.close()
    return rows


def main() -> None:
    arguments = options(
        __doc__,
        requests=([0, 10_000], "in the list"),
        repeat=(5, "repetitions, after a warm-up"),
        frames=(120, "frames of scrolling"),
        chromium=(shutil.which("chromium") or "chromium", "the browser"),
    ).parse_args()
    work = measure(arguments.requests, arguments.repeat, arguments.frames, arguments.chromium)
    rows = asyncio.run(work)
    columns = {
        "paint ms": "{paint_ms:.0f}",
        "KB": "{kb:.0f}",
        "answers": "{answers:.0f}",
        "scripts ms": "{scripts_ms:.0f}",
        "tasks ms": "{tasks_ms:.0f}",
        "long ms": "{long_ms:.0f}",
        "DOM": "{elements:.0f}",
        "frame p50": "{p50:.1f}",
        "p95": "{p95:.1f}",
        "worst": "{worst:.1f}",
    }
    print_table(columns, rows, "view, requests")
    load, _, _ = os.getloadavg()
    print(f"load average at the end: {load:.1f} on {os.cpu_count()} cores")
    record(arguments, views=rows, load=load)


if __name__ == "__main__":
    main()
