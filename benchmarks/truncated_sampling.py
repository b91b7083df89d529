"""Importance ratios under top-k, top-p and min-p, with log S and without.

Samples from the bundled model in deterministic mode, and scores the same tokens within their
sampling masks, by the engine and by Transformers' forward pass in one padded batch. The policy is
unchanged, so that a ratio of trainer to sampler is 1 if both are of the same distribution.

    python benchmarks/truncated_sampling.py [--prompts 16] [--samples 8] [--tokens 64] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from agreement import TINY, make_prompts
from harness import Table, options, record
from msgspec.structs import replace
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from nano_inference import EngineConfig, InferenceEngine, SamplingParams, TrainingSample

LIMITS: dict[str, dict[str, Any]] = {
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.95, top_k 50": {"top_p": 0.95, "top_k": 50},
    "top_k 20": {"top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "none": {},
}

Floats = npt.NDArray[np.float32]


def joined(rows: Sequence[Sequence[float]]) -> Floats:
    return np.concatenate([np.array(row, np.float32) for row in rows])


def ids_of(sample: TrainingSample) -> list[npt.NDArray[np.int32]]:
    return [np.frombuffer(mask, "<i4") for mask in sample.sampling_masks or ()]


@torch.no_grad()
def trained(module: Any, sample: TrainingSample) -> Floats:
    """Return a trainer's logprobs of a sample's tokens, softmax over each one's mask."""
    tokens = torch.tensor([(*sample.prompt_tokens, *sample.completion_tokens)])
    start = len(sample.prompt_tokens) - 1
    logits = module(input_ids=tokens[:, :-1], use_cache=False).logits[0, start:].float()
    for row, ids in zip(logits, ids_of(sample), strict=True):
        if len(ids):
            kept = torch.full_like(row, float("-inf"))
            kept[torch.from_numpy(ids.astype(np.int64))] = 0
            row += kept
    found = logits.log_softmax(-1).gather(-1, tokens[0, start + 1 :, None])[:, 0]
    ratios: Floats = found.numpy()
    return ratios


def mean_ratio(trainer: Floats, sampler: Floats) -> float:
    return float(np.exp(trainer.astype(np.float64) - sampler).mean())


def measure(engine: InferenceEngine, module: Any, limits: dict[str, Any], args: Any) -> Any:
    """Return the figures of one setting."""
    params = SamplingParams(
        max_tokens=args.tokens, ignore_eos=True, seed=1, return_sampling_mask=True, **limits
    )
    samples = engine.generate(make_prompts(args.prompts), params, args.samples)
    logprobs = joined([sample.logprobs for sample in samples])
    zeros = [(0.0,) * args.tokens] * len(samples)
    log_s = joined([s.support_logprobs or z for s, z in zip(samples, zeros, strict=True)])
    scored = joined(
        engine.score(
            [sample.prompt_tokens for sample in samples],
            [sample.completion_tokens for sample in samples],
            [replace(params, prompt_sampling_masks=each.sampling_masks) for each in samples],
        )
    )
    plain = joined([trained(module, sample).tolist() for sample in samples])
    sizes = np.array([len(ids) for sample in samples for ids in ids_of(sample)])
    return {
        "tokens": len(logprobs),
        "with_log_s": mean_ratio(scored, logprobs - log_s),
        "trainer_with_log_s": mean_ratio(plain, logprobs - log_s),
        "without": mean_ratio(scored, logprobs),
        "full_policy": mean_ratio(logprobs, logprobs - log_s),
        "same_bits": float((scored == logprobs - log_s).mean()),
        "mask": float(sizes.mean()),
        "largest_mask": int(sizes.max()),
    }


COLUMNS = {
    "tokens": "{tokens}",
    "with log S": "{with_log_s:.4f}",
    "by Transformers": "{trainer_with_log_s:.4f}",
    "without": "{without:.4f}",
    "full / sampled": "{full_policy:.4f}",
    "same bits": "{same_bits:.1%}",
    "ids in a mask": "{mask:.1f}",
    "most": "{largest_mask}",
}


def main() -> None:
    threads = (1, "of torch")
    args = options(__doc__, prompts=16, samples=8, tokens=64, threads=threads).parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    module: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    results: dict[str, Any] = {}
    table = Table(COLUMNS, "mean importance ratio, temperature 1", 38)
    config = EngineConfig(dtype="float32", deterministic=True)
    with InferenceEngine(config) as engine:
        for name, limits in LIMITS.items():
            results[name] = measure(engine, module, limits, args)
            table.row(name, results[name])
    record(args, ratios=results)
    if any(found["same_bits"] < 1 for found in results.values()):
        sys.exit("a score within a mask is not the logprob less log S")


if __name__ == "__main__":
    main()
