"""The console's files: strict headers, nothing from elsewhere, small, cached."""

from __future__ import annotations

import gzip
import json
import re
import runpy
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nano_inference.gateway.console.files import INDEX, POLICY, read_files

from ..fake import Client, FakeEngine, app_of, http_of

STATIC = Path(__file__).parents[3] / "gateway" / "console" / "static"
LIBRARIES = ("uPlot", "markdown-it")
OWN = [each for each in STATIC.glob("*.js") if not each.name.startswith(LIBRARIES)]

MOST_BYTES = 400_000


@pytest.fixture
async def http(engine: FakeEngine) -> AsyncIterator[Client]:
    # Keys are on: the files need none.
    async with http_of(app_of(engine, {"policy.backend": "bus"}), engine) as client:
        yield client


async def test_the_page_and_its_files_are_served_without_a_key(http: Client) -> None:
    moved = await http.get("/console")
    assert (moved.status_code, moved.headers["location"]) == (307, "console/")
    page = await http.get("/console/")
    assert page.headers["content-type"].startswith("text/html")
    names = re.findall(r'(?:src|href)="static/([^"]+)"', page.text)
    assert {"app.js", "console.css", "uPlot.iife.min.js"} <= set(names)
    for name in names:
        assert (await http.get(f"/console/static/{name}")).status_code == 200, name
    for outside in ("../routes.py", "..%2froutes.py", "no.js"):
        assert (await http.get(f"/console/static/{outside}")).status_code == 404


@pytest.mark.parametrize("path", ["/console", "/console/", "/console/static/app.js"])
async def test_each_file_has_a_strict_policy(http: Client, path: str) -> None:
    headers = (await http.get(path)).headers
    assert headers["content-security-policy"] == POLICY
    assert headers["x-content-type-options"] == "nosniff"
    directives = dict(each.partition(" ")[::2] for each in POLICY.split("; "))
    assert directives["default-src"] == "'none'"
    assert "unsafe" not in POLICY
    assert "*" not in POLICY
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert directives[name] == "'none'"


async def test_files_are_cached_by_their_content(http: Client) -> None:
    first = await http.get("/console/static/app.js", headers={"Accept-Encoding": "identity"})
    etag = {"If-None-Match": first.headers["etag"]}
    again = await http.get("/console/static/app.js", headers=etag)
    assert (again.status_code, again.content) == (304, b"")
    other = await http.get("/console/static/console.css", headers=etag)
    assert other.status_code == 200


async def test_files_are_sent_compressed(http: Client) -> None:
    packed = await http.get("/console/static/console.css", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == (STATIC / "console.css").read_bytes()
    assert len(gzip.compress(packed.content)) < len(packed.content) / 2


async def test_without_the_setting_there_is_no_console(engine: FakeEngine) -> None:
    async with http_of(app_of(engine, {"gateway.console": False}), engine) as http:
        for path in ("/console", "/console/", "/console/session", "/console/requests"):
            assert (await http.get(path)).status_code == 404
        assert (await http.get("/status")).status_code == 200


def test_all_files_together_are_small() -> None:
    assert sum(each.stat().st_size for each in STATIC.iterdir()) < MOST_BYTES


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    page = (STATIC / INDEX).read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", page) == []
    for each in STATIC.iterdir():
        if each.suffix in (".html", ".css", ".js") and not each.name.startswith(LIBRARIES):
            found = set(re.findall(r"""["'(](?:https?:)?//[^"')\s]+""", each.read_text()))
            assert found <= {
                '"http://www.w3.org/2000/svg',
                '"http://www.w3.org/1998/Math/MathML',
            }, each.name


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_script_makes_html_or_code_of_text(path: Path) -> None:
    written = path.read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                "new Function", "DOMParser", "createContextualFragment", "cssText"):  # fmt: skip
        assert way not in written
    assert not re.search(r"""setAttribute\(["'](?:style|on\w+|src|href)""", written)


def test_each_module_is_there() -> None:
    for each in OWN:
        for name in re.findall(r"""(?:from |import\()["']\./([^"']+)""", each.read_text()):
            assert (STATIC / name).is_file(), f"{each.name} imports {name}"


def test_each_library_has_its_licence() -> None:
    for name, licence in (
        ("uPlot.iife.min.js", "uPlot"),
        ("markdown-it.umd.min.js", "markdown-it"),
    ):
        assert "Permission is hereby granted" in (STATIC / f"{licence}.LICENSE").read_text()
        assert "https://github.com/" in (STATIC / name).read_text().partition("*/")[0]


def test_errors_are_those_of_the_documentation() -> None:
    """`python docs/write_errors.py` writes the page; the console's file has its remedies."""
    writer = runpy.run_path(str(STATIC.parents[2] / "docs" / "write_errors.py"))
    page = writer["PAGE"].read_text()
    assert page == writer["page"]()
    found = json.loads(read_files()["errors.json"].content)
    assert found["model_not_found"] == "name one of the models of GET /v1/models"
    for remedy in found.values():
        assert not re.search(r"`|\]\(", remedy), "plain text"
