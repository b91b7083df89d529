"""A trainer's forward pass gives the bits that a deterministic engine reported, and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    MiniCPM3Config,
    Qwen2Config,
)

from nano_inference import (
    EngineConfig,
    ExactForward,
    InferenceEngine,
    RequestError,
    SamplingParams,
    TrainingSample,
)
from nano_inference.config import ModelError

from .builders import raises

TINY = EngineConfig().model_folder
PROMPTS = ["98 + 25 =", "Story about Ana, a dog and a red ball:", "4", "Tara, 65, is a chef. JSON:"]


def load(folder: Path, dtype: str = "float32") -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))


def roll_out(
    folder: Path, dtype: Literal["float32", "bfloat16"], temperature: float
) -> list[TrainingSample]:
    """Samples of different lengths, some beyond one block of attention's tiles."""
    config = EngineConfig(model_path=str(folder), dtype=dtype, deterministic=True)
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, seed=1, temperature=temperature)
        for length in (5, 90, 1, 140)
    ]
    with InferenceEngine(config) as engine:
        return engine.generate(PROMPTS, params, num_samples_per_prompt=3)


def save_small(folder: Path, kind: Any, **fields: Any) -> Path:
    """Save a model of random weights with the bundled model's tokenizer; return the folder."""
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(folder)
    common = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    common |= {"vocab_size": len(tokenizer), "eos_token_id": 0, "initializer_range": 0.2}
    AutoModelForCausalLM.from_config(kind(**common, **fields)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a sliding window on every other layer."""
    return save_small(
        tmp_path_factory.mktemp("windowed"),
        Qwen2Config,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention"],
    )


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and multi-head latent attention."""
    return save_small(
        tmp_path_factory.mktemp("latent"),
        MiniCPM3Config,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.7), ("bfloat16", 1.0)])
def test_every_bit_is_the_engines(
    dtype: Literal["float32", "bfloat16"], temperature: float
) -> None:
    samples = roll_out(TINY, dtype, temperature)
    check_bits(ExactForward(load(TINY, dtype)), samples, temperature)


def test_every_bit_is_the_engines_with_windows(windowed: Path) -> None:
    check_bits(ExactForward(load(windowed)), roll_out(windowed, "float32", 1.0), 1.0)


def test_every_bit_is_the_engines_with_latents(latent: Path) -> None:
    check_bits(ExactForward(load(latent)), roll_out(latent, "float32", 1.0), 1.0)


def test_a_short_sequence_alone_has_the_bits_of_one_beside_others(windowed: Path) -> None:
    exact = ExactForward(load(windowed))
    (alone,) = exact.logprobs([[5, 6, 7, 8]])
    beside, _ = exact.logprobs([[5, 6, 7, 8], [5] * 90])
    assert alone.tolist() == beside.tolist()


def check_bits(exact: ExactForward, samples: Sequence[TrainingSample], temperature: float) -> None:
    sequences = [sample.prompt_tokens + sample.completion_tokens for sample in samples]
    for found, sample in zip(exact.logprobs(sequences, temperature), samples, strict=True):
        assert found.requires_grad
        sampled = found[len(sample.prompt_tokens) - 1 :]
        assert sampled.tolist() == list(sample.logprobs)


@pytest.mark.parametrize("model", ["tiny", "windowed", "latent"])
def test_gradients_equal_the_plain_model_s(model: str, windowed: Path, latent: Path) -> None:
    folder = {"tiny": TINY, "windowed": windowed, "latent": latent}[model]
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 90, 41)
    sequences = [torch.randint(5, 700, (n,), generator=generator).tolist() for n in lengths]
    weights = [torch.randn(n - 1, generator=generator) for n in lengths]
    exact_module, plain = load(folder), load(folder)

    exact = ExactForward(exact_module).logprobs(sequences)
    sum((row * weight).sum() for row, weight in zip(exact, weights, strict=True)).backward()
    for sequence, weight in zip(sequences, weights, strict=True):
        tokens = torch.tensor([sequence])
        logprobs = torch.log_softmax(plain(input_ids=tokens[:, :-1], use_cache=False).logits, -1)
        (logprobs.gather(-1, tokens[:, 1:, None])[0, :, 0] * weight).sum().backward()

    wanted = dict(plain.named_parameters())
    for name, parameter in exact_module.named_parameters():
        scale = wanted[name].grad.abs().max().item()
        torch.testing.assert_close(
            parameter.grad, wanted[name].grad, rtol=0, atol=1e-5 * max(scale, 1)
        )


def test_sequences_too_short_or_too_long_are_refused() -> None:
    exact = ExactForward(load(TINY), max_model_len=8)
    for sequence in ([1], [5] * 10):
        with pytest.raises(ValueError, match="2 to 9 tokens"):
            exact.logprobs([[1, 2], sequence])
    for prompt, code in (([1.5, 2.0], "invalid_token_ids"), ("abc", "invalid_prompt")):
        with raises(code):
            exact.logprobs([prompt])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="token id 10000000"):
        exact.logprobs([[1, 10**7]])


def test_a_soft_cap_is_refused() -> None:
    shape = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_logit_softcapping=50.0,
    )
    with pytest.raises(ModelError, match="soft cap"):
        ExactForward(AutoModelForCausalLM.from_config(shape))
