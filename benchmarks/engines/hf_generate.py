"""Transformers' `generate` on the whole batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
import worker
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from worker import Request, Times, Workload, serve


class Clock(LogitsProcessor):
    """Is called once per forward pass, and notes when."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.marks.append(time.perf_counter())
        return scores


class Generate(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.version = f"Transformers {transformers.__version__} generate"

    @torch.inference_mode()
    def run(self, workload: Workload, requests: list[Request]) -> Times:
        # All prompts of these workloads are of one length, so nothing is padded.
        ids = torch.tensor([request.token_ids for request in requests])
        new_tokens = requests[0].new_tokens
        options: dict[str, Any] = {"do_sample": False}
        if workload.temperature:
            options = {"do_sample": True, "temperature": workload.temperature, "top_k": 0}
            options |= {"top_p": 1.0, "num_return_sequences": workload.samples}
        clock = Clock()
        start = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([clock]),
            **options,
        )
        total = time.perf_counter() - start
        return Times(
            total_s=total,
            prefill_s=clock.marks[0] - start,
            steps_s=worker.rest_of(clock.marks),
            tokens=output[:, ids.shape[1] :].numel(),
        )


if __name__ == "__main__":
    serve(Generate)
