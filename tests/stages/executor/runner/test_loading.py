"""Model folders as they are found: shards, tied weights, dtypes, stop ids, and broken files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.runner.checkpoint import tensor_files
from nano_inference.stages.executor.runner.file_tensors import file_tensors
from nano_inference.stages.executor.runner.system_memory import HUGE_PAGE
from nano_inference.text.tokenizer import stop_token_ids_of

from ....byte_tokenizers import byte_tokenizer
from ..models import load, make_model, save
from ..plans import Generation, Planner

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
SMALL_SHARDS = "40KB"


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def generated(folder: Path) -> tuple[list[int], list[float]]:
    config = EngineConfig(model_path=str(folder), block_size=4, max_model_len=64, device="cpu")
    generation = Generation(1, [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12))
    Planner(ExecutorCore(config)).run([generation])
    return generation.token_ids, generation.logprobs


def same_weights(loaded: Any, source: Any) -> bool:
    found, wanted = loaded.module.state_dict(), source.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


# --- loaded models -----------------------------------------------------------------------------


def test_shards_equal_one_file(tmp_path: Path) -> None:
    source = make_model("mixtral")
    one = save(source, tmp_path / "one")
    many = save(source, tmp_path / "many", max_shard_size=SMALL_SHARDS)
    assert not (many / ONE_FILE).exists()
    assert len(list(many.glob("*.safetensors"))) > 3
    assert same_weights(load(many), source)
    (tokens, logprobs), (expected, theirs) = generated(many), generated(one)
    assert tokens == expected
    # Not to the bit: weights stay where the file is mapped, and where they begin there decides
    # how a product's sum is cut.
    assert logprobs == pytest.approx(theirs, abs=1e-5)


def test_tensors_are_read_into_large_pages(tmp_path: Path) -> None:
    file = tmp_path / ONE_FILE
    held = {
        "large": torch.randn(3, HUGE_PAGE // 4).bfloat16(),
        "small": torch.randn(2, 3),
        "number": torch.tensor(0.5),
        "none": torch.empty(0, 4),
    }
    save_file(held, file)
    files = tensor_files(tmp_path)
    found = file_tensors(files)
    read = {name: tensor[...] for name, tensor in found.items()}
    assert read.keys() == held.keys()
    for name, tensor in held.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    assert read["large"].data_ptr() % HUGE_PAGE == 0
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(EOFError, match="cut off"):
        for tensor in file_tensors(files).values():
            tensor[...]
    save_file({**held, "counts": torch.arange(3)}, file)
    assert file_tensors(tensor_files(tmp_path)) == {}  # left to Transformers


@pytest.mark.parametrize("in_file", ["embedding", "both", "output"])
def test_tied_weights_are_the_same_whichever_of_them_the_file_has(
    tmp_path: Path, in_file: str
) -> None:
    source = make_model("qwen2")
    folder = save(source, tmp_path)
    weights = load_file(folder / ONE_FILE)
    embedding = weights.pop("model.embed_tokens.weight")
    assert "lm_head.weight" not in weights, "Transformers writes only one of them"
    if in_file != "output":
        weights["model.embed_tokens.weight"] = embedding
    if in_file != "embedding":
        weights["lm_head.weight"] = embedding.clone()
    save_file(weights, folder / ONE_FILE, metadata={"format": "pt"})
    loaded = load(folder)
    assert same_weights(loaded, source)
    assert loaded.vocab_size == embedding.shape[0]


def test_a_missing_output_layer_is_not_initialised_at_random(tmp_path: Path) -> None:
    folder = save(make_model("qwen2"), tmp_path)
    change_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lack 1 tensors.*lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("stored", "setting", "loaded"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
    ],
)
def test_dtypes(tmp_path: Path, stored: torch.dtype, setting: str, loaded: torch.dtype) -> None:
    source = make_model("llama").to(stored)
    folder = save(source, tmp_path, max_shard_size=SMALL_SHARDS)
    model = load(folder, dtype=setting)
    assert model.dtypes.weights == loaded
    assert {parameter.dtype for parameter in model.module.parameters()} == {loaded}
    assert same_weights(model, source.to(loaded))


def test_auto_dtype_is_from_config_json_or_else_from_the_file(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    change_json(folder / "config.json", dtype="bfloat16")
    assert load(folder).dtypes.weights == torch.bfloat16
    change_json(folder / "config.json", dtype=None)
    assert load(folder).dtypes.weights == torch.float32


def test_stop_ids_of_both_files(tmp_path: Path) -> None:
    """Both files are written by Transformers and read back."""
    model = make_model("llama")
    model.config.eos_token_id = [7, 8]
    model.generation_config.eos_token_id = [9, 10, 11]
    save(model, tmp_path)
    tokenizer = byte_tokenizer(None)
    assert stop_token_ids_of(tmp_path, tokenizer) == {9, 10, 11}
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids_of(tmp_path, tokenizer) == {7, 8}
    change_json(tmp_path / "config.json", eos_token_id=None)
    assert stop_token_ids_of(tmp_path, tokenizer) == {tokenizer.eos_token_id}


# --- code of the folder -------------------------------------------------------------------------


def bring_code(folder: Path) -> Path:
    """Makes the configuration name code of the folder; returns the file that it would write."""
    trace = folder / "the-code-was-run"
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w').close()\nraise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    change_json(folder / "config.json", auto_map=auto_map)
    return trace


def test_a_model_that_needs_code_of_its_folder_is_refused(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    trace = bring_code(folder)
    change_json(folder / "config.json", model_type="strange")
    with pytest.raises(ModelError, match=r"custom code.*never run here, so choose a model"):
        load(folder)
    assert not trace.exists()


def test_a_model_that_transformers_has_is_served_without_the_code_of_its_folder(
    tmp_path: Path,
) -> None:
    """Many folders bring the code from before Transformers had the model."""
    source = make_model("llama")
    folder = save(source, tmp_path)
    trace = bring_code(folder)
    assert same_weights(load(folder), source)
    assert not trace.exists()


# --- broken folders -----------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A model in several files."""
    return save(make_model("llama"), tmp_path, max_shard_size=SMALL_SHARDS)


def a_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def test_a_missing_shard_is_named(shards: Path) -> None:
    shard = a_shard(shards)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing, one of \d+ files"):
        load(shards)


BREAKAGES: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda content: content[: len(content) // 2],
    "all but a byte": lambda content: content[:-1],
    "within the header": lambda content: content[:20],
    "within the header's length": lambda content: content[:5],
    "empty": lambda content: b"",
    "an error page": lambda content: b"<html>404</html>",
    "git lfs pointer": lambda content: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("how", BREAKAGES)
def test_a_file_that_is_cut_off_is_named(shards: Path, how: str) -> None:
    content = BREAKAGES[how](a_shard(shards).read_bytes())
    # One file for all weights goes before shards.
    for broken in (a_shard(shards), shards / ONE_FILE):
        broken.write_bytes(content)
        with pytest.raises(ModelError, match=rf"{broken.name} is cut off or no safetensors file"):
            load(shards)


@pytest.mark.parametrize("needed", [True, False])
def test_a_tensor_that_only_the_index_has_is_named(shards: Path, needed: bool) -> None:
    tensor = "model.norm.weight" if needed else "model.layers.9.unheard_of.weight"
    shard = a_shard(shards)
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    assert weight_map.get(tensor) != shard.name
    change_json(shards / INDEX, weight_map={**weight_map, tensor: shard.name})
    with pytest.raises(ModelError, match=rf"says that {tensor} is in .*{shard.name}, where it is"):
        load(shards)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}']
)
def test_an_invalid_index_is_refused(shards: Path, content: str) -> None:
    (shards / INDEX).write_text(content)
    with pytest.raises(ModelError, match=rf"{INDEX}"):
        load(shards)


def test_weights_of_another_size_are_named(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    weights = load_file(folder / ONE_FILE)
    weights["model.norm.weight"] = torch.zeros(7)
    save_file(weights, folder / ONE_FILE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight .*shape \[7\].*makes it \[48\]"):
        load(folder)
