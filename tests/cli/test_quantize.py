"""quantize: a folder whose codes Transformers reads as ours, or no folder at all."""

from __future__ import annotations

import errno
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from nano_inference.stages.executor.runner.kernels.codes import unpack_plain
from nano_inference.stages.executor.runner.linear.experts import ExpertCodes
from nano_inference.stages.executor.runner.linear.quantized import QuantizedLinear
from nano_inference.stages.executor.runner.linear.rounding import Rounding, round_rows
from nano_inference.stages.executor.runner.quantize import folder

from ..gguf_files import write_gguf
from ..stages.executor.models import load, make_model, save
from .conftest import Run, assert_refused

FORMATS = {
    "int8": (["--format", "int8"], Rounding(8)),
    "int8 in groups": (["--group", "32"], Rounding(8, 32)),
    "int8 and activations": (["--activation-bits", "8"], Rounding(8)),
    "int8 with zero points": (["--zero-points"], Rounding(8, 0, True)),
    "int4": (["--format", "int4", "--group", "32"], Rounding(4, 32)),
    "int4 with zero points": (
        ["--format", "int4", "--group", "32", "--zero-points"],
        Rounding(4, 32, True),
    ),
}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


def make_folder(folder: Path, name: str, dtype: torch.dtype, **changes: Any) -> Path:
    save(make_model(name, **{**SIZES, **changes}).to(dtype), folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in bfloat16, with an output layer of its own."""
    return make_folder(tmp_path_factory.mktemp("plain"), "qwen3", torch.bfloat16)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("mixture"), "qwen3_moe", torch.bfloat16)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: each
        for file in folder.glob("*.safetensors")
        for name, each in load_file(file).items()
    }


def state_of(folder: Path, **options: Any) -> dict[str, Tensor]:
    """The weights that Transformers computes with."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    model(torch.zeros(1, 1, dtype=torch.long))  # decompresses them
    state: dict[str, Tensor] = model.state_dict()
    return state


def exact(weight: Tensor, rounding: Rounding) -> Tensor:
    """The codes' weights in float32."""
    form, plain = rounding.form(*weight.shape), round_rows(weight, rounding)
    return unpack_plain(form, plain)


def rounded(weight: Tensor, rounding: Rounding) -> Tensor:
    return exact(weight, rounding).to(weight.dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_transformers_reads_the_weights_that_we_round(
    name: str, run: Run, plain: Path, tmp_path: Path
) -> None:
    options, rounding = FORMATS[name]
    target = tmp_path / "new"
    ran = run("quantize", str(plain), str(target), "--json", *options)
    assert ran.status == 0, ran
    report = json.loads(ran.stdout)
    wanted = state_of(plain)
    found = state_of(target, quantization_config=CompressedTensorsConfig(dequantize=True))
    layers = {each["name"]: each for each in report["layers"]}
    assert len(layers) == 7
    assert not any(fnmatchcase(each, "*embed*") or each == "lm_head" for each in layers)
    for key, before in wanted.items():
        layer = layers.get(key.removesuffix(".weight"))
        after = before if layer is None else rounded(before, rounding)
        torch.testing.assert_close(found[key], after, rtol=0, atol=0, msg=key)
        if layer is not None:
            wide = before.float()
            error = (exact(before, rounding) - wide).norm() / wide.norm()
            assert layer["error"] == pytest.approx(float(error), rel=1e-5)
    stored = tensors_of(target)
    assert report["bytes_after"] == sum(each.nbytes for each in stored.values())
    assert report["bytes_before"] == sum(each.nbytes for each in tensors_of(plain).values())
    own = sum(each.nbytes for key, each in stored.items() if key.rpartition(".")[0] in layers)
    weights = sum(each["weights"] for each in layers.values())
    assert report["bits_per_weight"] == pytest.approx(8 * own / weights)


@pytest.mark.parametrize("name", FORMATS)
def test_this_package_reads_them_too(name: str, run: Run, plain: Path, tmp_path: Path) -> None:
    options, rounding = FORMATS[name]
    assert run("quantize", str(plain), str(tmp_path / "new"), *options).status == 0
    model, wanted = load(tmp_path / "new").module, state_of(plain)
    layers = {key: each for key, each in model.named_modules() if type(each) is QuantizedLinear}
    assert len(layers) == 7
    for key, layer in layers.items():
        assert layer.form.bits == rounding.bits
        assert layer.weight.equal(rounded(wanted[f"{key}.weight"], rounding))


def test_transformers_keeps_the_codes_without_further_options(
    run: Run, plain: Path, tmp_path: Path
) -> None:
    assert run("quantize", str(plain), str(tmp_path / "new")).status == 0
    found, wanted = state_of(tmp_path / "new"), state_of(plain)
    key = "model.layers.0.mlp.up_proj.weight"
    assert found[key].equal(rounded(wanted[key], Rounding(8)))


def test_everything_else_of_a_folder_is_copied(run: Run, plain: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new"
    shutil.copytree(plain, source)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"own": 1}')
    (source / "pytorch_model.bin").write_bytes(b"a second copy of the weights")
    ran = run("quantize", str(source), str(target), "--ignore", "*.down_proj")
    assert ran.status == 0, ran
    assert "not quantised (--ignore): model.layers.0.mlp.down_proj" in ran.stdout
    files = {str(each.relative_to(target)) for each in target.rglob("*") if each.is_file()}
    held = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
    assert files >= held
    assert not files & {"pytorch_model.bin", "model.safetensors.index.json"}
    config = json.loads((target / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj"]
    QuantizationConfig.model_validate(quantization)
    before, after = tensors_of(source), tensors_of(target)
    for key in before.keys() & after.keys():
        assert after[key].equal(before[key])
    assert "model.layers.0.mlp.down_proj.weight" in after
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_a_model_of_several_files_becomes_several_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_SHARD_BYTES", 20_000)
    model = make_model("llama", **SIZES)
    save(model, tmp_path / "source", max_shard_size="30KB")
    assert len([*(tmp_path / "source").glob("*.safetensors")]) > 1
    # Of float32, whose scales are stored as float32.
    target = tmp_path / "new"
    assert run("quantize", str(tmp_path / "source"), str(target)).status == 0
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert files == sorted(each.name for each in target.glob("*.safetensors"))
    for name, file in index["weight_map"].items():
        with safe_open(target / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(
        each.nbytes for each in tensors_of(target).values()
    )
    found, key = state_of(target), "model.layers.0.self_attn.o_proj.weight"
    assert found[key].equal(rounded(model.state_dict()[key], Rounding(8)))


def test_experts_are_quantised_and_their_router_is_not(
    run: Run, mixture: Path, tmp_path: Path
) -> None:
    ran = run(
        *("quantize", str(mixture), str(tmp_path / "new"), "--format", "int4", "--group", "32"),
        "--json",
    )
    assert ran.status == 0, ran
    report = json.loads(ran.stdout)
    assert len(report["layers"]) == 4 + 3 * 4
    assert report["kept"].keys() == {"lm_head", "model.layers.0.mlp.gate"}
    found, wanted = state_of(tmp_path / "new"), state_of(mixture)
    experts = "model.layers.0.mlp.experts"
    down = torch.stack([rounded(each, Rounding(4, 32)) for each in wanted[f"{experts}.down_proj"]])
    assert found[f"{experts}.down_proj"].equal(down)
    assert found["model.layers.0.mlp.gate.weight"].equal(wanted["model.layers.0.mlp.gate.weight"])
    codes = load(tmp_path / "new").module.get_submodule(f"{experts}.down_proj")
    assert type(codes) is ExpertCodes
    assert all(codes.unpacked(index).to(down.dtype).equal(each) for index, each in enumerate(down))


def test_layers_whose_inputs_fill_no_groups_stay_and_are_named(run: Run, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source", "llama", torch.float16, intermediate_size=72)
    ran = run("quantize", str(source), str(tmp_path / "new"), "--group", "32")
    assert ran.status == 0, ran
    why = "not quantised (72 inputs are no multiple of 32): model.layers.0.mlp.down_proj"
    assert why in ran.stdout
    ignored = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in ignored["ignore"]


NOTES = [
    ([], "vLLM reads this folder on GPUs alone; on CPUs it needs --activation-bits 8"),
    (["--zero-points"], "CompressedTensorsConfig(dequantize=True)"),
    (["--ignore", "*.k_proj"], "q_proj, model.layers.0.self_attn.k_proj"),
]


@pytest.mark.parametrize(("options", "hint"), NOTES)
def test_what_other_programs_need_is_said(
    options: list[str], hint: str, run: Run, plain: Path, tmp_path: Path
) -> None:
    ran = run("quantize", str(plain), str(tmp_path / "new"), *options)
    assert (ran.status, hint in ran.stderr) == (0, True), ran


# --- what is refused ----------------------------------------------------------------------------

REFUSED = [
    (["--group", "48"], "--group must be 32, 64 or 128; got 48"),
    (["--activation-bits", "4"], "--activation-bits must be 8 or 16"),
    (["--activation-bits", "8", "--format", "int4"], "needs --format int8"),
    (["--ignore", "*.upproj"], "'*.upproj' matches no linear layer"),
    (["--ignore", "*"], "has no linear layer to quantise (--ignore, output layer)"),
    (["--group", "128"], "has no linear layer to quantise (64 inputs are no multiple of 128"),
]


@pytest.mark.parametrize(("options", "hint"), REFUSED)
def test_options_without_meaning_are_refused(
    options: list[str], hint: str, run: Run, plain: Path, tmp_path: Path
) -> None:
    assert_refused(run("quantize", str(plain), str(tmp_path / "new"), *options), hint)
    assert not [*tmp_path.iterdir()]


def test_a_target_that_is_there_or_within_the_source_is_refused(
    run: Run, plain: Path, tmp_path: Path
) -> None:
    for target, hint in ((tmp_path, "is there already"), (plain / "new", "is within")):
        assert_refused(run("quantize", str(plain), str(target)), hint)
    assert not (plain / "new").exists()


def changed(source: Path, folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A copy of a folder with other tensors and fields."""
    shutil.copytree(source, folder)
    save_file(tensors_of(source) | tensors, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_sources_that_can_not_be_quantised_are_refused(
    run: Run, plain: Path, tmp_path: Path
) -> None:
    def refused(source: Path | str, *hints: str) -> None:
        assert_refused(run("quantize", str(source), str(tmp_path / "new")), *hints)
        assert not (tmp_path / "new").exists()

    refused("/nowhere", "there is no such folder")
    write_gguf(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", "only a folder in Transformers' format")
    assert run("quantize", str(plain), str(tmp_path / "done")).status == 0
    refused(tmp_path / "done", "is quantised already (quant_method compressed-tensors)")
    layer = "model.layers.0.mlp.up_proj.weight"
    codes = {layer: torch.zeros(96, 64, dtype=torch.float8_e4m3fn)}
    refused(changed(plain, tmp_path / "codes", codes), layer, "is quantised already")
    broken = tensors_of(plain)[layer].clone()
    broken[3, 3] = torch.nan
    refused(
        changed(plain, tmp_path / "nan", {layer: broken}), layer[:-7], "infinite or not numbers"
    )
    tiny = {layer: torch.full((96, 64), 2.0**-24)}
    half = changed(plain, tmp_path / "tiny", tiny, dtype="float16")
    refused(half, "too small for float16; save the model in bfloat16")
    cut = changed(plain, tmp_path / "cut", {})
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(cut, "is cut off or no safetensors file")
    (cut / "model.safetensors").rename(cut / "pytorch_model.bin")
    refused(cut, "has no weights in safetensors' format")
    fused = make_folder(
        tmp_path / "fused",
        "llama4_text",
        torch.bfloat16,
        no_rope_layers=[1],
        interleave_moe_layer_step=1,
    )
    refused(fused, "holds all experts of a layer in one tensor", "--ignore '*.experts.*'")


def test_experts_in_one_tensor_can_be_left_as_they_are(run: Run, tmp_path: Path) -> None:
    fused = make_folder(
        tmp_path / "fused", "gpt_oss", torch.bfloat16, layer_types=["full_attention"]
    )
    ran = run("quantize", str(fused), str(tmp_path / "new"), "--ignore", "*.experts.*")
    assert ran.status == 0, ran
    config = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert r"re:model\.layers\.0\.mlp\.experts\..*" in config["ignore"]
    found, wanted = state_of(tmp_path / "new"), state_of(fused)
    key = "model.layers.0.mlp.experts.down_proj"
    assert found[key].equal(wanted[key])


def test_experts_are_quantised_all_or_none(run: Run, mixture: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "new")
    ran = run("quantize", str(mixture), target, "--ignore", "*.experts.1.*", "--group", "32")
    assert_refused(ran, "some of the matrices of model.layers.0.mlp.experts.", "all or none")
    ran = run("quantize", str(mixture), target, "--zero-points", "--group", "32")
    assert_refused(ran, "zero points Transformers can't read")


def test_a_failure_leaves_no_folder(
    run: Run, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(folder, "save_file", full)
        assert_refused(run("quantize", str(plain), str(target)), "No space left on device")
    assert not [*tmp_path.iterdir()]
    # What a killed command leaves is removed by the next one.
    (tmp_path / ".new.partial" / "new").mkdir(parents=True)
    (tmp_path / ".new.partial" / "new" / "0.part").write_text("half a shard")
    assert run("quantize", str(plain), str(target)).status == 0
    assert [each.name for each in tmp_path.iterdir()] == ["new"]
    assert not (target / "0.part").exists()


def test_too_little_space_is_said_before_anything_is_written(
    run: Run, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    ran = run("quantize", str(plain), str(tmp_path / "new"))
    assert_refused(ran, "needs", "and 1.0 kB are free")
    assert not [*tmp_path.iterdir()]
