"""OpenVINO GenAI's continuous batching, on the folder that optimum-cli writes beside the model."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
import worker
from worker import Request, Times, Workload, serve


class OpenVino(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        converted = folder.with_name(folder.name + "-openvino")
        if not converted.is_dir():
            raise SystemExit(f"there is no {converted}; benchmarks/README.md says how to make it")
        self.pipeline = genai.ContinuousBatchingPipeline(
            str(converted),
            scheduler,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": "bf16",
                "PERFORMANCE_HINT": "LATENCY",
            },
        )
        self.next_id = 0
        self.version = f"OpenVINO GenAI {genai.__version__.split('-')[0]} bf16"

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        start = time.perf_counter()
        handles = []
        for request in requests:
            settings = genai.GenerationConfig()
            settings.max_new_tokens = request.new_tokens
            settings.ignore_eos = True
            settings.set_eos_token_id(1)
            settings.do_sample = workload.temperature > 0
            settings.num_return_sequences = workload.samples
            if settings.do_sample:
                settings.temperature, settings.top_p, settings.top_k = workload.temperature, 1.0, 0
                settings.rng_seed = self.next_id
            ids = openvino.Tensor(np.array([request.token_ids], np.int64))
            handles.append(self.pipeline.add_request(self.next_id, ids, settings))
            self.next_id += 1
        marks = []
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            marks.append(time.perf_counter())
        # The last step ends the run; what comes before the decode steps is prefill.
        prefill = marks[-requests[0].new_tokens]
        outputs = [output for handle in handles for output in handle.read_all()]
        return Times(
            total_s=marks[-1] - start,
            prefill_s=prefill - start,
            steps_s=worker.rest_of(marks[-requests[0].new_tokens :]),
            tokens=sum(len(output.generated_ids) for output in outputs),
        )


if __name__ == "__main__":
    serve(OpenVino)
