"""Multi-head latent attention with the latent in the KV cache, against the keys and values of all
heads, in alternation.

    python benchmarks/latent.py [--models MiniCPM3,GLM-4.7-Flash] [--repeat 5] [--json FILE]

Random weights in the shapes of the models' attention, in two layers whose MLPs are small, so that
attention with its projections takes nearly all of the time:

    decode      one sequence, a token per step, 4,096 tokens before it
    decode 4    four such sequences
    prefill     512 tokens of a prompt, its first ones, and those after 4,096

Times are processor time, of all threads. The peer is `engine.latent_attention: off` in the same
run; `x` is the median of the ratios within a repetition. Bytes per token are of the whole model in
bfloat16.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cores import BLOCK_SIZE, blocks_for, new_sequence, step_plan
from harness import median_ratio, options, print_table, progress, record, rotated
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.kv_cache import block_bytes

ENDLESS = SamplingParams(temperature=1.0, max_tokens=10_000)
CHUNK, CONTEXT, SEQUENCES, STEPS = 512, 4_096, 4, 4
LAYERS, LONGEST = 2, CONTEXT + CHUNK + BLOCK_SIZE

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
        max_position_embeddings=8_192,
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
    """An executor whose cache has random numbers."""

    def __init__(self, module: Any, latent: str) -> None:
        """`latent`: `engine.latent_attention`."""
        model = wrap_model(module, LONGEST, latent_attention=latent)
        self.token_bytes = block_bytes(model, 1) // LAYERS
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_batch_size=SEQUENCES,
            deterministic=False,
            latent_attention=latent,  # type: ignore[arg-type]
        )
        self._core = ExecutorCore(config, model=model, num_blocks=SEQUENCES * blocks_for(LONGEST))
        for tensor in self._core.cache.tensors:
            tensor.normal_()

    def decode(self, sequences: int) -> float:
        """Return the seconds of a step with `CONTEXT` tokens before it."""
        ids = range(sequences)
        self._start(ids, CONTEXT, 1)
        return _processor_s(lambda: [self._run(ids, 1) for _ in range(STEPS)]) / STEPS

    def prefill(self, num_cached: int) -> float:
        """Return the seconds of a chunk of a prompt, after so many tokens."""
        return _processor_s(lambda: self._start(range(1), num_cached, CHUNK))

    def _start(self, ids: range, num_cached: int, count: int) -> None:
        self._core.reset()
        self._step = 0
        generator = torch.Generator().manual_seed(0)
        blocks = blocks_for(LONGEST)
        new = []
        for index in ids:
            tokens = torch.randint(5, 1_000, (num_cached + count,), generator=generator).tolist()
            own = range(index * blocks, (index + 1) * blocks)
            new.append(new_sequence(index, index, tokens, own, ENDLESS, num_cached=num_cached))
        self._run(ids, count, tuple(new))

    def _run(self, ids: range, count: int, new: Any = ()) -> None:
        self._step += 1
        self._core.execute(step_plan(self._step, tuple(ids), count, new))


def _processor_s(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(name: str, dtype: torch.dtype, repeat: int) -> dict[str, dict[str, Any]]:
    """Return the medians of each workload."""
    kind, layers, widths = SHAPES[name]
    times: dict[str, dict[str, list[float]]] = {"auto": {}, "off": {}}
    sizes: dict[str, int] = {}
    # A module keeps its latents for good, so each has its own.
    works = {latent: Work(make_model(kind, widths, dtype), latent) for latent in times}
    for repetition in range(repeat + 1):
        for latent in rotated(times, repetition):
            work = works[latent]
            sizes[latent] = work.token_bytes * layers * 2 // dtype.itemsize
            found = {
                "decode": work.decode(1),
                f"decode {SEQUENCES}": work.decode(SEQUENCES),
                f"prefill {CHUNK}": work.prefill(0),
                f"prefill {CHUNK} after {CONTEXT:,}": work.prefill(CONTEXT),
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
