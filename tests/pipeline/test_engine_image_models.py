"""Prompts and answers of whole folders equal those of Transformers' processor and `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.admission.parts.images import Images

from ..media.pictures import picture
from ..soaking import in_soak
from .vision_folder import save_vision_model

TOKENS = 4
NAMES = ("llava_next", "qwen3_vl", "glm4v", "glm46v", "gemma4")


@pytest.mark.parametrize("name", ["mistral3", *map(in_soak, NAMES)])
def test_answers_about_images_equal_generate(name: str, tmp_path: Path) -> None:
    model = save_vision_model(name, tmp_path)
    settings = {"dtype": "float32", "kernels": "off", "max_model_len": 256}
    with InferenceEngine(EngineConfig(model_path=str(tmp_path), **settings)) as engine:
        processor = engine._admission.part(Images).processor
        assert processor is not None
        mark = processor.placeholder
        prompts = [f"Look: {mark} what?", f"{mark} and {mark}: compare"]
        images = [[picture(24, 16)], [picture(16, 40), picture(24, 16)]]
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        samples = engine.generate(prompts, greedy, images=images)
        for prompt, own, sample in zip(prompts, images, samples, strict=True):
            inputs = processor._processor(text=[prompt], images=[own], return_tensors="pt")
            ids = inputs["input_ids"][0]
            assert sample.prompt_tokens == tuple(ids.tolist())
            with torch.no_grad():
                output = model.generate(
                    **inputs, do_sample=False, max_new_tokens=TOKENS, eos_token_id=None
                )
            assert list(sample.completion_tokens) == output[0, len(ids) :].tolist()
