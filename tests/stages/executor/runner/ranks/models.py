"""Small models that four ranks can share, and their logits through the runner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from nano_inference.config import EngineConfig
from nano_inference.stages.executor import LoadedModel
from nano_inference.stages.executor.runner.batch import IntArray, Rows
from nano_inference.stages.executor.runner.interface import ModelRunner, make_runner
from nano_inference.stages.executor.runner.ranks.group import OneRank, RankGroup
from nano_inference.stages.executor.runner.sharded_model import load_sharded

from ...models import VOCAB, make_model
from .group import on_ranks

_FOUR: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_WIDE: dict[str, Any] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    **_EXPERTS,
}
"""Experts whose routers have biases in float32, in a model of bfloat16."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"hidden_size": 64, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 8, **_EXPERTS}),
    "olmoe": ("olmoe", {"num_experts": 8, "hidden_size": 64, **_EXPERTS}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            **_EXPERTS,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 32, **_EXPERTS}),
}
"""Architecture and settings by name."""

WITH_FLOAT32: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_WIDE,
            "head_dim": 16,
            "num_key_value_heads": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "glm4_moe": ("glm4_moe", {**_WIDE, "n_shared_experts": 1}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
}
"""Models of which some weights stay in float32, likewise."""

WITH_EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

CONFIG = EngineConfig(
    block_size=4, kv_cache_bytes=1 << 22, max_model_len=64, device="cpu", huge_pages="off"
)
NUM_BLOCKS = 64

Batch = tuple[Rows, IntArray, IntArray]


def make_whole_model(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model of Transformers' own."""
    kind, settings = (MODELS | WITH_FLOAT32)[name]
    return make_model(kind, seed=seed, **{**_FOUR, **settings, **changes})


def save(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Save a random model; return the folder."""
    make_whole_model(name, seed=seed, **changes).save_pretrained(folder)
    return folder


def config_of(folder: Path, size: int = 1, *, invariant: bool = False, **changes: Any) -> Any:
    """Settings of ranks."""
    settings = {"deterministic": True} if invariant else {"deterministic": False}
    return replace(
        CONFIG,
        model_path=str(folder),
        tensor_parallel=size,
        rank_invariant=invariant,
        **{**settings, **changes},
    )


def make_batches(count: int, seed: int = 0) -> list[Batch]:
    """Random steps of sequences that go on from step to step, so that they read the cache."""
    random = np.random.default_rng(seed)
    batches: list[Batch] = []
    lengths = np.zeros(4, dtype=np.int64)
    tables = np.arange(4 * 16).reshape(4, 16)
    for _ in range(count):
        chosen = np.sort(random.permutation(4)[: random.integers(1, 5)])
        lengths[lengths > 40] = 0
        counts = np.where(random.random(len(chosen)) < 0.5, 1, random.integers(1, 20, len(chosen)))
        order = np.argsort(counts > 1, kind="stable")
        chosen, counts = chosen[order], counts[order]
        decodes = int((counts == 1).sum())
        longest = np.argsort(-lengths[chosen[:decodes]], kind="stable")
        chosen[:decodes] = chosen[:decodes][longest]
        rows = Rows(lengths[chosen].copy(), counts, tables[chosen], decodes)
        ids = random.integers(0, VOCAB, int(counts.sum()))
        batches.append((rows, ids, np.cumsum(counts) - 1))
        lengths[chosen] += counts
    return batches


def logits_of(runner: ModelRunner, batches: list[Batch]) -> list[Tensor]:
    """Logits of the last token of each row, step by step."""
    found = []
    for batch in batches:
        inputs = runner.builder.build(*batch)
        with runner.active():
            found.append(runner.forward(inputs))
    return found


def hash_of(logits: list[Tensor]) -> str:
    """SHA-256 over bits."""
    digest = hashlib.sha256()
    for each in logits:
        digest.update(each.contiguous().numpy().tobytes())
    return digest.hexdigest()


Change = Callable[[LoadedModel, RankGroup], None]


def run_ranks(
    config: EngineConfig, size: int, batches: list[Batch], change: Change | None = None
) -> list[Tensor]:
    """Logits of rank 0, which are those of all; `change` is called before the first step."""
    work = partial(_run_rank, config, batches, change)
    results = [work(OneRank())] if size == 1 else on_ranks(size, work)
    for other in results[1:]:
        assert hash_of(other) == hash_of(results[0])
    return results[0]


def _run_rank(
    config: EngineConfig, batches: list[Batch], change: Change | None, group: RankGroup
) -> list[Tensor]:
    model = load_sharded(config, group)
    runner = make_runner(config, model, NUM_BLOCKS)
    if change is not None:
        change(model, group)
    return logits_of(runner, batches)


def difference(left: list[Tensor], right: list[Tensor]) -> float:
    """The relative difference of logits: the median of rows, since rounding may choose other
    experts for a few."""
    a, b = torch.cat(left), torch.cat(right)
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).median())
