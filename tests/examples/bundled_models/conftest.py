"""The bundled model's folder, read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import EngineConfig
from nano_inference.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def folder() -> Path:
    return EngineConfig().model_folder


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder)
