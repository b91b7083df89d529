"""Transformers' `generate` and `generate_batch` on a workload, for run.py and gpu.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from workloads import Request, Workload


def generate(
    model: Any, requests: list[Request], workload: Workload, new_tokens: int = 0, **options: Any
) -> torch.Tensor:
    """Run `generate` on prompts of one length; return the new tokens, `[sequences, new_tokens]`."""
    # All prompts of these workloads have one length, so there is no padding.
    ids = torch.tensor([request.token_ids for request in requests], device=model.device)
    count = new_tokens or requests[0].new_tokens
    sampling: dict[str, Any] = {"do_sample": False}
    if workload.temperature:
        sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0}
        sampling["top_p"] = 1.0
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        num_return_sequences=workload.samples,
        pad_token_id=0,
        **sampling,
        **options,
    )
    return output[:, ids.shape[1] :]


def generate_batch(
    model: Any, requests: list[Request], workload: Workload, **options: Any
) -> list[Any]:
    """Run Transformers' continuous batching; return its outputs."""
    config = GenerationConfig(
        max_new_tokens=requests[0].new_tokens,
        do_sample=workload.temperature > 0,
        temperature=workload.temperature or 1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=workload.samples,
        eos_token_id=-1,
        pad_token_id=0,
    )
    prompts = [request.token_ids for request in requests]
    return list(model.generate_batch(prompts, generation_config=config, **options).values())
