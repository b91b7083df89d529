"""The console in a real browser: each view silent and accessible, no text becomes HTML, streams
survive. Skipped where there is no Chromium."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from nano_inference.bus.dead_letters import DeadLetter
from nano_inference.bus.public import (
    CompletionSample,
    ErrorInfo,
    GenerateRequest,
    Output,
    TokenLogprob,
)
from nano_inference.config import load_config
from nano_inference.gateway.app import GatewayApp, make_app
from nano_inference.gateway.console.history import Point
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.server.server import HttpServer
from nano_inference.pipeline.models import ModelStatus
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...soaking import in_soak
from ..fake import FakeEngine, chunk, completion, report
from ..sampled import WORDS
from ..served import listening
from .attacks import ATTACKS
from .pages import ConsolePage, chromium, console, needs_chromium

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
pytest.importorskip("playwright.async_api")

EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}\'"`'

WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

# Wait until the first answer has something, as the browser's database has it.
HAS = """async name => {
    const has = () => new Promise(resolve => {
        const opening = indexedDB.open("console");
        opening.onsuccess = () => {
            const reading = opening.result.transaction("conversations");
            const all = reading.objectStore("conversations").getAll();
            all.onsuccess = () => {
                opening.result.close();
                resolve(all.result[0]?.panes[0].root.children[0]?.children[0]?.answer[name]);
            };
        };
    });
    for (let tries = 0; tries < 600; tries++) {
        if (await has()) return true;
        await new Promise(resolve => setTimeout(resolve, 50));
    }
    return false;
}"""

# The elements, attributes and links of each attack, whole, and growing by a few characters.
DRAWN = """async attacks => {
    const { Markdown } = await import(new URL("static/markdown.js", document.baseURI));
    const found = { elements: new Set(), attributes: new Set(), links: new Set(), violations: 0 };
    document.addEventListener("securitypolicyviolation", () => { found.violations += 1; });
    for (const attack of attacks) {
        for (const step of [attack.length, 7]) {
            const markdown = new Markdown("Answer");
            document.body.append(markdown.element);
            for (let end = step; end < attack.length + step; end += step)
                markdown.update(attack.slice(0, end), true);
            markdown.update(attack, false);
            for (const each of markdown.element.querySelectorAll("*")) {
                found.elements.add(each.localName);
                for (const name of each.getAttributeNames()) found.attributes.add(name);
                if (each.href) found.links.add(each.protocol);
                each.dispatchEvent(new MouseEvent("mouseover"));
                each.dispatchEvent(new Event("focus"));
            }
        }
    }
    await new Promise(resolve => setTimeout(resolve, 100));
    const { elements, attributes, links, violations } = found;
    return { elements: [...elements], attributes: [...attributes], links: [...links], violations };
}"""

ELEMENTS = set(
    re.findall(
        r"\w+",
        "a blockquote br button code div em figcaption figure h3 h4 h5 h6 hr li ol p pre s span "
        "strong table tbody td th thead tr ul math mfrac mi mn mo mover mrow mspace msqrt mroot "
        "msub msubsup msup mtable mtd mtext mtr munder munderover",
    )
)

ATTRIBUTES = set(
    re.findall(
        r"[\w-]+",
        "aria-label class href rel role tabindex target title type accent display linethickness "
        "lspace mathvariant maxsize minsize movablelimits rspace stretchy width",
    )
)

# Formulas, and the elements with the texts of each as "name(children)".
FORMULAS = {
    r"$\frac{a}{2}$": "mfrac(mrow(mi(a))mrow(mn(2)))",
    r"$x_i^2$": "msubsup(mi(x)mi(i)mn(2))",
    r"$f'$": "msup(mi(f)mrow(mo(\u2032)))",
    r"$$\sum_{i=1}^n i$$": "munderover(mo(∑)mrow(mi(i)mo(=)mn(1))mi(n))mi(i)",
    r"$\sum_i$": "msub(mo(∑)mi(i))",
    r"\(\sqrt[3]{x}\)": "mroot(mrow(mi(x))mrow(mn(3)))",
    r"$\left(x\right]$": "mrow(mo(()mrow(mi(x))mo(]))",
    r"$\text{if } \mathbb{R}$": "mtext(if\u00a0)mi(\u211d)",
    r"$\begin{pmatrix}a&b\\c\\\end{pmatrix}$": "mrow(mo(()mtable(mtr(mtd(mrow(mi(a)))"
    "mtd(mrow(mi(b))))"
    "mtr(mtd(mrow(mi(c)))))mo()))",
    r"$a < b$": "mi(a)mo(<)mi(b)",
    # An argument without braces is one token.
    r"$\frac12$": "mfrac(mn(1)mn(2))",
    r"$\dfrac12 \binom{n}k$": "mfrac(mn(1)mn(2))mrow(mo(()mfrac(mrow(mi(n))mi(k))mo()))",
    r"$\sqrt23x_1.5$": "msqrt(mn(2))mn(3)msub(mi(x)mn(1))mo(.)mn(5)",
    r"$x^12$": "msup(mi(x)mn(1))mn(2)",
    r"$\mathbf{v}$": "mrow(mrow(mi(v)))",
}

# Shown as they are written: unknown, incomplete, or too deep.
WRITTEN = (
    r"$\unknown{x}$", r"$\frac{1}$", "$x^$", r"$\left( x$", r"$\begin{pmatrix}a$", "$x}$",
    r"$\href{a}{b}$",
    f"${'{' * 90}x{'}' * 90}$",
)  # fmt: skip

SHAPES = """async formulas => {
    const { formulaOf } = await import(new URL("static/formula.js", document.baseURI));
    const shape = each => each.nodeType === Node.TEXT_NODE ? each.data
        : `${each.localName}(${[...each.childNodes].map(shape).join("")})`;
    return formulas.map(each => {
        const found = formulaOf(each);
        return found && [...found.firstChild.childNodes].map(shape).join("");
    });
}"""

# Whether the modules of the other views have come, though none of these was opened.
LOADED = """() => ["chart", "filter", "operations", "pipeline", "remedies", "waterfall"].every(
    name => performance.getEntriesByName(new URL(`static/${name}.js`, document.baseURI)).length)"""

BLOCKS = """async () => {
    const { Markdown } = await import(new URL("static/markdown.js", document.baseURI));
    const markdown = new Markdown("Answer");
    const { element } = markdown;
    markdown.update("$5, $10\\n\\n$$\\nx_1\\n- y_1\\n= z*2*\\n$$\\n\\n- $a_1 * b_1$ *c*", false);
    const found = ["math", "li", "em", "h3"].map(each => element.querySelectorAll(each).length);
    document.body.append(element);
    markdown.update("$10^23$ or $5 a=b, $7\\n\\nSo[^1].\\n\\n[^1]: A *book*\\n\\n"
        + "- [x] $\\\\mathbf{v}$", false);
    const styles = [getComputedStyle(element.querySelector("li")).listStyleType,
        getComputedStyle(element.querySelector(".bold mi")).textTransform];
    return [found, styles, [...element.children].map(each => each.textContent)];
}"""

# The controls that two toasts cover.
COVERED = """async () => {
    const { toast } = await import(new URL("static/dom.js", document.baseURI));
    for (const each of ["Copied", "Copied", "long ".repeat(30), "Copied"]) toast(each);
    const all = [...document.querySelectorAll(".toast")];
    const rect = each => each.getBoundingClientRect();
    const meets = (one, other) => one.left < other.right && other.left < one.right
        && one.top < other.bottom && other.top < one.bottom;
    return [all.length, ...[...document.querySelectorAll("button, a, input, select, textarea")]
        .filter(each => each.checkVisibility() && all.some(one => meets(rect(one), rect(each))))
        .map(each => each.textContent || each.outerHTML)];
}"""

REFUSED = """async files => {
    const { readFile } = await import(new URL("static/files.js", document.baseURI));
    return Promise.all(files.map(async ([name, type]) =>
        (await readFile(new File([new Uint8Array([255, 0])], name, { type }), false)).problem));
}"""

STAGES = {
    "admission": {"in_flight": 3},
    "fairness": {"queued": 1, "credits": 4, "received": "admission=5"},
    "batching": {"running": 2, "kv_free": 3, "kv_total": 9, "kv_cached": 2, "inbox": 1},
    "executor": {"weight_version": 4, "max_batch_size": 8, "steps": 7, "device": "cpu"},
    "streaming": {"tokens_per_s": 12, "ttft_ms_p50": 8.5, "ttft_ms_p95": 20},
}


def speaking(text: str) -> Any:
    """Answers every request with a text, a chunk a token, with logprobs."""

    def outputs(request: GenerateRequest) -> list[Output]:
        tokens = WORDS.token_ids(text, add_special=False)
        tops = tuple((TokenLogprob(token_id=each, logprob=-0.5),) for each in tokens)
        detokenizer = WORDS.detokenizer(skip_special=True)
        chunks: list[Output] = [
            chunk(
                request, (each,), detokenizer.push((each,)), token_offset=place,
                logprobs=(-0.5,), top_logprobs=(tops[place],),
            )
            for place, each in enumerate(tokens)
        ]  # fmt: skip
        sample = CompletionSample(
            sample_index=0, text=text, token_ids=tokens, logprobs=(-0.5,) * len(tokens),
            finish_reason="length", weight_versions=((3, 0), (4, 2)), top_logprobs=tops,
        )  # fmt: skip
        return [*(chunks if request.stream else ()), completion(request, sample)]

    return outputs


@asynccontextmanager
async def gateway(
    engine: FakeEngine, **settings: Any
) -> AsyncIterator[tuple[str, GatewayApp, HttpServer]]:
    config = load_config(env={}, overrides={"gateway.message_format": "off"} | settings)
    app = make_app(engine, config)  # type: ignore[arg-type]
    server = HttpServer(app, config.gateway, on_call=app.on_call)
    async with listening(server) as port:
        yield f"http://127.0.0.1:{port}", app, server
        app.stop()
        for each in list(server.connections._all):
            each.transport.abort()
    await app.aclose()


class Queue:
    """A requests queue that has a dead letter."""

    async def dead_letters(self) -> list[DeadLetter]:
        return [
            DeadLetter(
                letter_id="1-0", entry_id="1-0", deaths=3, died_ns=10**18,
                request=GenerateRequest(request_id=EVIL, prompt=EVIL, tenant=EVIL),
                error=ErrorInfo(code="lane_failed", message=EVIL),
            )
        ]  # fmt: skip


class ConsoleEngine(FakeEngine):
    """A fake engine with a model and a dead letter."""

    async def models(self) -> list[ModelStatus]:
        return [ModelStatus(id="tiny", path=EVIL, state="ready", reason=EVIL)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    """One for all tests, each of which has tabs and storage of its own."""
    async with chromium() as running:
        yield running


@pytest.fixture
def engine() -> FakeEngine:
    engine = ConsoleEngine(speaking("It is sunny, 12 degrees."))
    engine.bus.requests = Queue()  # type: ignore[attr-defined]
    engine.stage_reports = [report(stage=name, load=load) for name, load in STAGES.items()]
    return engine


async def through_all_views(page: ConsolePage) -> None:
    """Look at each view, with a request opened, and check it."""
    for view in ("playground", "pipeline", "requests", "operations"):
        await page.open(view)
        if view == "requests":
            await page.page.click("text=Filters")
            await page.page.locator(".list-row").first.click()
            await page.page.wait_for_selector(".detail .banner")
        if view == "pipeline":
            await page.page.wait_for_selector(".flow .stage")
        if view == "operations":
            await page.page.wait_for_selector(".tag")
        assert await page.violations() == [], view
        assert await page.page.evaluate(WIDER) == 0, f"{view} scrolls sideways"


@pytest.mark.parametrize(("scheme", "width"), [in_soak("light", 1600), ("dark", 375)])
async def test_each_view_is_accessible_and_silent(
    browser: Any, engine: FakeEngine, scheme: str, width: int
) -> None:
    size = {"width": width, "height": 900}
    async with (
        gateway(engine) as (url, _, _),
        console(browser, url, color_scheme=scheme, viewport=size) as page,
    ):
        await page.open()
        await page.send("How is the weather?")
        assert await page.answered() == "It is sunny, 12 degrees."
        async with httpx.AsyncClient(base_url=url) as http:
            await http.post("/v1/completions", json={"prompt": 3})
        await through_all_views(page)
        assert page.said == []


async def test_a_tokens_alternatives_are_shown_by_pointer_and_by_keys(
    browser: Any, engine: FakeEngine
) -> None:
    async with gateway(engine) as (url, _, _), console(browser, url) as page:
        await page.open()
        await page.send("Hello")
        await page.answered()
        await page.page.click("button:text-is('Tokens')")
        text = page.page.locator(".message.assistant .tokens:visible").last
        await text.locator("span").first.hover()
        assert "logprob -0.500" in await page.page.inner_text(".tip")
        await page.page.mouse.move(0, 0)
        await text.focus()
        await page.page.keyboard.press("ArrowRight")
        await page.page.wait_for_selector(".tip:visible")
        assert await text.locator(".here").count() == 1


@pytest.mark.soak(only=True)
async def test_no_text_becomes_html(browser: Any, engine: FakeEngine) -> None:
    """The text of a prompt, an answer, a tenant, a model, an adapter, or an error. (Every day
    test_files.py shows that no script makes HTML of text.)
    """
    engine.outputs = speaking(EVIL)
    adapter = LoadedAdapter(EVIL, 1, EVIL)
    engine.stage_reports = [
        report(stage="admission", lane=EVIL, adapters=(adapter,)),
        *(
            report(stage=name, lane=EVIL, host=EVIL, load=load | {"held": EVIL, "device": EVIL})
            for name, load in STAGES.items()
            if name != "admission"
        ),
    ]  # fmt: skip
    async with (
        gateway(engine) as (url, app, _),
        console(browser, url, extra_http_headers={"X-Tenant": EVIL[:128]}) as page,
    ):
        await page.open()
        await page.send(EVIL)
        await page.answered()
        log = app.request_log
        assert log is not None
        log.arrived(EVIL, [GenerateRequest(request_id=EVIL, model=EVIL, prompt=EVIL)], "tiny")
        log.left([EVIL], "lane_failed", EVIL)
        for view in ("playground", "pipeline", "requests", "operations", "requests/%3Cimg%3E"):
            await page.open(view)
            await page.page.wait_for_timeout(200)
            if view == "requests":
                for row in range(2):
                    await page.page.locator(".list-row").nth(row).click()
                    await page.page.wait_for_selector(".detail .fall")
            assert await page.page.evaluate("window.hacked") is None, view
            assert await page.page.locator("main img, main script, main iframe").count() == 0, view
        assert [each for each in page.said if "404" not in each] == []


async def test_none_of_sixty_attacks_in_markdown_runs(browser: Any, engine: FakeEngine) -> None:
    """Nor loads a file, leads elsewhere than to the web, or violates the policy."""
    assert len(set(ATTACKS)) == 60
    async with gateway(engine) as (url, _, _), console(browser, url) as page:
        asked: list[str] = []
        await page.open()
        page.page.on("request", lambda request: asked.append(request.url))
        found = await page.page.evaluate(DRAWN, ATTACKS)
        assert set(found["elements"]) <= ELEMENTS
        assert set(found["attributes"]) <= ATTRIBUTES
        assert set(found["links"]) <= {"https:", "http:", "mailto:"}
        assert found["violations"] == 0
        assert await page.page.evaluate("window.hacked") is None
        assert await page.page.locator("main img, main script, main iframe").count() == 0
        assert [each for each in asked if not each.startswith(url)] == []
        assert page.said == []


async def test_formulas_are_mathml_or_stay_as_they_are_written(
    browser: Any, engine: FakeEngine
) -> None:
    async with gateway(engine) as (url, _, _), console(browser, url) as page:
        await page.open()
        found = await page.page.evaluate(SHAPES, [*FORMULAS, *WRITTEN])
        assert dict(zip(FORMULAS, found, strict=False)) == FORMULAS
        assert found[len(FORMULAS) :] == [None] * len(WRITTEN)
        counts, styles, texts = await page.page.evaluate(BLOCKS)
        assert counts == [2, 1, 1, 0]
        assert styles == ["none", "none"], "a task has no bullet; a bold letter is upright"
        assert texts == ["1023 or $5 a=b, $7", "So[^1].", "[^1]: A book", "☑ v"]


@pytest.mark.parametrize("width", [in_soak(1280), 375])
async def test_toasts_cover_no_control_and_a_refused_file_says_what_to_do(
    browser: Any, engine: FakeEngine, width: int
) -> None:
    size = {"width": width, "height": 800}
    async with gateway(engine) as (url, _, _), console(browser, url, viewport=size) as page:
        await page.open()
        await page.page.wait_for_selector(".example")
        assert await page.page.evaluate(COVERED) == [2]
        files = [["a.pdf", "application/pdf"], ["a.png", "image/png"]]
        pdf, png = await page.page.evaluate(REFUSED, files)
        assert "copy its text" in pdf
        assert "serve --model tiny-vision" in png


async def test_a_view_stays_chosen_while_another_one_writes_the_address(
    browser: Any, engine: FakeEngine
) -> None:
    async with gateway(engine) as (url, _, _), console(browser, url) as page:
        await page.open()
        await page.send("Hello")
        await page.answered()
        await page.open("requests")
        await page.page.locator(".list-row").first.click()
        await page.page.wait_for_selector(".detail .fall")
        await page.page.evaluate("""() => {
            location.hash = "#/operations";
            document.querySelector(".detail").dispatchEvent(
                new KeyboardEvent("keydown", { key: "Escape" }));
        }""")
        await page.page.wait_for_selector("main[data-view=operations] > *")


async def test_a_view_opens_and_a_message_waits_while_the_gateway_is_away(
    browser: Any, engine: FakeEngine
) -> None:
    async with gateway(engine) as (url, _, server), console(browser, url) as page:
        await page.open()
        await page.page.wait_for_function(LOADED)
        await page.page.context.set_offline(True)
        for each in list(server.connections._all):
            each.transport.abort()
        for view in ("pipeline", "requests", "operations", "playground"):
            await page.page.evaluate(f"location.hash = '#/{view}'")
            await page.page.wait_for_selector(f"main[data-view='{view}'] > *")
            assert await page.page.locator("text=This view failed").count() == 0
            assert await page.page.locator("text=can't be reached").count() == 0
        await page.send("Hello")
        await page.page.wait_for_selector(".notice:has-text('sent as soon as it is back')")
        await page.page.context.set_offline(False)
        assert await page.answered() == "It is sunny, 12 degrees."
        assert await page.page.locator(".meta:has-text('resumed')").count() == 0


async def test_a_turn_is_regenerated_edited_and_left_out_if_it_failed(
    browser: Any, engine: FakeEngine
) -> None:
    """Each version stays beside the others; an error of a setting stands at its field."""

    def prompt() -> str:
        return WORDS.text(engine.requests[-1].prompt_token_ids or (), skip_special=False)

    async with gateway(engine) as (url, _, _), console(browser, url) as page:
        tab = page.page
        await page.open()
        await page.send("First")
        await page.answered()
        engine.outputs = speaking("Rain.")
        await tab.click("[aria-label=Regenerate]")
        await tab.wait_for_selector(".assistant .versions:has-text('2/2')")
        assert await page.answered() == "Rain."
        await tab.click("[aria-label='Edit and send again']")
        await tab.fill(".editing textarea", "Second")
        await tab.keyboard.press("Enter")
        await tab.wait_for_selector(".user .versions:has-text('2/2')")
        assert await page.answered() == "Rain."
        assert "Second" in prompt()
        assert "First" not in prompt()
        await page.send("word " * 3000)
        await tab.wait_for_selector(".notice.bad:has-text('left out of the next call')")
        await page.send("Third")
        await page.answered(3)
        assert "Rain." in prompt()
        assert "word" not in prompt()
        await tab.click("header button:has-text('New chat')")
        await tab.get_by_label("Answer as").select_option("json_schema")
        schema = tab.get_by_label("JSON schema")
        assert '"type": "object"' in await schema.input_value(), "the example is a value"
        await schema.fill("{no")
        await tab.get_by_label("Max tokens").fill("abc")
        await page.send("Fourth")
        for name in ("schema", "max_tokens"):
            await tab.wait_for_selector(f".field:has([data-setting={name}]) .error")
        assert await tab.inner_text(".given") == ""
        await tab.fill("[aria-label='Search chats']", "third")
        await tab.click(".chat-row button:has-text('Second')")
        await tab.wait_for_selector(".user:has-text('Third')")
        await tab.reload()
        await tab.wait_for_selector(".user:has-text('Third')")
        assert [each for each in page.said if "400" not in each] == []


async def test_an_answer_goes_on_after_a_lost_connection_and_a_reload(
    browser: Any, engine: FakeEngine
) -> None:
    async with (
        gateway(engine) as (url, _, server),
        console(browser, url) as page,
    ):
        await page.open()
        engine.hold()
        await page.send("Hello")
        # Before that, a browser sends a call again by itself, which the key makes harmless.
        assert await page.page.evaluate(HAS, "stream")
        for each in list(server.connections._all):
            each.transport.abort()
        assert await page.page.evaluate(HAS, "resumed")
        await page.page.reload()
        await page.page.wait_for_selector(".message.assistant")
        engine.go()
        assert await page.answered() == "It is sunny, 12 degrees."
        assert len(engine.requests) == 1, "it ran once"


# A restarted server has no stream that its memory had.
FORGETS = """const fetched = window.fetch;
window.fetch = (url, options) => String(url).includes("v1/streams/")
    ? Promise.resolve(new Response('{"error": {"code": "stream_not_found", "message": "no"}}',
        { status: 404 }))
    : fetched(url, options);"""


@pytest.mark.soak(only=True)
async def test_an_answer_that_a_restarted_server_has_lost_says_so(
    browser: Any, engine: FakeEngine
) -> None:
    async with (
        gateway(engine) as (url, _, server),
        console(browser, url) as page,
    ):
        await page.page.add_init_script(FORGETS)
        await page.open()
        engine.hold()
        await page.send("Hello")
        assert await page.page.evaluate(HAS, "stream")
        for each in list(server.connections._all):
            each.transport.abort()
        await page.page.wait_for_selector(".notice.bad:has-text('The server was restarted')")
        assert await page.page.locator(".meta:has-text('resumed')").count() == 0
        engine.go()


FITS = """async searches => {
    const { matcher } = await import("./static/filter.js");
    const request = {state: "error", tenant: "acme", model: "tiny", id: "r", name: "r",
        finish: "length", code: "expired", status: 0, cause: "own_decode", prompt: "a: b",
        answer: "", message: "", client: "", completion_tokens: 120,
        prompt_tokens: 4, cached_tokens: 0, samples: 1,
        arrived_ns: 1e9, began_ns: 0, first_ns: 1.2e9, ended_ns: 3e9, words: "acme a: b"};
    return searches.map(search => { const { test, problem } = matcher(search);
        return problem ? problem.split(/[,.:]/)[0] : test(request); });
}"""


async def test_filters_are_fields_and_numbers_and_an_unknown_one_says_so(
    browser: Any, engine: FakeEngine
) -> None:
    fit = ("state:failed finish:length", "tokens>100", "tokens<=120 in=4", "time>1s first<300ms",
           "code:exp cause:decode -tenant:blue", '"a: b" acme', "")  # fmt: skip
    unfit = ("state:done", "tokens>120", "wait>0", "-state:failed", "zebra", "first>1s tokens>1")
    wrong = {
        "stat:failed": "There is no filter “stat”",
        "state:lost": "There is no state “lost”",
        "tokens>many": "tokens takes a number",
        "time>2km": "time takes a number with a unit",
        "model>3": "model is a text",
    }
    async with gateway(engine) as (url, _, _), console(browser, url) as page:
        await page.open("requests?q=stat%3Afailed")
        await page.page.wait_for_selector(".empty:has-text('There is no filter “stat”')")
        assert await page.violations() == []
        await page.page.fill("input[type=search]", "state:failed")
        await page.page.wait_for_selector("button[data-state=failed][aria-pressed=true]")
        found = await page.page.evaluate(FITS, [*fit, *unfit, *wrong])
    assert found == [True] * len(fit) + [False] * len(unfit) + list(wrong.values())


async def test_charts_have_what_was_before_the_page_and_gaps(
    browser: Any, engine: FakeEngine
) -> None:
    async with gateway(engine) as (url, app, _), console(browser, url) as page:
        assert app.feed is not None
        now = int(time.time()) * 1000
        for age in (*range(300, 200, -1), *range(100, 0, -1)):
            app.feed.history.add(Point(now - age * 1000, 700 + age, 1, 0, 1, 5, 9, 3))
        await page.open("pipeline")
        chart = page.page.locator(".chart").first
        await page.page.wait_for_selector(".chart[aria-label*='at most 1,000']")
        label = await chart.get_attribute("aria-label")
        points = await page.page.evaluate(
            """async () => { const { feed } = await import("./static/feed.js");
            return feed.during(10).points.filter(each => each.length === 1).length; }"""
        )
    assert label is not None
    assert label.startswith("Tokens per second, ")
    assert points == 1, "one gap"


@pytest.mark.soak(only=True)
async def test_ten_thousand_requests_are_a_few_dozen_elements(
    browser: Any, engine: FakeEngine
) -> None:
    async with (
        gateway(engine) as (url, app, _),
        console(browser, url) as page,
    ):
        log = app.request_log
        assert log is not None
        for number in range(10_000):
            asked = GenerateRequest(request_id=f"r{number:05}", prompt=f"prompt {number:05}")
            log.arrived("acme" if number % 2 else "blue", [asked], "tiny")
            log.output(asked, completion(asked))
        await page.open("requests")
        await page.page.wait_for_selector("text='10,000 requests'")
        rows = page.page.locator(".list-row")
        assert "prompt 09999" in await rows.first.inner_text()
        assert await rows.count() < 60
        await page.page.focus(".list")
        await page.page.keyboard.press("End")
        await page.page.wait_for_selector(".list-row:has-text('prompt 00000')")
        assert await rows.count() < 60
        await page.page.fill("input[type=search]", "tenant:acme r07")
        await page.page.wait_for_selector("text='500 of 10,000'")


async def test_with_keys_the_page_requires_one_and_sends_it_as_a_header(
    browser: Any, engine: FakeEngine
) -> None:
    async with (
        gateway(engine, **{"policy.backend": "bus"}) as (url, app, _),
        console(browser, url) as page,
    ):
        made = await Administration(app.policy.store).create_key({"name": "a", "scopes": ["read"]})
        addresses: list[str] = []
        page.page.on("request", lambda request: addresses.append(request.url))
        await page.page.goto(f"{url}/console/#/pipeline")
        await page.page.fill("#key-input", "nk-wrong")
        await page.page.keyboard.press("Enter")
        await page.page.wait_for_selector("#key-error:not(:empty)")
        await page.page.fill("#key-input", made["key"])
        await page.page.keyboard.press("Enter")
        await page.page.wait_for_selector(".flow .stage")
        assert not [each for each in addresses if made["key"] in each]
        assert made["key"] not in await page.page.evaluate("JSON.stringify({...localStorage})")
        await page.open("operations")
        assert await page.page.locator("text=New key").count() == 0, "that takes the scope admin"


@pytest.mark.soak(only=True)
async def test_an_administrator_makes_a_key_that_is_shown_once(
    browser: Any, engine: FakeEngine
) -> None:
    async with (
        gateway(engine, **{"policy.backend": "bus"}) as (url, app, _),
        console(browser, url) as page,
    ):
        administration = Administration(app.policy.store)
        root = await administration.create_key({"name": "root", "scopes": ["admin"]})
        await page.page.goto(f"{url}/console/#/operations")
        await page.page.fill("#key-input", root["key"])
        await page.page.keyboard.press("Enter")
        await page.page.click("button:text-is('New key')")
        await page.page.get_by_label("Name", exact=True).fill(EVIL[:100])
        await page.page.get_by_label("Calls at once").fill("3")
        await page.page.click("button:text-is('Create')")
        shown = await page.page.inner_text("dialog[open] pre")
        assert await page.violations() == []
        await page.page.click("button:text-is('Close')")
        await page.page.wait_for_selector("td:has-text('3 at once')")
        keys = {each["name"]: each for each in await administration.keys()}
        assert keys[EVIL[:100]]["limits"]["max_in_flight"] == 3
        assert shown not in await page.page.inner_text("main")
