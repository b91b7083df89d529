"""Weights that are read while their loader is imported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from nano_inference.config import EngineConfig
from nano_inference.stages import read_ahead as module
from nano_inference.stages.read_ahead import read_ahead, reading_of, stop_reading

HELD = {f"w{index}": np.full((3, index), index, np.float32) for index in range(9)}


@pytest.fixture(autouse=True)
def slow_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "_LOADER", "not.imported")
    monkeypatch.setattr(module, "_WORTH_BYTES", 0)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 100)
    yield
    stop_reading()


def settings_for(folder: Path, model: dict[str, Any]) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(model))
    return EngineConfig(model_path=str(folder), device="cpu")


def test_files_are_read_before_they_are_asked_for(tmp_path: Path) -> None:
    names = [*HELD]
    files = {"b.safetensors": names[:4], "a.safetensors": names[4:]}
    for file, held in files.items():
        save_file({name: HELD[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (tmp_path / module.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    read_ahead(settings_for(tmp_path, {"model_type": "qwen2"}))
    (begun,) = module._begun.values()
    reading = reading_of(tmp_path / file for file in files)
    assert reading is begun
    assert reading_of(tmp_path / file for file in files) is not begun  # it belongs to one model
    assert reading.tensors.keys() == HELD.keys()
    for name, tensor in reading.tensors.items():
        tensor.done.result()
        assert tensor.memory == HELD[name].tobytes()


@pytest.mark.parametrize("field", ["text_config", "quantization_config", "num_local_experts"])
def test_models_that_are_loaded_in_another_way_are_not_read_ahead(
    tmp_path: Path, field: str
) -> None:
    save_file(HELD, tmp_path / module.WEIGHTS)
    read_ahead(settings_for(tmp_path, {field: {}}))
    assert not module._begun
    read_ahead(settings_for(tmp_path, {}))
    assert module._begun


def test_what_is_wrong_with_files_is_left_to_loading(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, {})
    for content in (b"", b"\xff" * 99):
        (tmp_path / module.WEIGHTS).write_bytes(content)
        read_ahead(settings)
        assert not module._begun
