"""The context length of a model is known before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nano_inference.config import EngineConfig
from nano_inference.text.context_length import longest_context_of

from ..gguf_files import write_gguf

LONG = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
TOLD: list[tuple[dict[str, Any], int | None]] = [
    ({"max_position_embeddings": 32768}, 32768),
    ({"n_positions": 1024}, 1024),
    ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 9}, 512),
    (LONG, 131072),
    (LONG | {"rope_scaling": {"type": "longrope"}}, 4096),
    (LONG | {"rope_parameters": {"rope_type": "yarn"}}, 131072),
    (LONG | {"rope_parameters": {"full": {"rope_type": "dynamic"}, "sliding": {}}}, 4096),
    ({"rope_scaling": {"type": "dynamic", "original_max_position_embeddings": 77}}, 77),
    ({}, None),
]


@pytest.mark.parametrize(("config", "length"), TOLD)
def test_a_folder_states_its_context_length(
    tmp_path: Path, config: dict[str, Any], length: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_context_of(tmp_path) == length


@pytest.mark.parametrize("content", ["", "[]", "{", '{"max_position_embeddings": "a"}'])
def test_an_unreadable_file_gives_no_context_length(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert longest_context_of(tmp_path) is None
    assert longest_context_of(tmp_path / "nowhere") is None


def test_a_gguf_file_states_its_context_length(tmp_path: Path) -> None:
    assert longest_context_of(write_gguf(tmp_path / "tiny.gguf")) == 2048
    assert longest_context_of(tmp_path) == 2048
    assert longest_context_of(EngineConfig().model_folder) == 2048
