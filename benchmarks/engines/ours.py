"""nano-inference: `InferenceEngine.step` in a loop, without a bus."""

from __future__ import annotations

import os
import time
from pathlib import Path

import worker
from timed_engine import TimedEngine
from worker import Request, Times, Workload, serve
from workloads import SHAPES

from nano_inference import Constraint, EngineConfig, SamplingParams

if worker.TIMED_START not in os.environ:
    # Imported code is counted apart from what a loaded model takes.
    import nano_inference.stages.executor.core  # noqa: F401


class Ours(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        # A sequence of a hybrid model has megabytes of state.
        quantization, *more = worker.weight_format().split("-")
        hybrid = "linear_num_value_heads" in SHAPES[shape]
        # As llamacpp.py has it, a file in GGUF's own types.
        from_file = quantization.startswith("Q")
        file = folder.with_name(f"{folder.name}-{quantization}.gguf") if from_file else folder
        if from_file:
            quantization = "auto"
        drafts = worker.draft_tokens()
        config = EngineConfig(
            model_path=str(file),
            cpu_threads=threads,
            max_model_len=8192 if shape in ("S", "K") else 2048,
            max_batch_size=16 if hybrid else 64,
            kv_cache_bytes=3 << 29 if hybrid else 1 << 27 if shape == "L" else 1 << 29,
            quantization=quantization or "auto",  # type: ignore[arg-type]
            quantization_group=next((int(each) for each in more if each.isdigit()), 0),  # type: ignore[arg-type]
            activation_bits=8 if "a8" in more else 16,
            **({"speculation": "auto", "draft_sources": ("ngram",)} if drafts else {}),
            max_draft_tokens=drafts or 16,
        )
        self.engine = TimedEngine(config)
        from nano_inference.stages.executor.runner.attention.choose import kernels_of

        executor = self.engine._executor
        reason = executor.off.get("kernels", "")
        self.version = f"nano-inference ({reason or kernels_of(executor.model)})"
        self.version += f" {worker.weight_format() or 'bf16'}"
        weights = sum(p.nbytes for p in executor.model.module.parameters())
        cache = (*executor.cache.keys, *executor.cache.values)
        for tensor in cache:
            tensor.zero_()  # makes it resident, so that the peak includes unused blocks
        self.held_bytes = weights + sum(tensor.nbytes for tensor in cache)

    def can(self, workload: Workload) -> bool:
        return not (workload.constraint and worker.draft_tokens())

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        engine = self.engine
        engine.flush_cache()
        engine.completions.clear()
        waiting = list(reversed(requests))
        arrivals: dict[str, float] = {}
        marks = []
        start_ns, start = time.time_ns(), time.perf_counter()
        while waiting or engine.has_pending():
            now = time.perf_counter() - start
            while waiting and waiting[-1].arrival_s <= now:
                request = waiting.pop()
                constraint = {k: v for k, v in request.constraint.items() if k != "gbnf"}
                params = SamplingParams(
                    temperature=workload.temperature,
                    max_tokens=request.new_tokens,
                    ignore_eos=not constraint,
                    constraint=Constraint(**constraint) if constraint else None,
                )
                name = engine.add_request(request.token_ids, params, workload.samples)
                arrivals[name] = request.arrival_s
            if engine.has_pending():
                engine.step()
                marks.append(time.perf_counter() - start)
            else:
                time.sleep(max(0.0, waiting[-1].arrival_s - now))
        total = time.perf_counter() - start
        ttft, tpot = [], []
        for name, completion in engine.completions.items():
            first_s = (completion.timings.first_token_ns - start_ns) / 1e9
            last_s = (completion.timings.finished_ns - start_ns) / 1e9
            count = len(completion.samples[0].token_ids)
            ttft.append(first_s - arrivals[name])
            tpot.append((last_s - first_s) / max(count - 1, 1))
        prefill = max(ttft)
        return Times(
            total_s=total,
            prefill_s=prefill,
            steps_s=worker.rest_of([mark for mark in marks if mark >= prefill]),
            ttft_s=ttft if workload.rate else [],
            tpot_s=tpot if workload.rate else [],
            outputs=[
                list(sample.token_ids)
                for name in arrivals
                for sample in engine.completions[name].samples
            ],
        )


if __name__ == "__main__":
    serve(Ours)
