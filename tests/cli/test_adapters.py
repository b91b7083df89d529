"""Adapters by the command line, on a running pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from nano_inference.config import Config, EngineConfig

from ..stages.executor.runner.adapters.making import make_adapter
from .conftest import Run, serving
from .test_errors import assert_refused


@pytest.fixture(scope="module")
def served(redis_url: str) -> Iterator[Config]:
    with serving(redis_url) as config:
        yield config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(EngineConfig().model_folder)
    make_adapter(model, 0, made, r=2)
    return made


def listed(run: Run) -> list[list[str]]:
    ran = run("adapters", "list")
    assert ran.status == 0, ran.stderr
    return [line.split() for line in ran.stdout.splitlines()[1:]]


def test_from_the_first_to_the_last(run: Run, on_served: Config, folder: Path) -> None:
    assert_refused(run("adapters", "load", "a", str(folder / "nowhere")), "adapter_config.json")
    assert run("adapters", "load", "a", str(folder)).stdout == "1\n"
    assert run("adapters", "load", "a", str(folder), "--version", "7").stdout == "7\n"
    while not (rows := listed(run)) or rows[0][1] != "7":
        pass  # stages report every second
    assert rows[0][:3] == ["a", "7", "2"]
    assert run("adapters", "unload", "a").status == 0
    assert_refused(run("adapters", "unload", "a"), "no adapter 'a' is loaded")
