"""Weights by a checkpoint's names equal those that Transformers loads from the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nano_inference.config import WeightsError
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.runner.weights.conversion import as_parameters
from nano_inference.stages.executor.runner.weights.transports.folder import read_folder

from ...models import ARCHITECTURES, make_model
from .test_sync_manager import State, copied, same

EXPERTS = ["mixtral", "qwen3_moe"]
"""Architectures whose checkpoints have each expert by itself, and whose modules have them fused."""

TOKENS = torch.tensor([[3, 141, 59, 26, 5, 35, 89, 79]])


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(TOKENS).logits
    return result


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def checkpoint(name: str, folder: Path, **changes: Any) -> State:
    """The checkpoint that Transformers writes for another instance of the model."""
    make_model(name, seed=1, **changes).save_pretrained(folder)
    return read_folder(str(folder))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_checkpoint_of_each_architecture(name: str, tmp_path: Path) -> None:
    model = make_model(name, seed=2)
    weights = WeightSyncManager(model)
    weights.sync_blocking(weights.prepare(checkpoint(name, tmp_path), checkpoint=True))
    assert torch.equal(logits(model), logits(loaded(tmp_path)))


@pytest.mark.parametrize("name", EXPERTS)
def test_a_trainer_may_send_checkpoint_names_and_other_dtypes(name: str, tmp_path: Path) -> None:
    tensors = {key: each.bfloat16() for key, each in checkpoint(name, tmp_path).items()}
    model = make_model(name, seed=2)
    assert not tensors.keys() <= model.state_dict().keys()
    WeightSyncManager(model).sync_blocking(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(model), logits(loaded(tmp_path)))


def test_dtypes_are_cast_when_they_differ_among_the_tensors(tmp_path: Path) -> None:
    tensors = checkpoint("mixtral", tmp_path)
    mixed = {
        key: each.double() if "gate" in key else each.bfloat16() for key, each in tensors.items()
    }
    model = make_model("mixtral", seed=2)
    prepared = WeightSyncManager(model).prepare(mixed)
    assert {tensor.dtype for tensor in prepared.values()} == {torch.float32}
    name = "model.layers.0.mlp.gate.weight"
    assert torch.equal(prepared[name], make_model("mixtral", seed=1).state_dict()[name])


@pytest.mark.parametrize("name", EXPERTS)
def test_a_partial_update(name: str, tmp_path: Path) -> None:
    tensors = checkpoint(name, tmp_path)
    part = {key: each for key, each in tensors.items() if "layers.1." in key}
    model, other = make_model(name, seed=2), make_model(name, seed=1)
    before = copied(model)
    WeightSyncManager(model).sync_blocking(part, partial=True)
    for key, tensor in model.state_dict().items():
        wanted = other.state_dict()[key] if "layers.1." in key else before[key]
        assert torch.equal(tensor, wanted), key


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("kept", ["all but one", "only one", "only gates"])
def test_a_part_of_a_fused_parameter_is_refused(name: str, kept: str, tmp_path: Path) -> None:
    tensors = checkpoint(name, tmp_path)
    experts = {key for key in tensors if ".layers.1." in key and ".experts." in key}
    gates = {key for key in experts if key.endswith(("gate_proj.weight", "w1.weight"))}
    of_last = {key for key in experts if ".experts.3." in key}
    chosen = {"all but one": experts - of_last, "only one": of_last, "only gates": gates}[kept]
    model = make_model(name, seed=2)
    before, weights = copied(model), WeightSyncManager(model)
    for partial in (True, False):
        part = {
            key: each
            for key, each in tensors.items()
            if key in chosen or (not partial and key not in experts)
        }
        with pytest.raises(WeightsError, match=r"mlp\.experts\..*all parts of a parameter"):
            weights.sync_blocking(part, partial=partial)
    assert same(model, before)
    assert weights.version == 0


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    model = make_model("mixtral", seed=2)
    tensors = checkpoint("mixtral", tmp_path)
    strange = {**tensors, "model.layers.0.block_sparse_moe.nonsense": torch.ones(1)}
    with pytest.raises(WeightsError, match="1 tensor that the model does not have"):
        WeightSyncManager(model).sync_blocking(strange)
    with pytest.raises(WeightsError, match="tensors that the model does not have"):
        WeightSyncManager(model).sync_blocking(checkpoint("gemma2", tmp_path / "other"))


def test_the_model_itself_is_not_touched(tmp_path: Path) -> None:
    model = make_model("mixtral", seed=2)
    before = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()
    }
    as_parameters(model, checkpoint("mixtral", tmp_path), checkpoint=True)
    for name, tensor in model.named_parameters():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_parameter_names_need_no_conversion() -> None:
    model = make_model("mixtral")
    state = model.state_dict()
    assert as_parameters(model, state) is state


def test_a_module_that_is_not_transformers_own() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(WeightsError, match="does not have, such as 'weights'"):
        WeightSyncManager(module).sync_blocking({"weights": torch.ones(2, 2)})


STRANGE = [
    *("", ".", "..", "model", "model.", "model..norm", "lm_head.weight.", "é\n*[(", "x" * 10_000),
    *("model.layers.0.mlp.experts", "model.layers.99.mlp.experts.0.gate_proj.weight"),
    *("model.layers.0.mlp.experts.x.gate_proj.weight", "model.layers.0.mlp.experts..weight"),
]


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_are_refused(name: str) -> None:
    model = make_model("qwen3_moe")
    before, weights = copied(model), WeightSyncManager(model)
    for value in (torch.ones(3), torch.ones(()), [1.0]):
        with pytest.raises(WeightsError):
            weights.prepare({name: value})  # type: ignore[dict-item]
            weights.start_sync({name: value}, partial=True)  # type: ignore[dict-item]
    assert same(model, before)
