"""Multi-head latent attention with the latent in the KV cache, against the keys and values of all
heads, in alternation.

    python benchmarks/latent.py [--models MiniCPM3,GLM-4.7-Flash] [--repeat 5] [--json FILE]

Random weights in the shapes of the models' attention, in two layers whose MLPs are small, so that
attention with its projections takes nearly all of the time:

    decode      one sequence, a token per step, 4,096 tokens before it
    decode 8    eight such sequences
    prefill     a prompt of 512 tokens, and one of 4,096, in steps of 512

The peer is `engine.latent_attention: off` in the same run; `x` is the median of the ratios within a
repetition. Bytes per token are of the whole model in bfloat16.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from cores import BLOCK_SIZE, blocks_for, new_sequence, step_plan
from harness import median_ratio, options, print_table, progress, record, rotated, timed
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.kv_cache import block_bytes

ENDLESS = SamplingParams(temperature=1.0, max_tokens=10_000)
CHUNK, CONTEXT, SEQUENCES, STEPS = 512, 4_096, 8, 4
LAYERS = 2

SHAPES: dict[str, tuple[str, int, dict[str, int]]] = {
    "MiniCPM3": ("minicpm3", 62, {}),
    "GLM-4.7-Flash": ("glm4_moe_lite", 47, {}),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        27,
        {"hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": 0},
    ),
    "DeepSeek-V3": ("deepseek_v3", 61, {}),
}
"""Kind of model, layers of the whole one, and widths other than the configuration's own."""


def make_model(kind: str, widths: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return two layers of a model with random weights."""
    changes = {name: value or None for name, value in widths.items()}
    if "num_attention_heads" in changes:
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    config = CONFIG_MAPPING[kind](
        num_hidden_layers=LAYERS,
        vocab_size=1_024,
        intermediate_size=512,
        first_k_dense_replace=LAYERS,
        mlp_layer_types=["dense"] * LAYERS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **changes,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


class Work:
    """An executor with sequences of `CONTEXT` tokens."""

    def __init__(self, module: Any, latent: str) -> None:
        """`latent`: `engine.latent_attention`."""
        model = wrap_model(module, CONTEXT + 64, latent_attention=latent)
        self.token_bytes = block_bytes(model, 1) // LAYERS
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_batch_size=SEQUENCES,
            kv_cache_bytes=1 << 40,
            deterministic=False,
            latent_attention=latent,  # type: ignore[arg-type]
        )
        blocks = SEQUENCES * blocks_for(CONTEXT + 64)
        self._core = ExecutorCore(config, model=model, num_blocks=blocks)

    def prefill(self) -> list[float]:
        """Return the seconds of each chunk of a prompt."""
        self._core.reset()
        self._step = 0
        return self._fill(0)

    def decode(self, sequences: int) -> float:
        """Return the seconds of a step; `prefill` has run."""
        for index in range(1, sequences):
            self._fill(index)
        return timed(lambda: [self._run(range(sequences), 1) for _ in range(STEPS)]) / STEPS

    def _fill(self, index: int) -> list[float]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(5, 1_000, (CONTEXT,), generator=generator).tolist()
        count = blocks_for(CONTEXT + 64)
        own = range(index * count, (index + 1) * count)
        new = new_sequence(index, index, tokens, own, ENDLESS)
        parts = [(new,), *((),) * (CONTEXT // CHUNK - 1)]
        return [timed(lambda part=part: self._run([index], CHUNK, part)) for part in parts]

    def _run(self, ids: Any, count: int, new: Any = ()) -> None:
        self._step += 1
        self._core.execute(step_plan(self._step, tuple(ids), count, new))


def measure(name: str, dtype: torch.dtype, repeat: int) -> dict[str, dict[str, Any]]:
    """Return the medians of each workload."""
    kind, layers, widths = SHAPES[name]
    times: dict[str, dict[str, list[float]]] = {"auto": {}, "off": {}}
    sizes: dict[str, int] = {}
    for repetition in range(repeat + 1):
        for latent in rotated(times, repetition):
            # A module's latents are kept for good, so each has its own.
            work = Work(make_model(kind, widths, dtype), latent)
            sizes[latent] = work.token_bytes * layers * 2 // dtype.itemsize
            chunks = work.prefill()
            found = {
                "prefill 512": chunks[0],
                "prefill 4,096": sum(chunks),
                "decode": work.decode(1),
                "decode 8": work.decode(SEQUENCES),
            }
            if repetition:
                for each, seconds in found.items():
                    times[latent].setdefault(each, []).append(seconds * 1e3 / LAYERS)
        progress(repetition, repeat)
    table: dict[str, dict[str, Any]] = {
        each: {
            "latent": statistics.median(own),
            "expanded": statistics.median(times["off"][each]),
            "ratio": median_ratio(own, times["off"][each]),
        }
        for each, own in times["auto"].items()
    }
    small, large = sizes["auto"], sizes["off"]
    table["bytes"] = {"latent": small, "expanded": large, "ratio": small / large}
    return table


def main() -> None:
    parser = options(__doc__, repeat=3, models=[*SHAPES], dtypes=["float32", "bfloat16"])
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        for name in arguments.models:
            label = f"{name}, {dtype}"
            results[label] = measure(name, getattr(torch, dtype), arguments.repeat)
            columns = {"latent": "{latent:.1f}", "expanded": "{expanded:.1f}", "x": "{ratio:.2f}"}
            print_table(columns, results[label], f"{label}, ms per layer")
    record(arguments, threads=torch.get_num_threads(), per_layer_ms=results)


if __name__ == "__main__":
    main()
