"""Stages of layers, as threads: what they compute together, and what can't be cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

from nano_inference.config import ConfigError, EngineConfig, ModelError
from nano_inference.stages.executor.runner.comparison import compare_shards
from nano_inference.stages.executor.runner.interface import ModelRunner, make_runner
from nano_inference.stages.executor.runner.model import load_model
from nano_inference.stages.executor.runner.ranks.group import OneRank, RankGroup
from nano_inference.stages.executor.runner.ranks.pipelining import PipelineRank, split_layers
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from .....soaking import in_soak
from ...models import make_model
from .group import make_groups, on_ranks
from .models import (
    NUM_BLOCKS,
    WITH_WIDE_TENSORS,
    Batch,
    config_of,
    hash_of,
    logits_of,
    make_batches,
    make_whole_model,
    run_ranks,
    save,
)

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "olmoe", "qwen2_moe")
"""Two of them have windows by layer, three tied embeddings, two experts."""


def run_stages(
    config: EngineConfig,
    stages: int,
    width: int = 1,
    num_batches: int = 6,
    logits: Callable[[ModelRunner, list[Batch]], list[Tensor]] = logits_of,
    *,
    compares: bool = False,
) -> list[Tensor]:
    """Logits on rank 0, of `width` ranks to a stage, `compares` with Transformers' own first."""
    tensor_groups = [make_groups(width) for _ in range(stages)]
    ends = make_groups(2)
    outputs = {0: ends[0], (stages - 1) * width: ends[1]}

    def work(group: RankGroup) -> list[Tensor]:
        stage, tensor_rank = divmod(group.rank, width)
        own: RankGroup = OneRank() if width == 1 else tensor_groups[stage][tensor_rank]
        pipeline = PipelineRank(group, width, outputs.get(group.rank))
        try:
            model = load_sharded(config, own, pipeline)
            assert model.layer_indices == tuple(pipeline.layers)
            assert len(model.layers) == len(pipeline.layers)
            if compares:
                compare_shards(config, model, own)
            return logits(make_runner(config, model, NUM_BLOCKS), make_batches(num_batches))
        except BaseException:
            for each in (*ends, *(each for groups in tensor_groups for each in groups)):
                each.close()
            raise

    return on_ranks(stages * width, work)[0]


def settings(folder: Path, stages: int, width: int = 1, **changes: Any) -> EngineConfig:
    more = {"pipeline_parallel": stages, **changes}
    config: EngineConfig = config_of(folder, width, **more)
    return config


@pytest.mark.parametrize(
    "name",
    [name if name in ("phi3", "qwen2_moe") else in_soak(name) for name in ARCHITECTURES],
)
def test_stages_give_the_bits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Without `rank_invariant`: products have the same shapes as on one rank."""
    folder = save(name, tmp_path)
    config = settings(folder, 2, deterministic=True)
    alone = make_runner(config, load_model(config), NUM_BLOCKS)
    expected = hash_of(logits_of(alone, make_batches(6)))
    assert hash_of(run_stages(config, 2)) == expected


@pytest.mark.parametrize("name", ["gemma3", "qwen2_moe"])
def test_stages_hold_the_codes_of_the_whole_model(name: str, tmp_path: Path) -> None:
    """Of tied embeddings too, and after an update."""
    folders = [save(name, tmp_path / str(seed), seed=seed) for seed in range(2)]
    codes = {"quantization": "int4", "quantization_group": 32, "deterministic": "auto"}
    config, wanted = (settings(folder, 2, **codes) for folder in folders)
    alone = make_runner(wanted, load_model(wanted), NUM_BLOCKS)
    expected = hash_of(logits_of(alone, make_batches(2)))
    assert hash_of(run_stages(wanted, 2, num_batches=2)) == expected
    new = dict(make_whole_model(name, seed=1).state_dict())

    def after_update(runner: ModelRunner, batches: list[Batch]) -> list[Tensor]:
        shards = runner.model.shards
        assert shards is not None
        shards.write(new)
        return logits_of(runner, batches)

    assert hash_of(run_stages(config, 2, num_batches=2, logits=after_update)) == expected


def test_three_stages_and_a_dtype(tmp_path: Path) -> None:
    folder = save("qwen3", tmp_path)
    config = settings(folder, 3, deterministic=True, dtype="bfloat16", kernels="off")
    alone = make_runner(config, load_model(config), NUM_BLOCKS)
    assert hash_of(run_stages(config, 3)) == hash_of(logits_of(alone, make_batches(6)))


@pytest.mark.parametrize(
    "name", [name if name == "deepseek_v3" else in_soak(name) for name in WITH_WIDE_TENSORS]
)
def test_stages_keep_tensors_in_float32_as_the_whole_model_does(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    config = settings(folder, 2, deterministic=True, dtype="bfloat16")
    model = load_model(config)
    assert torch.float32 in {tensor.dtype for tensor in model.module.state_dict().values()}
    expected = hash_of(logits_of(make_runner(config, model, NUM_BLOCKS), make_batches(3)))
    assert hash_of(run_stages(config, 2, num_batches=3)) == expected


def test_a_stage_that_begins_with_a_wide_tensor_has_the_model_s_dtype(tmp_path: Path) -> None:
    """The first tensor of Flint's layers is in float32; KV is not."""
    changes = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    make_model("flint", **changes).save_pretrained(tmp_path)
    config = settings(tmp_path, 2, deterministic=False, dtype="bfloat16")
    alone = make_runner(config, load_model(config), NUM_BLOCKS)

    def run(runner: ModelRunner, batches: list[Batch]) -> list[Tensor]:
        assert {*runner.model.dtypes} == {torch.bfloat16}
        return logits_of(runner, batches)

    assert hash_of(run_stages(config, 2, 1, 3, run)) == hash_of(run(alone, make_batches(3)))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        in_soak("qwen3", "float32"),
        ("mixtral", "bfloat16"),
        in_soak("qwen3", "bfloat16"),
        in_soak("mixtral", "float32"),
    ],
)
def test_two_stages_of_two_ranks_give_the_bits_of_one(
    name: str, dtype: str, tmp_path: Path, soak: bool
) -> None:
    """In `make soak` of 200 batches together."""
    folder, count = save(name, tmp_path), 50 if soak else 3
    alone = config_of(folder, invariant=True, dtype=dtype)
    expected = hash_of(run_ranks(alone, 1, make_batches(count)))
    config = settings(folder, 2, 2, invariant=True, dtype=dtype)
    assert hash_of(run_stages(config, 2, 2, count, compares=True)) == expected


def test_a_model_without_a_tensor_parallel_plan_has_stages(tmp_path: Path) -> None:
    """Its plan has a style that tensor parallelism refuses."""
    make_model("gpt_oss").save_pretrained(tmp_path)
    config = settings(tmp_path, 2, deterministic=False)
    alone = make_runner(config, load_model(config), NUM_BLOCKS)
    assert hash_of(run_stages(config, 2)) == hash_of(logits_of(alone, make_batches(6)))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(6, 2, [3, 3]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (2, 2, [1, 1])],
)
def test_uneven_layers_go_to_the_first_stages(
    layers: int, stages: int, expected: list[int]
) -> None:
    split = split_layers(layers, stages)
    assert [len(each) for each in split] == expected
    assert [layer for each in split for layer in each] == list(range(layers))


def refusal(folder: Path, stages: int) -> str:
    with pytest.raises(ModelError) as raised:
        run_stages(settings(folder, stages, deterministic=False), stages)
    return str(raised.value)


def test_a_stage_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """NanoChat uses its norm before the layers, too."""
    make_model("nanochat").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="NanoChatForCausalLM can't be served: it gives other"):
        run_stages(settings(tmp_path, 2, deterministic=False), 2, compares=True)


def test_models_that_can_not_be_cut_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "llama")
    assert refusal(tmp_path / "llama", 4) == (
        "LlamaForCausalLM can't run as several stages: it has 3 layers; set "
        "engine.pipeline_parallel to at most 3"
    )
    make_model("gpt2", n_embd=48, n_layer=3, n_head=4).save_pretrained(tmp_path / "gpt2")
    assert "GPT2LMHeadModel can't run as several stages: it is not an embedding" in refusal(
        tmp_path / "gpt2", 2
    )
    make_model("granite", embedding_multiplier=3.0).save_pretrained(tmp_path / "granite")
    assert refusal(tmp_path / "granite", 2) == (
        "GraniteForCausalLM can't run as several stages: it changes hidden states outside its "
        "layers; set engine.pipeline_parallel to 1"
    )


def test_layers_that_take_more_than_hidden_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models' layers get the embedding again, beside the states of the layer before."""
    forward, layer_forward = LlamaModel.forward, LlamaDecoderLayer.forward

    def takes_embedding(self: Any, *args: Any, embedding: Any = None, **call: Any) -> Any:
        return layer_forward(self, *args, **call)

    def with_embedding(
        self: Any, input_ids: Any = None, inputs_embeds: Any = None, **call: Any
    ) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return forward(self, inputs_embeds=inputs_embeds, embedding=inputs_embeds, **call)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", takes_embedding)
    monkeypatch.setattr(LlamaModel, "forward", with_embedding)
    save("llama", tmp_path)
    assert "its layers take more of its input than the layer before passes on" in refusal(
        tmp_path, 2
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speculation": "auto"}, "it must be 'off' with pipeline_parallel 2"),
        ({"kv_host_bytes": 1}, "it must be left out with pipeline_parallel 2"),
    ],
)
def test_settings_that_pipeline_stages_exclude_are_refused_at_start(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(pipeline_parallel=2, **wrong).check()
    assert message in str(raised.value)
