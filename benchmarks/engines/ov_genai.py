"""OpenVINO GenAI's continuous batching, on the folder that optimum-cli writes beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
import worker
from worker import Request, Times, Workload, serve

EOS = 1


def open_pipeline(
    folder: Path | str, threads: int, *, prefix_caching: bool, prompt_lookup: bool = False
) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = prefix_caching
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    if prompt_lookup:
        properties["prompt_lookup"] = True
    return genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)


def add_request(
    pipeline: genai.ContinuousBatchingPipeline,
    number: int,
    prompt: list[int],
    tokens: int,
    temperature: float,
    constraint: dict[str, Any] | None = None,
    samples: int = 1,
    drafts: int = 0,
) -> Any:
    """Add a request; its number is also its seed."""
    settings = genai.GenerationConfig()
    settings.max_new_tokens = tokens
    settings.set_eos_token_id(EOS)
    settings.do_sample = temperature > 0
    settings.num_return_sequences = samples
    if settings.do_sample:
        settings.temperature, settings.top_p, settings.top_k = temperature, 1.0, 0
        settings.rng_seed = number
    if drafts:
        settings.num_assistant_tokens, settings.max_ngram_size = drafts, 4
    settings.ignore_eos = not constraint
    if constraint:
        structured = genai.StructuredOutputConfig()
        if "json_schema" in constraint:
            structured.json_schema = json.dumps(constraint["json_schema"])
        else:  # it has no choice
            structured.regex = constraint.get("regex") or "|".join(constraint["choice"])
        settings.structured_output_config = structured
    return pipeline.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), settings)


class OpenVino(worker.Engine):
    def __init__(self, folder: Path, shape: str, threads: int) -> None:
        kind = worker.weight_format()
        converted = folder.with_name(f"{folder.name}-openvino{kind and '-'}{kind}")
        if not converted.is_dir():
            raise SystemExit(f"there is no {converted}; benchmarks/README.md says how to make it")
        lookup = worker.draft_tokens() > 0
        self.pipeline = open_pipeline(converted, threads, prefix_caching=True, prompt_lookup=lookup)
        self.next_id = 0
        self.version = f"OpenVINO GenAI {genai.__version__.split('-')[0]} {kind or 'bf16'}"

    def run(self, workload: Workload, requests: list[Request]) -> Times:
        marks, handles = worker.Marks(workload, requests), []
        for request in requests:
            size = (request.new_tokens, workload.temperature)
            handles.append(
                add_request(
                    *(self.pipeline, self.next_id, request.token_ids, *size),
                    constraint=request.constraint,
                    samples=workload.samples,
                    drafts=worker.draft_tokens(),
                )
            )
            self.next_id += 1
        # Of several samples nothing can be read before the end.
        begun = len(handles) if workload.samples > 1 else 0
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            while begun < len(handles) and handles[begun].can_read():
                begun += 1
            marks.add(begun * workload.samples)
        outputs = [output for handle in handles for output in handle.read_all()]
        return marks.times([output.generated_ids for output in outputs])


if __name__ == "__main__":
    serve(OpenVino)
