"""Loading of shards: memory, refusals, the plan."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from nano_inference.config import ConfigError, EngineConfig, ModelError
from nano_inference.stages.executor.runner.ranks.group import OneRank, RankGroup
from nano_inference.stages.executor.runner.ranks.plan import Style, parallel_plan
from nano_inference.stages.executor.runner.sharded_model import load_sharded
from nano_inference.stages.executor.runner.whole_model import make_whole

from .....programs import run
from .....soaking import in_soak
from ...models import make_config, make_model
from .group import on_ranks
from .models import config_of, hash_of, make_batches, make_whole_model, run_ranks, save


def refusal(folder: Path, size: int, **changes: Any) -> str:
    """The message with which every rank refuses a model."""
    config = config_of(folder, size, **changes)
    messages = on_ranks(size, partial(_refusal, config))
    assert len({*messages}) == 1
    return messages[0]


def _refusal(config: EngineConfig, group: RankGroup) -> str:
    with pytest.raises(ModelError) as refused:
        load_sharded(config, group)
    return refused.value.message


def test_odd_numbers_are_refused_by_name(tmp_path: Path) -> None:
    save("llama", tmp_path / "three", num_attention_heads=6, num_key_value_heads=3)
    assert refusal(tmp_path / "three", 2) == (
        "LlamaForCausalLM can't run on several ranks: it has 3 KV heads, which 2 ranks can't share "
        "evenly; set engine.tensor_parallel to 1"
    )
    save("llama", tmp_path / "two", num_attention_heads=4, num_key_value_heads=2)
    assert "2 KV heads, which 4 ranks" in refusal(tmp_path / "two", 4)
    assert refusal(tmp_path / "two", 4).endswith("set engine.tensor_parallel to 1 or 2")
    save("llama", tmp_path / "wide", intermediate_size=66)
    message = refusal(tmp_path / "wide", 4)
    assert "66 features to shard in model.layers.0.mlp.gate_proj, which 4 ranks" in message
    message = refusal(tmp_path / "wide", 2, invariant=True)
    assert message.endswith("to 1 or 2 and engine.rank_invariant to false")
    save("mixtral", tmp_path / "experts", num_local_experts=6)
    message = refusal(tmp_path / "experts", 4, expert_parallel=4)
    assert "6 experts in model.layers.0.mlp.experts, which 4 ranks" in message


def test_gathered_heads_may_be_odd(tmp_path: Path) -> None:
    """OLMo 2 gathers queries, keys and values, since it normalises all heads together."""
    batches = make_batches(3)
    save("olmo2", tmp_path, num_attention_heads=4, num_key_value_heads=1)
    two, four = (
        hash_of(run_ranks(config_of(tmp_path, n, invariant=True), n, batches)) for n in (2, 4)
    )
    assert two == four


def test_models_without_a_usable_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("gpt2", n_embd=48, n_head=4, n_layer=2).save_pretrained(tmp_path / "gpt2")
    assert refusal(tmp_path / "gpt2", 2) == (
        "GPT2LMHeadModel can't run on several ranks: Transformers has no tensor-parallel plan for "
        "it; set engine.tensor_parallel to 1"
    )
    save("llama", tmp_path / "llama")
    plan = {**LlamaConfig.base_model_tp_plan, "layers.*.mlp": "sequence_parallel"}
    with monkeypatch.context() as patch:
        patch.setattr(LlamaConfig, "base_model_tp_plan", plan)
        message = refusal(tmp_path / "llama", 2)
        assert "its plan has the style 'sequence_parallel', which is not supported" in message
    message = refusal(tmp_path / "llama", 2, expert_parallel=2)
    assert message.endswith("or it has none; set engine.expert_parallel to 1")
    with pytest.raises(ModelError, match=r"q_norm has numbers for each head, which its plan"):
        parallel_plan(make_model("cohere", use_qk_norm=True))


def test_the_dtype_is_the_checkpoint_s(tmp_path: Path) -> None:
    make_whole_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    config = config_of(tmp_path, invariant=True)
    assert load_sharded(config, OneRank()).dtypes.weights is torch.bfloat16
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields.pop("dtype") == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_sharded(config, OneRank()).dtypes.weights is torch.bfloat16


def test_other_kinds_of_weights_are_refused(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "llama")
    (folder / "model.safetensors").rename(folder / "other.bin")
    assert "has no weights in safetensors' format" in refusal(folder, 2)
    (folder / "other.bin").rename(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "has quantized weights" in refusal(folder, 2)


def test_checkpoints_must_be_complete(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    part = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"lack 1 tensors that the model needs, such as {name}" in refusal(folder, 2)
    tensors[name] = part[:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"{name} in {folder} has the shape [63, 48]" in refusal(folder, 2)


def test_settings_of_ranks_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it must be 1, or as tensor_parallel"):
        EngineConfig(tensor_parallel=2, expert_parallel=4).check()
    with pytest.raises(ConfigError, match="it must be false without deterministic"):
        EngineConfig(rank_invariant=True).check()
    folder = save("llama", tmp_path, num_attention_heads=6, num_key_value_heads=6)
    assert "3 ranks can't give the same bits as one" in refusal(folder, 3, invariant=True)


def test_shared_experts_are_sharded() -> None:
    """Transformers' plan leaves them whole."""
    config = make_config("qwen2_moe", num_experts=4, moe_intermediate_size=32)
    plan = parallel_plan(make_whole(config, torch.float32))
    shared = {name: style for name, style in plan.items() if "layers.0.mlp.shared_expert" in name}
    assert shared == {
        "model.layers.0.mlp.shared_expert.gate_proj": Style.COLUMNS,
        "model.layers.0.mlp.shared_expert.up_proj": Style.COLUMNS,
        "model.layers.0.mlp.shared_expert.down_proj": Style.ROWS,
    }


def test_checkpoints_in_several_files_are_read(tmp_path: Path) -> None:
    batches = make_batches(2)
    for name in ("qwen3", "qwen3_moe"):
        model = make_whole_model(name)
        model.save_pretrained(tmp_path / name / "one")
        model.save_pretrained(tmp_path / name / "several", max_shard_size="50KB")
        files = list((tmp_path / name / "several").glob("model-*.safetensors"))
        assert len(files) > 2
        one, several = (config_of(tmp_path / name / kind, 2) for kind in ("one", "several"))
        assert hash_of(run_ranks(one, 2, batches)) == hash_of(run_ranks(several, 2, batches))


def test_a_tied_output_shares_the_shard(tmp_path: Path) -> None:
    config = config_of(save("qwen3", tmp_path), 2)

    def check(group: RankGroup) -> bool:
        model: Any = load_sharded(config, group).module
        weight: nn.Parameter = model.get_output_embeddings().weight
        return weight is model.get_input_embeddings().weight

    assert on_ranks(2, check) == [True, True]


_PEAK = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from nano_inference.stages.executor.runner import sharded_model as load
from nano_inference.stages.executor.runner.ranks.group import OneRank
from nano_inference.config import EngineConfig

class Alone(OneRank):
    # Loading exchanges nothing; only the probing pass does, which does not read weights' values.
    rank, size = int(sys.argv[2]), int(sys.argv[3])
    def all_gather(self, tensor): return torch.stack([tensor] * self.size)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

config = EngineConfig(
    model_path=sys.argv[1], device="cpu", huge_pages=sys.argv[5],
    tensor_parallel=Alone.size, expert_parallel=int(sys.argv[4]),
)
load.load_sharded(EngineConfig(model_path=sys.argv[6], device="cpu", tensor_parallel=2), Alone())
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = status("RssAnon")
peak_before = status("VmHWM")
model = load.load_sharded(config, Alone())
print(status("VmHWM") - peak_before, status("RssAnon") - before, model.weight_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("kind", [in_soak("llama"), "mixtral"])
def test_no_rank_ever_holds_the_whole(kind: str, tmp_path: Path) -> None:
    """A rank of four has its shard, and beside it a tensor, or a layer while it is fused."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 16, "head_dim": 64}
    experts = {"num_local_experts": 4, "intermediate_size": 256} if kind == "mixtral" else {}
    folder = save(kind, tmp_path / "model", **{**sizes, **experts}, vocab_size=8192)
    small = save("llama", tmp_path / "small")
    peak, held, whole = _peak(folder, small)
    assert whole > 90e6
    assert held < whole / 4 + 12e6
    beside = 3 * whole // 16 if kind == "mixtral" else 8192 * 512 * 4
    assert peak < whole / 4 + beside + 24e6


def _peak(folder: Path, small: Path) -> list[int]:
    arguments = ["", str(folder), "1", "4", "1", "off", str(small)]
    ran = run(f"import sys\nsys.argv = {arguments}\n{_PEAK}", folder.parent)
    assert ran.status == 0, ran.stderr
    return [int(number) for number in ran.stdout.split()]
