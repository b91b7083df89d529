"""Transformers' continuous batching, `generate_batch`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers
import worker
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from worker import Request, Times, Workload, serve


class GenerateBatch(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.version = f"Transformers {transformers.__version__} generate_batch"

    @torch.no_grad()
    def run(self, workload: Workload, requests: list[Request]) -> Times:
        generation = GenerationConfig(
            max_new_tokens=requests[0].new_tokens,
            do_sample=workload.temperature > 0,
            temperature=workload.temperature or 1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=workload.samples,
            eos_token_id=-1,
            pad_token_id=0,
        )
        start = time.perf_counter()
        outputs = self.model.generate_batch(
            [request.token_ids for request in requests],
            generation_config=generation,
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=2048),
            record_timestamps=True,
        )
        total = time.perf_counter() - start
        stamps = [output.timestamps for output in outputs.values()]
        prefill = max(times[0] for times in stamps)
        return Times(
            total_s=total,
            prefill_s=prefill - start,
            steps_s=worker.rest_of([mark for mark in stamps[-1] if mark >= prefill]),
            tokens=sum(len(output.generated_tokens) for output in outputs.values()),
        )


if __name__ == "__main__":
    serve(GenerateBatch)
