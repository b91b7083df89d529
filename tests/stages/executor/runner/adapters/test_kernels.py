"""Beside our kernels, which take several layers at once, adapters are not passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from nano_inference import EngineConfig, InferenceEngine, SamplingParams

from .making import make_adapter

PROMPTS = ["12 + 30 =", "98 + 25 ="]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)


def test_logprobs_are_near_those_without_kernels(tmp_path: Path) -> None:
    config = EngineConfig(dtype="bfloat16", device="cpu")
    make_adapter(AutoModelForCausalLM.from_pretrained(config.model_folder), 0, tmp_path)
    found = {}
    for kernels in ("auto", "off"):
        settings = EngineConfig(dtype="bfloat16", device="cpu", kernels=kernels)
        with InferenceEngine(settings) as engine:
            if kernels == "auto" and engine._executor.fast_modules is None:
                pytest.skip(f"no kernels here: {engine._executor.without_kernels}")
            engine.load_adapter("a", tmp_path)
            base = engine.generate(PROMPTS, PARAMS)
            adapted = engine.generate(PROMPTS, PARAMS, adapter="a")
            assert engine.generate(PROMPTS, PARAMS) == base
            assert [each.completion_tokens for each in adapted] != [
                each.completion_tokens for each in base
            ]
            found[kernels] = [each.prompt_logprobs[1:] for each in adapted]
    for own, wanted in zip(*found.values(), strict=True):
        assert own == pytest.approx(wanted, abs=0.5)
