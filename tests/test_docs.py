"""The documents are true: their code runs, their tables and links are right."""

from __future__ import annotations

import ast
import asyncio
import io
import re
import runpy
from collections.abc import AsyncIterator
from functools import cache, partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from nano_inference import Pipeline, SamplingParams, load_config
from nano_inference.config import DEFAULT_URL
from nano_inference.text.messages import MessageReader, Reading, Tool, find_format

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
]
LIMIT_S = 120


def blocks(language: str) -> list[tuple[str, str]]:
    """(where, code) of every fenced block in a language."""
    found = []
    for path in DOCUMENTS:
        fences = re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)
        found += [(f"{path.name}-{number}", code) for number, code in enumerate(fences)]
    return found


PYTHON = blocks("python")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bus_url(redis_url: str) -> AsyncIterator[str]:
    """The address of a pipeline, at the URL that the documents use."""
    config = load_config(env={}, overrides={"bus.url": redis_url})
    async with asyncio.timeout(LIMIT_S), Pipeline(config):
        yield redis_url


def run_here(code: str) -> str:
    """Return what the code prints, as the `__main__` of a program."""
    printed = io.StringIO()
    exec(code, {"__name__": "__main__", "print": partial(print, file=printed)})
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("where", "code"), PYTHON, ids=[where for where, _ in PYTHON])
async def test_python_code_runs(where: str, code: str, bus_url: str) -> None:
    """In this process, which loads the model once for all of them."""
    async with asyncio.timeout(LIMIT_S):
        printed = await asyncio.to_thread(run_here, code.replace(DEFAULT_URL, bus_url))
    assert printed.strip()


def test_settings_page_has_the_settings_docstrings() -> None:
    """`python docs/write_settings.py` writes the page."""
    writer = runpy.run_path(str(ROOT / "docs" / "write_settings.py"))
    assert writer["page"]() == writer["PAGE"].read_text()


def test_page_of_commands_has_the_commands_of_the_program() -> None:
    """`python docs/write_commands.py` writes the page."""
    writer = runpy.run_path(str(ROOT / "docs" / "write_commands.py"))
    assert writer["page"]() == writer["PAGE"].read_text()


def test_the_readme_is_short() -> None:
    """What a newcomer reads first; the rest is in docs/."""
    assert len((ROOT / "README.md").read_text().split()) < 1_200


def test_page_of_tools_has_each_message_format() -> None:
    """With its models, whether its calls are enforced, and its mark of reasoning; `python
    docs/write_formats.py` writes the table."""
    writer = runpy.run_path(str(ROOT / "docs" / "write_formats.py"))
    assert writer["page"]() == writer["PAGE"].read_text()


def test_page_of_parts_has_each_part_of_the_stages_lists() -> None:
    """`python docs/write_parts.py` writes the page."""
    writer = runpy.run_path(str(ROOT / "docs" / "write_parts.py"))
    rows = re.findall(r"^\| \w+ \| (\w+) \| \[`(\w+)`\]", writer["PAGE"].read_text(), re.M)
    parts = writer["parts"]()
    assert rows == [(part.stage, part.node.name) for part in parts]
    for part in parts:
        listed = (ROOT / "stages" / part.stage / "parts" / "__init__.py").read_text()
        assert re.search(rf"\b{part.place.stem}\b", listed), part.place


@pytest.mark.parametrize("document", ["redis.md", "sampling.md"])
def test_sampling_parameters_are_all_named(document: str) -> None:
    """In redis.md how to give them; in sampling.md what those do that change or report logits."""
    text = (ROOT / "docs" / document).read_text()
    named = set(re.findall(r"`(?:sampling\.)?([a-z_]+)`", text))
    elsewhere = {"max_tokens", "stop_token_ids", "stop", "seed", "ignore_eos"}
    wanted = set(SamplingParams.__struct_fields__)
    assert wanted - named <= (elsewhere if document == "sampling.md" else set())


def test_json_in_the_docs_is_in_the_codecs_form() -> None:
    from nano_inference.bus.public import Output

    examples = [code for where, code in blocks("json") if where.startswith("redis.md")]
    assert len(examples) == 2
    for example in examples:
        msgspec.json.decode(example, type=Output)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_the_message_format_in_the_docs_is_one(tmp_path: Path) -> None:
    (example,) = [code for where, code in blocks("json") if where.startswith("tools.md")]
    path = tmp_path / "format.json"
    path.write_text(example)
    form = find_format(str(path), None, "", "")
    reader = MessageReader(form, Reading(tools=(Tool(name="add"),)), "seed")
    written = '<think>\nHm.\n</think>\n\nSo.<call>{"tool": "add", "with": {"a": 1}}</call>'
    told = [reader.feed(written), reader.finish()]
    assert "".join(delta.reasoning for delta in told) == "Hm."
    assert "".join(delta.content for delta in told) == "So."
    ((call,),) = [delta.calls for delta in told if delta.calls]
    assert (call.name, call.arguments) == ("add", '{"a": 1}')


def test_the_path_to_read_is_short_and_connected() -> None:
    page = (ROOT / "docs" / "read-me-first.md").read_text()
    rows = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `?(\w*)`? ?\|", page, re.M)
    texts = [(ROOT / file).read_text() for file, _ in rows]
    assert len(rows) == 10
    assert sum(text.count("\n") for text in texts) <= 3_000
    for position, (file, by) in enumerate(rows[1:], 1):
        name = by if by != "import" else f".{Path(file).stem} import"
        assert name in texts[position] or by == "import", file
        assert any(name in before for before in texts[:position]), file


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in DOCUMENTS[2:]} - {"index.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


def test_links_lead_to_files() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_life_of_a_request_names_existing_code() -> None:
    """Every path, class and method on the page, and for each of the six steps its functions."""
    text = (ROOT / "docs" / "life-of-a-request.md").read_text()
    paths = set(re.findall(r"`([^`\s]+\.py)`", text))
    assert not {path for path in paths if not (ROOT / path).is_file()}
    rows = re.findall(r"^\| (\d) \| `(.+?)` \| (.+) \|$", text, re.M)
    assert {step for step, _, _ in rows} == {"1", "2", "3", "4", "5", "6"}
    for _, path, cell in rows:
        functions = set(re.findall(r"`([\w.]+)`", cell)) - paths
        assert functions, f"{path} stands there without a function"
        assert not functions - names_in(ROOT / path), f"{path} has others"
    rooms = ("text", "store", "bus", "pipeline", "stages", "gateway", "cli")
    named = set(re.findall(r"`([A-Z]\w*(?:\.\w+)?)`", text))
    classes = re.compile(
        rf"^class (?:{'|'.join({name.partition('.')[0] for name in named})})\b", re.M
    )
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    # To parse all of them takes seconds.
    known = {name for path in files if classes.search(path.read_text()) for name in names_in(path)}
    assert not named - known


def names_in(path: Path) -> set[str]:
    """A module's functions and classes, and what classes have, as `Class.method`."""
    found = set()
    for node in parsed(path).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=owner, body=body):
                found.add(owner)
                for inner in body:
                    match inner:
                        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                            found.add(f"{owner}.{name}")
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            found.add(f"{owner}.{name}")
    return found
