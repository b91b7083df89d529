"""Models from GGUF files: the same weights and tokens as Transformers' own, which unpacks them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from nano_inference.config import EngineConfig, ModelError, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.runner.linear.formats.gguf import KINDS as KEPT
from nano_inference.text import gguf as our_gguf
from nano_inference.text.gguf_header import read_header

from ....gguf_files import nothing, write_gguf
from ....soaking import in_soak
from ..models import load, make_model
from ..plans import Generation, Planner
from ..references import generate
from .test_loading import same_weights

I8 = gguf.GGMLQuantizationType.I8
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
PROMPTS = ([28, 27, 184, 124, 21, 24, 185], [5, 6, 7], [100])
NEW_TOKENS = 24
PLAIN = ("norm.weight", "bias")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(our_gguf, "_cache_folder", lambda: tmp_path / "kept")


def generated(
    core: ExecutorCore, prompts: Sequence[list[int]], new_tokens: int = NEW_TOKENS
) -> list[Generation]:
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    generations = [Generation(i, prompt, greedy) for i, prompt in enumerate(prompts)]
    Planner(core).run(generations)
    return generations


def core_of(path: Path, **settings: Any) -> ExecutorCore:
    fixed: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "device": "cpu"}
    return ExecutorCore(EngineConfig(model_path=str(path), **fixed, **settings))


def ours(path: Path, **settings: Any) -> list[list[int]]:
    core = core_of(path, dtype="float32", **settings)
    return [generation.token_ids for generation in generated(core, PROMPTS)]


class AllTypes:
    """Each type in turn, for the matrices of a file."""

    def __init__(self) -> None:
        self.taken: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        kinds = [*KEPT, "TQ2_0"]
        return self.taken.setdefault(name, kinds[len(self.taken) % len(kinds)])


@pytest.fixture(scope="module")
def all_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with matrices of all types, also the embedding and the output layer."""
    folder = tmp_path_factory.mktemp("all-types")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    make_model("llama", **sizes, head_dim=64).save_pretrained(folder / "source")
    kinds = AllTypes()
    path = write_gguf(
        folder / "m.gguf",
        kinds,
        folder=folder / "source",
        architecture="llama",
        tokenizer=nothing,
    )
    assert {*kinds.taken.values()} == {*KEPT, "TQ2_0"}
    return path


def test_logits_of_each_type_are_those_of_unpacked_weights(all_types: Path) -> None:
    options: dict[str, Any] = {"gguf_file": "m.gguf", "dtype": torch.float32}
    wanted = AutoModelForCausalLM.from_pretrained(
        all_types.parent, attn_implementation="eager", **options
    )
    loaded = load(all_types, dtype="float32")
    assert loaded.checkpoint_format == f"GGUF {', '.join(sorted(KEPT))}"
    assert loaded.checkpoint_notes == (
        "tensors in TQ2_0 are unpacked to plain weights, some or all",
    )
    # All but the one in TQ2_0, with the embedding and the output layer.
    assert sum(hasattr(each, "form") for each in loaded.module.modules()) == 15
    loaded.module.set_attn_implementation("eager")
    tokens = torch.tensor([PROMPTS[0]])
    found, logits = (model(input_ids=tokens).logits for model in (loaded.module, wanted))
    assert logits.std() > 1
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-3)


def test_bits_are_the_same_in_any_batch(all_types: Path) -> None:
    core = core_of(all_types, deterministic=True)
    together = generated(core, PROMPTS, 6)
    for generation, prompt in zip(together, PROMPTS, strict=True):
        (alone,) = generated(core_of(all_types, deterministic=True), [prompt], 6)
        assert alone.logprobs == generation.logprobs
        assert alone.token_ids == generation.token_ids


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q4_0")
    place = read_header(path).tensors["blk.1.ffn_up.weight"].start
    with path.open("r+b") as file:
        file.seek(place)
        file.write(np.float16("nan").tobytes())
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj .* scales .* not numbers"):
        load(path)


def test_codes_of_codes_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q4_0")
    with pytest.raises(ModelError, match=r"engine.quantization int8: .* already \(Q4_0\)"):
        load(path, quantization="int8")


def test_codes_are_made_of_a_file_of_floats(tmp_path: Path) -> None:
    loaded = load(write_gguf(tmp_path / "m.gguf", "F16"), quantization="int8")
    assert loaded.module.model.layers[0].mlp.up_proj.form.bits == 8


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
    plain = [each for name, each in loaded.module.named_parameters() if name.endswith(PLAIN)]
    assert {parameter.dtype for parameter in plain} == {expected}
    assert loaded.dtypes.weights == expected


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", "Q4_0")
    capfd.readouterr()  # the writer's
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

    monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", None)
    path = write_gguf(tmp_path / "m.gguf", "F16", change=change)
    with pytest.raises(ModelError, match=r"describes a model of \d+ parameters, .* have \d+"):
        load(path)
