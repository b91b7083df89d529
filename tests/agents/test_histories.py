"""Clients in environments of their own hold ten turns, and send back what they received."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from nano_inference.config import Config
from nano_inference.gateway.gateway import Gateway

from ..examples.environments import FOR_NODE, PACKAGES, node_environment, python_environment
from ..gateway.histories import HistoryEngine, check_histories
from ..gateway.saying import calling_model
from .programs import HERE as BY_LIBRARY
from .programs import NODE, PROGRAMS

HERE = Path(__file__).parent / "histories"
LIMIT_S = 300
MAX_MODEL_LEN = 1 << 17

# Those of the Python clients that we take are in tests/gateway/test_histories.py.
pytestmark = [pytest.mark.slow, pytest.mark.soak(only=True)]


class History(NamedTuple):
    """A client's conversation.

    Attributes:
        script: In `histories/`, with `$url` for the gateway's address.
        packages: What it is installed from.
        thoughts: Whether the client sends back reasoning.
    """

    script: str
    packages: list[str]
    thoughts: bool = True


OPENAI_NODE = FOR_NODE["openai_node.mjs"]
ANTHROPIC_NODE = ["@anthropic-ai/sdk@1.14.0"]
LITELLM = [*PROGRAMS["litellm"].packages, "anthropic"]
LANGCHAIN = PACKAGES["langchain_chat.py"]
AI = {
    name: PROGRAMS[f"ai-{name}"].packages for name in ("openai", "openai-compatible", "anthropic")
}
HISTORIES = [
    History("openai_node.mjs $url chat whole", OPENAI_NODE),
    # Its accumulator keeps the last piece of a field that it doesn't know.
    History("openai_node.mjs $url chat streamed", OPENAI_NODE, thoughts=False),
    *(
        History(f"openai_node.mjs $url {api} {mode}", OPENAI_NODE)
        for api in ("responses", "stored")
        for mode in ("whole", "streamed")
    ),
    *(
        history
        for mode in ("whole", "streamed")
        for history in (
            History(f"anthropic_node.mjs $url {mode}", ANTHROPIC_NODE),
            # It knows no reasoning in chats.
            History(f"ai.mjs $url @ai-sdk/openai chat {mode}", AI["openai"], thoughts=False),
            History(f"ai.mjs $url @ai-sdk/openai responses {mode}", AI["openai"]),
            History(f"ai.mjs $url @ai-sdk/openai-compatible chat {mode}", AI["openai-compatible"]),
            History(f"ai.mjs $url @ai-sdk/anthropic messages {mode}", AI["anthropic"]),
            History(f"litellm_client.py $url openai/tiny {mode}", LITELLM),
            History(f"litellm_client.py $url anthropic/tiny {mode}", LITELLM),
            History(f"litellm_proxy.py $url messages {mode}", LITELLM),
            History(f"langchain_client.py $url chat {mode}", LANGCHAIN, thoughts=False),
            History(f"langchain_client.py $url responses {mode}", LANGCHAIN),
        )
    ),
    # Streamed, OpenAI's client can't put its blocks of thinking together.
    History("litellm_proxy.py $url chat whole", LITELLM),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    found = calling_model(folder)
    described = json.loads((folder / "config.json").read_text())
    described["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(described))
    engine = replace(found.engine, model_id="tiny", max_model_len=MAX_MODEL_LEN)
    return replace(found, engine=engine, gateway=replace(found.gateway, port=0))


def _install(history: History, cache: Path) -> list[str]:
    """Install a client; return the beginning of its command."""
    script = history.script.partition(" ")[0]
    kind = f"history_{Path(script).stem}_{len(history.packages)}"
    if script.endswith(".py"):
        return [str(python_environment(kind, history.packages, cache) / "python")]
    if shutil.which("npm") is None:
        pytest.skip("there is no Node")
    name = history.packages[0].rpartition("@")[0].replace("/", "_")
    folder = node_environment(f"node_{kind}_{name}", history.packages, cache)
    for file in HERE.glob("*.mjs"):
        # A program of Node finds packages from where it lies.
        shutil.copy(file, folder)
    bin = node_environment("node_itself", NODE, cache) / "node_modules" / ".bin"
    return [str(bin / "node"), str(folder)]


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.script)
async def test_a_client_s_history_is_what_the_model_wrote(
    history: History, config: Config, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    program, *folder = await asyncio.to_thread(_install, history, cache.mkdir("clients"))
    engine = HistoryEngine(config)
    async with Gateway(engine, config) as gateway:  # type: ignore[arg-type]
        script, *given = history.script.replace("$url", gateway.url).split()
        process = await asyncio.create_subprocess_exec(
            program,
            str(Path(*folder or [HERE]) / script),
            *given,
            cwd=tmp_path,
            env=os.environ
            | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path)}
            | {"PYTHONPATH": str(BY_LIBRARY)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                printed = (await process.communicate())[0].decode(errors="replace")
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, printed
    check_histories(engine.written, thoughts=history.thoughts)
