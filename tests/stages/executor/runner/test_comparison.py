"""The comparison at load: a model that computes something else through the cache is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LlavaConfig
from transformers import LlavaForConditionalGeneration as Llava
from transformers.models.llama.modeling_llama import LlamaMLP

from nano_inference.config import EngineConfig, ModelError
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.comparison import compare_with_transformers

from .. import vision_models
from ..models import ARCHITECTURES, make_config, make_model
from ..vision_models import make_processor, make_vision_model

CONFIG = EngineConfig(device="cpu", block_size=4, deterministic=False)


class _Mixing(LlamaMLP):
    """Adds the token before, without a cache for it."""

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = super().forward(x + x.roll(1, dims=1))
        return mixed


class _ByPlace(LlamaMLP):
    """Takes the place in the batch for the position, from `floor_scale` tokens on."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]) // self.config.floor_scale
        scaled: Tensor = super().forward(x) * (1.0 + places[:, None])
        return scaled


class Altered(LlamaForCausalLM):
    mlp: type[LlamaMLP]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = self.mlp(config)


class Mixing(Altered):
    mlp = _Mixing


class ByPlace(Altered):
    mlp = _ByPlace


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("kind", [Mixing, ByPlace])
def test_tokens_that_depend_on_their_batch_are_refused(kind: type[Altered], kernels: str) -> None:
    # Longer than all positions of the check, but for the rule that scales it down.
    module = kind(make_config("llama", floor_scale=8192))
    config = EngineConfig(device="cpu", kernels=kernels)
    with pytest.raises(ModelError, match=f"{kind.__name__} can't be served: it gives other logits"):
        ExecutorCore(config, model=wrap_model(module, 64))


def test_the_language_part_of_a_model_with_images_is_checked() -> None:
    own = {"attention_hidden_size": 64, "vocab_size": 128, "hidden_size": 64}
    text = {"model_type": "rwkv", "num_hidden_layers": 2, **own}
    vision = vision_models._CONFIGS["llava"]["vision_config"]
    module = Llava(LlavaConfig(text_config=text, vision_config=vision, image_token_id=125))
    with pytest.raises(ModelError, match="RwkvForCausalLM has recurrent layers"):
        wrap_model(module, 64, image_processor=make_processor("llava"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tested_architectures_agree(name: str) -> None:
    compare_with_transformers(CONFIG, wrap_model(make_model(name), 64))


@pytest.mark.parametrize("name", vision_models.ARCHITECTURES)
def test_models_with_images_agree(name: str) -> None:
    model = wrap_model(make_vision_model(name), 64, image_processor=make_processor(name))
    compare_with_transformers(CONFIG, model)
