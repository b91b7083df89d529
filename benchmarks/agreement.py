"""The difference between the trainer's logprobs and those that the engine reported with its tokens.

Generates from a model, then computes the same sequences with another copy of it as a trainer does:
Transformers' forward pass over complete sequences in one padded batch. Prints the difference
(engine minus trainer) per sampled token: its mean, the 99th percentile and maximum of its
magnitude, and an estimate of KL(engine || trainer).

In deterministic mode, the last rows use `ExactForward` as the trainer, and must be exactly 0.

    python benchmarks/agreement.py [--prompts 16] [--samples 4] [--tokens 64] [--json FILE]
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Table, options, record
from random_models import TWO_LAYERS, random_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from nano_inference import (
    EngineConfig,
    ExactForward,
    InferenceEngine,
    SamplingParams,
    TrainingSample,
)

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from bundled_models import tasks

TINY = EngineConfig().model_folder

Forward = Callable[[Sequence[TrainingSample]], list[Tensor]]
"""A function from samples to the logprobs of each completion."""


def compare(samples: Sequence[TrainingSample], trained: Sequence[Tensor]) -> dict[str, float]:
    """Return figures of engine minus trainer over all sampled tokens.

    `p99` and `largest` are of the magnitude, `equal` is the share of tokens with the same bits, and
    `kl` the mean of trainer / engine - 1 - log(trainer / engine): the k3 estimate of KL(engine ||
    trainer). The k1 estimate is `mean`.
    """
    engine = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
    trainer = torch.cat(list(trained))
    difference = engine.double() - trainer.double()
    size = difference.abs()
    return {
        "tokens": len(engine),
        "mean": difference.mean().item(),
        "mean_abs": size.mean().item(),
        "p99": size.quantile(0.99).item(),
        "largest": size.max().item(),
        "kl": (torch.exp(-difference) - 1 + difference).mean().item(),
        "equal": (engine == trainer).double().mean().item(),
    }


def plain_forward(module: Any) -> Forward:
    """Return a trainer's forward pass: one padded batch, log-softmax in float32."""

    def forward(samples: Sequence[TrainingSample]) -> list[Tensor]:
        tokens = [torch.tensor((*s.prompt_tokens, *s.completion_tokens)) for s in samples]
        padded = pad_sequence(tokens, batch_first=True)
        logits = module(input_ids=padded[:, :-1], use_cache=False).logits.float()
        found = torch.log_softmax(logits, -1).gather(-1, padded[:, 1:, None])[:, :, 0]
        return [
            row[len(s.prompt_tokens) - 1 : len(s.prompt_tokens) + len(s.completion_tokens) - 1]
            for row, s in zip(found, samples, strict=True)
        ]

    return forward


def exact_forward(module: Any) -> Forward:
    """Return the same through `ExactForward`."""
    exact = ExactForward(module)

    def forward(samples: Sequence[TrainingSample]) -> list[Tensor]:
        found = exact.logprobs([s.prompt_tokens + s.completion_tokens for s in samples])
        return [row[len(s.prompt_tokens) - 1 :] for row, s in zip(found, samples, strict=True)]

    return forward


def random_qwen2(folder: Path) -> Path:
    """Write a model in the shape of two layers of Qwen2.5-0.5B with random weights."""
    shape = TWO_LAYERS | {"eos_token_id": 0, "initializer_range": 0.05}
    random_model(shape, torch.float32).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(folder)
    return folder


def make_prompts(count: int) -> list[str]:
    """Return prompts of all the bundled model's tasks for completions, so that lengths differ."""
    rng = random.Random(0)
    known = [task for task in tasks.TASKS if "plain" in tasks.forms(task)]
    return [tasks.draw(rng.choice(known), "plain", "train", rng).prompt for _ in range(count)]


def roll_out(folder: Path, dtype: Any, deterministic: bool, args: Any) -> list[TrainingSample]:
    config = EngineConfig(model_path=str(folder), dtype=dtype, deterministic=deterministic)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=1)
    with InferenceEngine(config) as engine:
        return engine.generate(make_prompts(args.prompts), params, args.samples)


def measure(folder: Path, dtype: str, args: Any) -> dict[str, dict[str, float]]:
    """Return the figures of one model in one dtype."""

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    usual, deterministic = (roll_out(folder, dtype, each, args) for each in (False, True))
    with torch.no_grad():
        plain, exact = plain_forward(load()), exact_forward(load())
        pairs = {
            "usual engine, plain trainer": (usual, plain),
            "deterministic engine, plain trainer": (deterministic, plain),
            "deterministic engine, exact trainer": (deterministic, exact),
        }
        return {
            name: compare(samples, in_parts(forward, samples))
            for name, (samples, forward) in pairs.items()
        }


def in_parts(forward: Forward, samples: Sequence[TrainingSample]) -> list[Tensor]:
    """Apply it in batches of 32, which limits memory."""
    starts = range(0, len(samples), 32)
    return [row for start in starts for row in forward(samples[start : start + 32])]


COLUMNS = {
    "tokens": "{tokens}",
    "mean": "{mean:.1e}",
    "mean abs": "{mean_abs:.1e}",
    "p99": "{p99:.1e}",
    "max": "{largest:.1e}",
    "KL (k3)": "{kl:.1e}",
    "same bits": "{equal:.1%}",
}


def main() -> None:
    threads = (1, "of torch")
    args = options(__doc__, prompts=16, samples=4, tokens=64, threads=threads).parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    results: dict[str, dict[str, float]] = {}
    table = Table(COLUMNS, "engine minus trainer, per token", 64)
    with tempfile.TemporaryDirectory() as folder:
        models = {"bundled": TINY, "two layers of 0.5B": random_qwen2(Path(folder))}
        for name, path in models.items():
            for dtype in ("float32", "bfloat16"):
                for pair, found in measure(path, dtype, args).items():
                    label = f"{name}, {dtype}, {pair}"
                    results[label] = found
                    table.row(label, found)
    record(args, differences=results)
    exact = [found for label, found in results.items() if label.endswith("exact trainer")]
    if any(found["equal"] < 1 for found in exact):
        sys.exit("the exact trainer's logprobs are not the engine's")


if __name__ == "__main__":
    main()
