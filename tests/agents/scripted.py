"""A gateway whose model `scripted` follows a script, with a record of its calls.

`python -m tests.agents.scripted --port 30100 --record calls.jsonl` serves it until it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nano_inference.bus.public import Completion, GenerateRequest, Output
from nano_inference.config import Config, load_config
from nano_inference.gateway.app import GatewayApp
from nano_inference.gateway.gateway import Gateway
from nano_inference.gateway.server.measures import Measures

from ..gateway.fake import FakeEngine
from ..gateway.saying import saying, words_of
from .recording import Recorder
from .script import next_text

MODEL = "scripted"
MAX_MODEL_LEN = 1 << 18


def scripted_model(folder: Path, **settings: Any) -> Config:
    """Copy the bundled model without its weights, for long prompts, and return its settings."""
    source = Config().engine.model_folder
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    described = json.loads((folder / "config.json").read_text())
    described["max_position_embeddings"] = MAX_MODEL_LEN
    (folder / "config.json").write_text(json.dumps(described))
    overrides = {
        "engine.model_path": str(folder),
        "engine.model_id": MODEL,
        "engine.max_model_len": MAX_MODEL_LEN,
        "gateway.port": 0,
    }
    return load_config(env={}, overrides=overrides | settings)


class ScriptedEngine(FakeEngine):
    """A fake engine whose answers follow the script."""

    def __init__(self, config: Config) -> None:
        super().__init__(self._follow)
        self._words = words_of(config)

    def _follow(self, request: GenerateRequest) -> list[Output]:
        constraint = request.sampling.constraint
        schema = None if constraint is None else constraint.json_schema
        prompt = request.prompt
        if request.prompt_token_ids:
            prompt = self._words.text(request.prompt_token_ids, skip_special=False)
        *chunks, end = saying(next_text(prompt or "", schema), self._words, 1, "stop")(request)
        assert isinstance(end, Completion)
        used = len(request.prompt_token_ids or ())
        usage = msgspec.structs.replace(end.usage, prompt_tokens=used, cached_tokens=0)
        return [*chunks, msgspec.structs.replace(end, usage=usage)]


class ScriptedGateway(Gateway):
    """A gateway in front of the scripted model.

    Attributes:
        recorder: The record of its calls.
        engine: The scripted engine.
    """

    def __init__(self, config: Config, log: BinaryIO | None = None) -> None:
        """`log`: as of `Recorder`."""
        self.engine, self.recorder = ScriptedEngine(config), Recorder(log)
        super().__init__(self.engine, config)  # type: ignore[arg-type]

    async def _application(self, config: Config, measures: Measures) -> GatewayApp:
        app = await super()._application(config, measures)
        app.entrance = self.recorder.around  # type: ignore[attr-defined]
        return app


@contextmanager
def scripted_config(**settings: Any) -> Iterator[Config]:
    """Settings of the scripted model, in a folder that is removed."""
    with tempfile.TemporaryDirectory() as folder:
        yield scripted_model(Path(folder) / MODEL, **settings)


async def _serve(config: Config, log: BinaryIO | None) -> None:
    async with ScriptedGateway(config, log) as gateway:
        print(gateway.url, flush=True)  # noqa: T201
        await gateway.failed()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--record", type=Path, help="file for the calls, one JSON object a line")
    given = parser.parse_args()
    with ExitStack() as stack:
        log = stack.enter_context(given.record.open("wb", buffering=0)) if given.record else None
        config = stack.enter_context(scripted_config(**{"gateway.port": given.port}))
        stack.enter_context(suppress(KeyboardInterrupt))
        asyncio.run(_serve(config, log))


if __name__ == "__main__":
    main()
