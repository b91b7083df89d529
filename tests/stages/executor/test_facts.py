"""What is told of models that are loaded."""

from __future__ import annotations

import pytest
from transformers import (
    AutoConfig,
    DbrxConfig,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nano_inference.config import EngineConfig
from nano_inference.stages.executor.core import ExecutorCore
from nano_inference.stages.executor.facts import model_facts
from nano_inference.stages.executor.runner.experts import experts_of


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (Qwen3Config(), (0, 0)),
        (MixtralConfig(num_local_experts=6, num_experts_per_tok=3), (6, 3)),
        (Qwen3MoeConfig(num_experts=32, num_experts_per_tok=4), (32, 4)),
        (DeepseekV3Config(n_routed_experts=64, num_experts_per_tok=5), (64, 5)),
        (DbrxConfig(ffn_config={"moe_num_experts": 7, "moe_top_k": 2}), (7, 2)),
        (AutoConfig.for_model("hunyuan_v1_moe", num_experts=4, moe_topk=[1, 2]), (4, 2)),
        (AutoConfig.for_model("hunyuan_v1_moe", num_experts=1, moe_topk=1), (0, 0)),
        (AutoConfig.for_model("gemma4_text", enable_moe_block=False), (0, 0)),
    ],
)
def test_experts_by_whatever_name(config: PreTrainedConfig, experts: tuple[int, int]) -> None:
    assert experts_of(config) == experts


def test_what_a_model_takes() -> None:
    core = ExecutorCore(EngineConfig(dtype="float32", kv_cache_bytes=1 << 24, max_batch_size=4))
    facts = model_facts(core)
    assert facts["dtype"] == "float32"
    assert facts["vocab_size"] == core.model.vocab_size
    assert facts["weight_bytes"] == 4 * int(facts["parameters"]) > 0
    assert facts["kv_bytes"] == sum(each.nbytes for each in core.cache.keys + core.cache.values)
    core.close()
