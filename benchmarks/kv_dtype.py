"""Keys and values in int8 and fp8 against the activations' dtype: speed, and what they change.

    python benchmarks/kv_dtype.py [--repeat 5] [--json FILE]

Speed: shape S in bfloat16, a token per step and sequence, `CONTEXT` tokens before it, one sequence
and 16, in alternation. Times are processor time of one thread; `x` is the median of the ratios to
`auto` within a repetition.

Changes: the bundled model in bfloat16 on held-out examples of its tasks: right answers, perplexity
of the wanted answers, mean |difference| of their logprobs from those with `auto`, and the share of
greedy tokens, of `GREEDY` after each of some prompts, that are as with `auto`, up to the first that
differs ("equal") and at the same place ("same place").
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cores import BLOCK_SIZE, blocks_for, new_sequence, step_plan
from harness import median_ratio, options, print_table, progress, record, rotated
from random_models import random_model
from workloads import SHAPES

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.executor import ExecutorCore, wrap_model
from nano_inference.stages.executor.runner.kv_codes import pack
from nano_inference.text.tokenizer import find_tokenizer

sys.path.append(str(Path(__file__).parents[1]))
from examples.bundled_models import tasks
from examples.bundled_models.evaluation import kinds_of
from examples.bundled_models.settings import TrainingSettings
from examples.bundled_models.tokenizer import encode, prompt_text

KV_DTYPES = ("auto", "int8", "fp8")
ENDLESS = SamplingParams(temperature=1.0, max_tokens=10_000)
CONTEXT, SEQUENCES, STEPS = 4_096, 16, 4
LONGEST = CONTEXT + BLOCK_SIZE * 2
GREEDY, GREEDY_PROMPTS = 256, 128


class Work:
    """An executor whose cache has random numbers."""

    def __init__(self, module: Any, kv_dtype: str) -> None:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_batch_size=SEQUENCES,
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
        )
        model = wrap_model(module, LONGEST)
        self.core = ExecutorCore(config, model=model, num_blocks=SEQUENCES * blocks_for(LONGEST))
        cache = self.core.cache
        for layer in range(len(model.layers)):
            for which, tensor in enumerate((cache.keys[layer], cache.values[layer])):
                numbers = torch.randn(tensor.shape)
                if cache.codes is None:
                    tensor.copy_(numbers)
                else:
                    codes, scales = pack(numbers, tensor.dtype)
                    tensor.copy_(codes)
                    cache.codes.layers[layer][which + 2].copy_(scales)

    def decode(self, sequences: int, context: int = CONTEXT) -> float:
        """Return the processor's seconds of a step."""
        core, ids = self.core, tuple(range(sequences))
        core.reset()
        blocks = blocks_for(LONGEST)
        new = []
        for index in ids:
            own = range(index * blocks, (index + 1) * blocks)
            tokens = [5 + index] * (context + 1)
            new.append(new_sequence(index, index, tokens, own, ENDLESS, num_cached=context))
        core.execute(step_plan(1, ids, 1, tuple(new)))
        start = time.process_time()
        for step in range(STEPS):
            core.execute(step_plan(step + 2, ids, 1, ()))
        return (time.process_time() - start) / STEPS


def measure_speed(repeat: int) -> dict[str, dict[str, Any]]:
    """Return the medians of each workload."""
    torch.set_num_threads(1)
    module = random_model(SHAPES["S"], torch.bfloat16)
    works = {kv_dtype: Work(module, kv_dtype) for kv_dtype in KV_DTYPES}
    times: dict[str, dict[str, list[float]]] = {}
    for repetition in range(repeat + 1):
        for kv_dtype in rotated(KV_DTYPES, repetition):
            found = {
                "1 sequence, short": works[kv_dtype].decode(1, 16),
                "1 sequence": works[kv_dtype].decode(1),
                f"{SEQUENCES} sequences, short": works[kv_dtype].decode(SEQUENCES, 16),
                f"{SEQUENCES} sequences": works[kv_dtype].decode(SEQUENCES),
            }
            for name, seconds in found.items():
                if repetition:
                    times.setdefault(name, {}).setdefault(kv_dtype, []).append(seconds * 1e3)
        progress(repetition, repeat)
    table = {}
    for name, found in times.items():
        table[name] = {each: statistics.median(values) for each, values in found.items()} | {
            f"{each}_x": median_ratio(values, found["auto"]) for each, values in found.items()
        }
    table["bytes of a token"] = {
        kv_dtype: work.core.cache.token_bytes for kv_dtype, work in works.items()
    }
    return table


def held_out() -> Iterator[Any]:
    """Yield examples of every kind that the bundled model was not trained on."""
    settings = TrainingSettings()
    for task, form in kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS):
        for example in tasks.distinct(task, form, "heldout", 60, settings.seed):
            if not tasks.is_quoted(example):
                yield example


def measure_changes() -> dict[str, dict[str, Any]]:
    """Return the figures of each KV dtype."""
    examples = list(held_out())
    table: dict[str, dict[str, Any]] = {}
    logprobs: dict[str, list[float]] = {}
    greedy: dict[str, list[tuple[int, ...]]] = {}
    for kv_dtype in KV_DTYPES:
        config = EngineConfig(dtype="bfloat16", max_model_len=1_024, kv_dtype=kv_dtype)  # type: ignore[arg-type]
        with InferenceEngine(config) as engine:
            tokenizer: Any = find_tokenizer(config.model_folder)
            prompts = [encode(tokenizer, prompt_text(tokenizer, each)) for each in examples]
            answers = [encode(tokenizer, each.answer) for each in examples]
            most = max(map(len, answers)) + 2
            samples = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=most))
            ids = [each.completion_tokens for each in samples]
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            right = sum(map(tasks.grade, examples, texts))
            scores = engine.score(prompts, answers)
            logprobs[kv_dtype] = [each for score in scores for each in score]
            step = len(prompts) // GREEDY_PROMPTS
            long = SamplingParams(temperature=0, max_tokens=GREEDY, ignore_eos=True)
            continued = engine.generate(prompts[::step][:GREEDY_PROMPTS], long)
            greedy[kv_dtype] = [each.completion_tokens for each in continued]
        own, base = logprobs[kv_dtype], logprobs["auto"]
        pairs = list(zip(greedy[kv_dtype], greedy["auto"], strict=True))
        table[kv_dtype] = {
            "right": right / len(examples),
            "perplexity": math.exp(-statistics.fmean(own)),
            "difference": statistics.fmean(abs(a - b) for a, b in zip(own, base, strict=True)),
            "equal": statistics.fmean(_equal(*pair) / GREEDY for pair in pairs),
            "place": statistics.fmean(a == b for pair in pairs for a, b in zip(*pair, strict=True)),
        }
    table["examples"] = {"right": len(examples), "perplexity": len(logprobs["auto"])}
    return table


def _equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the number of tokens before the first that differs."""
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return place
    return len(one)


def main() -> None:
    arguments = options(__doc__, repeat=5).parse_args()
    changes = measure_changes()
    columns = {
        "right": "{right:.4f}",
        "perplexity": "{perplexity:.4f}",
        "|difference|": "{difference:.5f}",
        "equal": "{equal:.3f}",
        "same place": "{place:.3f}",
    }
    print_table(columns, changes, "changes")
    speed = measure_speed(arguments.repeat)
    columns = {each: f"{{{each}:.1f}}" for each in KV_DTYPES}
    columns |= {f"{each} x": f"{{{each}_x:.2f}}" for each in KV_DTYPES[1:]}
    print_table(columns, speed, "ms per step")
    record(arguments, changes=changes, speed_ms=speed)


if __name__ == "__main__":
    main()
