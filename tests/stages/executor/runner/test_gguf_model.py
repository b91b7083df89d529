"""Models from GGUF files: the same weights and tokens as Transformers' own from the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.text import gguf as our_gguf

from ....gguf_files import nothing, write_gguf
from ....soaking import in_soak
from ..models import load, make_model
from ..plans import Generation, Planner
from ..references import generate
from .test_loading import same_weights

I8 = gguf.GGMLQuantizationType.I8
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
PROMPTS = ([28, 27, 284, 224, 21, 24, 285], [5, 6, 7], [100])
NEW_TOKENS = 24


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(our_gguf, "_cache_folder", lambda: tmp_path / "kept")


def ours(path: Path, **settings: Any) -> list[list[int]]:
    config = EngineConfig(
        model_path=str(path),
        block_size=4,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        **settings,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    generations = [Generation(i, prompt, greedy) for i, prompt in enumerate(PROMPTS)]
    Planner(ExecutorCore(config)).run(generations)
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize("kind", [kind if kind == "Q4_0" else in_soak(kind) for kind in KINDS])
def test_tokens_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    # Else greedy `generate` would not take a stop token where it is the likeliest.
    model.generation_config.eos_token_id = None
    found = ours(path)
    for tokens, prompt in zip(found, PROMPTS, strict=True):
        assert tokens == generate(model, [prompt], NEW_TOKENS)[0][0].tolist()


def test_deterministic_mode_gives_the_same_tokens(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q8_0")
    assert ours(path, deterministic=True) == ours(path)


def test_a_llama_gets_its_weights_back(tmp_path: Path) -> None:
    source = make_model("llama", hidden_size=64)
    source.save_pretrained(tmp_path / "source")
    path = write_gguf(
        tmp_path / "m.gguf", folder=tmp_path / "source", architecture="llama", tokenizer=nothing
    )
    assert same_weights(load(path), source)


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("Q4_0", "auto", torch.bfloat16),
        in_soak("F16", "auto", torch.float16),
        in_soak("Q4_0", "float32", torch.float32),
        ("F32", "bfloat16", torch.bfloat16),
    ],
)
def test_the_type_of_the_weights(
    tmp_path: Path, kind: str, dtype: Any, expected: torch.dtype
) -> None:
    path = write_gguf(tmp_path / "m.gguf", kind)
    loaded = load(path, dtype=dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {expected}
    assert loaded.dtypes.weights == expected


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q4_0")
    load(path)
    assert capfd.readouterr() == ("", "")


def test_a_gguf_file_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    def deeper(writer: Any) -> None:
        writer.kv_data[0].pop("qwen2.block_count")
        writer.add_block_count(6)

    path = write_gguf(tmp_path / "m.gguf", change=deeper)
    with pytest.raises(ModelError, match=r"lack \d+ tensors .* such as model.layers.5"):
        load(path)


def test_a_gguf_file_with_too_few_parameters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is allocated: here layers of 4 GB, described by a file of 5 MB."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("qwen2.feed_forward_length")
        writer.add_feed_forward_length(2_000_000)
        writer.add_tensor("large", np.zeros(2_000_000, np.int8), raw_dtype=I8)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    path = write_gguf(tmp_path / "m.gguf", "F16", change=change)
    with pytest.raises(ModelError, match=r"describes a model of \d+ parameters, .* have \d+"):
        load(path)
