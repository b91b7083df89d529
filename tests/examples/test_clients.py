"""The programs of docs/examples, with the real libraries, against a whole pipeline."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nano_inference.config import load_config
from nano_inference.gateway.gateway import Gateway
from nano_inference.pipeline.pipeline import Pipeline

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
LIMIT_S = 120
INSTALL_LIMIT_S = 600

# What each prints, line by line, as far as it does not depend on the library.
HERE = {
    "curl.sh": ['"content":"12"', r"data: \[DONE\]", '"status":"completed"', '"text":"12"'],
    "openai_python.py": [r"chat: 12 \d+", "stream: 12", "completion: .+", "response: 12"],
    "anthropic_python.py": [r"count: \d+", "message: 12 end_turn", "stream: 12", "rest: 2"],
}
ELSEWHERE = {
    "langchain_chat.py": [
        "chain: 12",
        "stream: 12",
        r"batch: \['12', '5'\]",
        r"usage: \d+ stop",
        "response: 12",
    ],
    "litellm_chat.py": [r"chat: 12 \d+", "stream: 12", "message: 12 stop"],
}
PACKAGES = {
    "langchain_chat.py": "langchain-openai==1.7.3",
    "litellm_chat.py": "litellm==1.105.0",
}
FOR_NODE = "openai@6.49.0"
IN_NODE = [
    r"chat: 12 \d+",
    "stream: 12",
    "choice: 0 .+",
    "choice: 1 .+",
    "choice: 2 .+",
    "response: 12",
    "events: 12",
    "error: 400 invalid_top_p top_p",
]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    """Of a gateway in front of a pipeline."""
    config = load_config(env={})
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        yield gateway.url


@pytest.fixture
def online(soak: bool) -> None:
    """Packages are fetched for a soak alone; nothing of every day takes a network."""
    if not soak:
        pytest.skip("installs packages; run it with --soak")


async def test_every_program_is_tried_and_listed() -> None:
    programs = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert programs == {*HERE, *ELSEWHERE, "openai_node.mjs"}
    listed = re.findall(r"^\| \[(.+?)\]\(\1\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert set(listed) == programs


async def run(command: list[str], folder: Path, url: str = "", limit_s: float = LIMIT_S) -> str:
    """What a program prints that ends well."""
    ran = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=folder,
        env=os.environ | {"NANO_INFERENCE_URL": url},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def check(printed: str, wanted: list[str]) -> None:
    """All lines are there, in order."""
    assert re.search(".*".join(wanted), printed, re.S), printed


@pytest.mark.parametrize("name", HERE)
async def test_a_program_runs(name: str, url: str, tmp_path: Path) -> None:
    interpreter = "bash" if name.endswith(".sh") else sys.executable
    check(await run([interpreter, str(FOLDER / name)], tmp_path, url), HERE[name])


@pytest.mark.soak
@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("name", ELSEWHERE)
async def test_a_program_runs_in_an_environment_of_its_own(
    name: str, url: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(venv.create, tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", PACKAGES[name]]
    await run(install, tmp_path, limit_s=INSTALL_LIMIT_S)
    check(await run([python, str(FOLDER / name)], tmp_path, url), ELSEWHERE[name])


@pytest.mark.soak
@pytest.mark.usefixtures("online")
async def test_a_program_of_node_runs(url: str, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("there is no Node")
    (tmp_path / "package.json").write_text("{}")
    await run(["npm", "install", FOR_NODE], tmp_path, limit_s=INSTALL_LIMIT_S)
    # A program finds packages from where it lies.
    shutil.copy(FOLDER / "openai_node.mjs", tmp_path)
    check(await run(["node", "openai_node.mjs"], tmp_path, url), IN_NODE)
