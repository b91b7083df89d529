from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.config import ModelError
from nano_inference.stages.tokenizer import load_tokenizer, stop_token_ids_of


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_tokenizer_comes_back_with_its_template(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load_tokenizer(folder)
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_with_only_the_tokenizers_settings(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"can't be loaded|not backed by a tokenizer\.json"):
        load_tokenizer(folder)


def test_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="can't be loaded"):
        load_tokenizer(folder)


def test_code_of_the_folder_is_never_run(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "Custom"
    settings["auto_map"] = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}
    path.write_text(json.dumps(settings))
    (folder / "custom.py").write_text("raise SystemExit('this ran')")
    try:
        loaded = load_tokenizer(folder)
    except ModelError:
        return
    assert isinstance(loaded, PreTrainedTokenizerFast)


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 8}, {7}),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 8}, {7, 9}),
        ({}, {"eos_token_id": 8}, {8}),
        (None, {"eos_token_id": [8]}, {8}),
        (None, {"eos_token_id": None}, {1}),
        (None, None, {1}),
    ],
)
def test_stop_ids(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    generation: dict[str, object] | None,
    config: dict[str, object] | None,
    ids: set[int],
) -> None:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert stop_token_ids_of(tmp_path, tokenizer) == ids


def test_a_model_without_stop_ids(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast) -> None:
    assert stop_token_ids_of(tmp_path, word_tokenizer) == frozenset()


@pytest.mark.parametrize(
    "content", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}', "{", "[]"]
)
def test_unreadable_stop_ids(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        stop_token_ids_of(tmp_path, tokenizer)
