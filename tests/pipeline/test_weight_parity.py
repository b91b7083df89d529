"""After an update an engine is the one that loads the new weights: nothing keeps a stale copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.executor.runner.weights.transports.folder import read_folder

from . import reference

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)

PROMPTS = [[7, 8, 9], list(range(40, 110)), [300] * 17]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, int], Path]:
    """Models like the bundled one with other weights, embeddings tied or not."""
    root = tmp_path_factory.mktemp("models")

    def make(tied: bool, seed: int) -> Path:
        folder = root / f"{'tied' if tied else 'untied'}-{seed}"
        if folder.exists():
            return folder
        shutil.copytree(reference.FOLDER, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            reference.FOLDER, dtype=torch.float32, tie_word_embeddings=tied
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model.bfloat16().save_pretrained(folder)
        return folder

    return make


def config(folder: Path, dtype: str, deterministic: bool, kernels: str) -> EngineConfig:
    return EngineConfig(
        model_path=str(folder), dtype=dtype, deterministic=deterministic, kernels=kernels
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("dtype", "deterministic", "kernels"),
    [
        ("bfloat16", False, "auto"),
        ("bfloat16", False, "off"),
        ("bfloat16", True, "auto"),
        ("float32", True, "auto"),
        ("float32", False, "auto"),
        ("float32", False, "off"),
    ],
)
def test_tokens_and_logprobs_are_those_of_an_engine_that_loads_them(
    folders: Callable[[bool, int], Path],
    tied: bool,
    dtype: str,
    deterministic: bool,
    kernels: str,
) -> None:
    first, second = folders(tied, 1), folders(tied, 2)
    with InferenceEngine(config(second, dtype, deterministic, kernels)) as fresh:
        wanted = fresh.generate(PROMPTS, GREEDY)
    with InferenceEngine(config(first, dtype, deterministic, kernels)) as engine:
        if engine._executor.runner.fast_modules is not None:
            assert engine._executor.runner.fast_modules.count["Linear"] > 0
        else:
            assert engine._executor.off.get("kernels", "")
        before = engine.generate(PROMPTS, GREEDY)
        engine.update_weights(read_folder(str(second)), blocking=True)
        found = engine.generate(PROMPTS, GREEDY)
    assert [sample.weight_version for sample in found] == [1] * len(PROMPTS)
    for sample, old, new in zip(found, before, wanted, strict=True):
        assert sample.completion_tokens == new.completion_tokens
        assert sample.logprobs == new.logprobs
        assert sample.top_logprobs == new.top_logprobs
        assert sample.logprobs != old.logprobs
