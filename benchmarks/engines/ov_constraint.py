"""OpenVINO GenAI's structured output, asked by `constraint_peers.py`: a line of JSON for each run.

python benchmarks/engines/ov_constraint.py FOLDER THREADS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

PIPELINE: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16", "PERFORMANCE_HINT": "LATENCY"}
EOS = 1


def settings_of(asked: dict[str, Any], seed: int) -> genai.GenerationConfig:
    settings = genai.GenerationConfig()
    settings.max_new_tokens = asked["tokens"]
    settings.set_eos_token_id(EOS)
    settings.do_sample = asked["temperature"] > 0
    if settings.do_sample:
        settings.temperature, settings.top_p, settings.top_k = asked["temperature"], 1.0, 0
        settings.rng_seed = seed
    if asked["schema"] is None:
        settings.ignore_eos = True
    else:
        structured = genai.StructuredOutputConfig()
        structured.json_schema = asked["schema"]
        settings.structured_output_config = structured
    return settings


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(pipeline: genai.ContinuousBatchingPipeline, asked: dict[str, Any], first: int) -> Any:
    """All prompts at once, to their ends.

    Raises:
        AssertionError: One ended early, or did not begin as JSON does.
    """
    start, cpu_start = time.perf_counter(), cpu_s()
    handles = [
        pipeline.add_request(
            first + row,
            openvino.Tensor(np.array([prompt], np.int64)),
            settings_of(asked, first + row),
        )
        for row, prompt in enumerate(asked["prompts"])
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    took = {"wall_ms": (time.perf_counter() - start) * 1e3, "cpu_ms": (cpu_s() - cpu_start) * 1e3}
    tokenizer = pipeline.get_tokenizer()
    for handle in handles:
        (output,) = handle.read_all()
        text = tokenizer.decode(output.generated_ids)
        whole = len(output.generated_ids) == asked["tokens"]
        if not whole or (asked["schema"] is not None and not text.lstrip().startswith("{")):
            raise AssertionError(f"OpenVINO wrote {len(output.generated_ids)} tokens: {text!r}")
    return took


def main() -> None:
    folder, threads = sys.argv[1:]
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = PIPELINE | {"INFERENCE_NUM_THREADS": int(threads)}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    first = 0
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run(pipeline, asked, first)), flush=True)
        first += len(asked["prompts"])


if __name__ == "__main__":
    main()
