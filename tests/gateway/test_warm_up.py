"""The first call to a gateway waits for nothing that could be loaded before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from nano_inference.cli import serve
from nano_inference.cli.app import main
from nano_inference.config import Config, EngineConfig
from nano_inference.gateway.app import make_app
from nano_inference.gateway.serving import tokenizer

from .fake import FakeEngine


class Workers:
    """Template workers that note their start."""

    started = False

    def start(self) -> None:
        self.started = True


async def test_tokenizer_and_templates_are_there_before_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app(FakeEngine(), Config())  # type: ignore[arg-type]
    (services,) = app.services()
    services.templates._workers = workers = Workers()  # type: ignore[assignment]
    await app.warm_up()
    assert workers.started
    monkeypatch.delattr(tokenizer, "load_tokenizer")
    assert (await services.tokenizer.required()).transformers.chat_template


async def test_a_model_without_a_tokenizer_is_served(tmp_path: Path) -> None:
    config = Config(engine=EngineConfig(model_path=str(tmp_path)))
    await make_app(FakeEngine(), config).warm_up()  # type: ignore[arg-type]


def test_a_gateway_imports_tokenizers_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(serve, "import_tokenizers", lambda: done.append("imports"))
    monkeypatch.setattr(serve, "forbid_torch", lambda: None)
    monkeypatch.setattr(anyio, "run", lambda work, *given: done.append(work.__name__))
    assert main(["gateway", "--bus", "redis://127.0.0.1:1", "--set", "gateway.port=0"]) == 0
    assert done == ["imports", "_serve_gateway"]
