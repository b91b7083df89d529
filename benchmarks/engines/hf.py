"""Transformers' `generate` on the whole batch, and its continuous batching, `generate_batch`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import worker
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers_peer import generate, generate_batch
from worker import Request, Times, Workload, serve


class Clock(LogitsProcessor):
    """Records the time of each forward pass."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        self.marks.append(time.perf_counter())
        return scores


class Generate(worker.Engine):
    name = "generate"

    def can(self, workload: Workload) -> bool:
        return super().can(workload) and not workload.constraint

    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.version = f"Transformers {transformers.__version__} {self.name}"

    @torch.inference_mode()
    def run(self, workload: Workload, requests: list[Request]) -> Times:
        clock = Clock()
        clocks = LogitsProcessorList([clock])
        start = time.perf_counter()
        tokens = generate(self.model, requests, workload, logits_processor=clocks)
        return Times(
            total_s=time.perf_counter() - start,
            prefill_s=clock.marks[0] - start,
            steps_s=worker.rest_of(clock.marks),
            outputs=tokens.tolist(),
        )


class GenerateBatch(Generate):
    name = "generate_batch"

    @torch.no_grad()
    def run(self, workload: Workload, requests: list[Request]) -> Times:
        batching = ContinuousBatchingConfig(max_batch_tokens=2048)
        options = {"continuous_batching_config": batching, "record_timestamps": True}
        start = time.perf_counter()
        outputs = generate_batch(self.model, requests, workload, **options)
        total = time.perf_counter() - start
        prefill = max(output.timestamps[0] for output in outputs)
        return Times(
            total_s=total,
            prefill_s=prefill - start,
            steps_s=worker.rest_of([mark for mark in outputs[-1].timestamps if mark >= prefill]),
            outputs=[output.generated_tokens for output in outputs],
        )


if __name__ == "__main__":
    serve(GenerateBatch if sys.argv[4] == "generate_batch" else Generate)
