"""How far the trainer's logprobs are from those that the engine reported with its tokens.

Generates from a model, then computes the same sequences with another copy of it as a trainer would:
Transformers' forward pass over whole sequences, side by side in one padded batch. Prints the
difference (engine minus trainer) per sampled token: its mean, the 99th percentile and maximum of
its magnitude, and an estimate of KL(engine || trainer).

In deterministic mode, the last rows take `ExactForward` as the trainer, and the goal is exactly 0.

    python benchmarks/agreement.py [--prompts 16] [--samples 4] [--tokens 64] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
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
from nano_inference.models import tasks

TINY = EngineConfig().model_folder

Forward = Callable[[Sequence[TrainingSample]], list[Tensor]]
"""From samples to the logprobs of each one's completion."""


@dataclass(frozen=True)
class Difference:
    """Engine minus trainer, over all sampled tokens.

    Attributes:
        tokens: How many.
        mean: Of the difference.
        mean_abs: Of its magnitude.
        p99: 99th percentile of its magnitude.
        largest: Of its magnitude.
        kl: Mean of trainer / engine - 1 - log(trainer / engine), the k3 estimate of
            KL(engine || trainer). The k1 estimate is `mean`.
        equal: Share of the tokens with the same bits.
    """

    tokens: int
    mean: float
    mean_abs: float
    p99: float
    largest: float
    kl: float
    equal: float


def compare(samples: Sequence[TrainingSample], trained: Sequence[Tensor]) -> Difference:
    """The figures of a rollout."""
    engine = torch.cat([torch.tensor(sample.logprobs) for sample in samples])
    trainer = torch.cat(list(trained))
    difference = engine.double() - trainer.double()
    size = difference.abs()
    return Difference(
        tokens=len(engine),
        mean=difference.mean().item(),
        mean_abs=size.mean().item(),
        p99=size.quantile(0.99).item(),
        largest=size.max().item(),
        kl=(torch.exp(-difference) - 1 + difference).mean().item(),
        equal=(engine == trainer).double().mean().item(),
    )


def plain_forward(module: Any) -> Forward:
    """What a trainer does: one padded batch, log-softmax in float32."""

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
    """The same through `ExactForward`."""
    exact = ExactForward(module)

    def forward(samples: Sequence[TrainingSample]) -> list[Tensor]:
        found = exact.logprobs([s.prompt_tokens + s.completion_tokens for s in samples])
        return [row[len(s.prompt_tokens) - 1 :] for row, s in zip(found, samples, strict=True)]

    return forward


def random_qwen2(folder: Path) -> Path:
    """Writes a model in the shape of two layers of Qwen2.5-0.5B with random weights."""
    shape = TWO_LAYERS | {"eos_token_id": 0, "initializer_range": 0.05}
    random_model(shape, torch.float32).save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    tokenizer.save_pretrained(folder)
    return folder


def make_prompts(count: int) -> list[str]:
    """Of all tasks of the bundled model, so that lengths differ."""
    rng = random.Random(0)
    kinds = [rng.choice(tasks.TASKS) for _ in range(count)]
    return [tasks.draw(kind, "train", rng).prompt for kind in kinds]


def roll_out(folder: Path, dtype: Any, deterministic: bool, args: Any) -> list[TrainingSample]:
    config = EngineConfig(model_path=str(folder), dtype=dtype, deterministic=deterministic)
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=1)
    with InferenceEngine(config) as engine:
        return engine.generate(make_prompts(args.prompts), params, args.samples)


def measure(folder: Path, dtype: str, args: Any) -> dict[str, Difference]:
    """One model in one dtype."""

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    usual = roll_out(folder, dtype, False, args)
    deterministic = roll_out(folder, dtype, True, args)
    with torch.no_grad():
        plain, exact = plain_forward(load()), exact_forward(load())
        found = {
            "usual engine, plain trainer": compare(usual, in_parts(plain, usual)),
            "deterministic engine, plain trainer": compare(
                deterministic, in_parts(plain, deterministic)
            ),
        }
        exactly = in_parts(exact, deterministic)
    found["deterministic engine, exact trainer"] = compare(deterministic, exactly)
    return found


def in_parts(forward: Forward, samples: Sequence[TrainingSample]) -> list[Tensor]:
    """In batches of 32, as memory asks for."""
    starts = range(0, len(samples), 32)
    return [row for start in starts for row in forward(samples[start : start + 32])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    results: dict[str, Any] = {}
    names = ("tokens", "mean", "mean abs", "p99", "max", "KL (k3)", "same bits")
    print(f"{'engine minus trainer, per token':64}" + "".join(f"{name:>11}" for name in names))
    with tempfile.TemporaryDirectory() as folder:
        models = {"bundled": TINY, "two layers of 0.5B": random_qwen2(Path(folder))}
        for name, path in models.items():
            for dtype in ("float32", "bfloat16"):
                for pair, found in measure(path, dtype, args).items():
                    label = f"{name}, {dtype}, {pair}"
                    results[label] = asdict(found)
                    tokens, *figures, equal = asdict(found).values()
                    shown = "".join(f"{figure:11.1e}" for figure in figures)
                    print(f"{label:64}{tokens:11}{shown}{equal:11.1%}", flush=True)
    if args.json:
        content = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": args.threads,
            "prompts": args.prompts,
            "samples": args.samples,
            "differences": results,
        }
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    exact = [found for label, found in results.items() if label.endswith("exact trainer")]
    if any(found["equal"] < 1 for found in exact):
        sys.exit("the exact trainer's logprobs are not the engine's")


if __name__ == "__main__":
    main()
