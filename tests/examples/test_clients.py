"""The programs of docs/examples, with the real libraries, against a whole pipeline."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from nano_inference.config import load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

from .environments import FOLDER, FOR_NODE, FOR_TOOLCHAINS, PACKAGES, WORKERS, run

# What each prints, line by line, as far as it does not depend on the library.
CURL = ['"content":"12"', r"data: \[DONE\]", '"status":"completed"', '"text":"12"']
HERE = {
    "openai_python.py": [
        *(r"chat: 12 \d+", "stream: 12", "completion: .+", "response: 12"),
        "batch: completed a 12",
    ],
    "anthropic_python.py": [
        *(r"count: \d+", "message: 12 end_turn", "stream: 12", "rest: 2"),
        *("batch: a succeeded 12", "batch: b succeeded 12"),
    ],
}
ELSEWHERE = {
    "langchain_chat.py": [
        *("chain: 12", "stream: 12", r"batch: \['12', '5'\]", r"usage: \d+ stop", "response: 12"),
    ],
    "langchain_tools.py": [
        *(r"call: get_weather \{'city': 'Oslo'\}", "answer: .+21", "required: get_weather"),
        *("json_schema: Person True", "function_calling: Person True"),
    ],
    "openai_agents.py": [
        r"asked: Oslo\n",
        "answer: .*21",
        r"asked: Paris\n",
        r"stream: .*21.*'run_item_stream_event'",
    ]
    * 2,
    "litellm_chat.py": [
        *(r"chat: 12 \d+", "stream: 12", "message: 12 stop", "batch: completed a 12"),
    ],
}
IMAGES = "images_python.py"
SEEN = "a red circle and a blue square"
ABOUT_IMAGES = {
    "langchain_images.py": [f"answer: {SEEN}", f"stream: {SEEN}"],
}
IN_NODE = [
    *(r"chat: 12 \d+", "stream: 12", "choice: 0 .+", "choice: 1 .+", "choice: 2 .+"),
    *("response: 12", "events: 12", "error: 400 invalid_top_p top_p"),
    "batch: completed a 12",
]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@asynccontextmanager
async def serving(model_path: str) -> AsyncIterator[str]:
    """Give the URL of a gateway in front of a pipeline."""
    config = load_config(env={}, overrides={"engine.model_path": model_path})
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        yield gateway.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    async with serving("tiny") as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vision_url() -> AsyncIterator[str]:
    async with serving("tiny-vision") as url:
        yield url


async def test_every_program_is_tried_and_listed() -> None:
    programs = {path.name for path in FOLDER.iterdir()} - {"README.md", "tasks"}
    on_the_bus = {*WORKERS, *(client for client, _ in FOR_TOOLCHAINS.values())}
    at_gateway = {"curl.sh", *HERE, IMAGES, *ABOUT_IMAGES, *PACKAGES, *FOR_NODE}
    assert programs == at_gateway | on_the_bus
    listed = re.findall(r"^\| \[(.+?)\]\(\1\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert set(listed) == programs


async def ran(command: list[str], folder: Path, url: str) -> str:
    """Return the output of a program that ends well, run beside the gateway that it calls."""
    return await asyncio.to_thread(run, command, folder, NANO_INFERENCE_URL=url)


def check(printed: str, wanted: list[str]) -> None:
    """All lines are there, in order."""
    assert re.search(".*".join(wanted), printed, re.S), printed


async def test_curl_runs(url: str, tmp_path: Path) -> None:
    check(await ran(["bash", str(FOLDER / "curl.sh")], tmp_path, url), CURL)


async def test_programs_run(url: str, vision_url: str, tmp_path: Path) -> None:
    """In one process: to import their libraries takes longer than all that they do."""
    code = (
        "import os, runpy, sys\n"
        "for path, url in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    os.environ['NANO_INFERENCE_URL'] = url\n"
        "    runpy.run_path(path, run_name='__main__')\n"
        "    print('-' * 9)\n"
    )
    arguments = [each for name in HERE for each in (str(FOLDER / name), url)]
    arguments += [str(FOLDER / IMAGES), vision_url]
    printed = await ran([sys.executable, "-c", code, *arguments], tmp_path, url)
    *texts, about_images, rest = printed.split("-" * 9 + "\n")
    assert not rest
    for wanted, text in zip(HERE.values(), texts, strict=True):
        check(text, wanted)
    check(about_images, [f"chat: {SEEN}", f"response: {SEEN}", f"message: {SEEN}"])


@pytest.mark.soak
@pytest.mark.parametrize("name", ELSEWHERE)
async def test_a_program_runs_in_an_environment_of_its_own(
    name: str, url: str, programs: Callable[[str], Path], tmp_path: Path
) -> None:
    python = await asyncio.to_thread(programs, name) / "python"
    check(await ran([str(python), str(FOLDER / name)], tmp_path, url), ELSEWHERE[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", ABOUT_IMAGES)
async def test_a_program_sends_a_question_about_an_image(
    name: str, vision_url: str, programs: Callable[[str], Path], tmp_path: Path
) -> None:
    python = await asyncio.to_thread(programs, name) / "python"
    command = [str(python), str(FOLDER / name)]
    check(await ran(command, tmp_path, vision_url), ABOUT_IMAGES[name])


@pytest.mark.soak
async def test_a_program_of_node_runs(url: str, node_folders: Callable[[str], Path]) -> None:
    folder = await asyncio.to_thread(node_folders, "openai_node.mjs")
    # A program finds packages from where it lies.
    shutil.copy(FOLDER / "openai_node.mjs", folder)
    check(await ran(["node", "openai_node.mjs"], folder, url), IN_NODE)
