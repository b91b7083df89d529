"""OpenVINO GenAI's structured output for `constraint_peers.py`: a line of JSON for each run.

python benchmarks/engines/ov_constraint.py FOLDER THREADS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import openvino_genai as genai
from ov_genai import add_request, open_pipeline


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(pipeline: genai.ContinuousBatchingPipeline, asked: dict[str, Any], first: int) -> Any:
    """Complete all prompts at once; return the milliseconds.

    Raises:
        AssertionError: A completion ended early, or is not JSON.
    """
    options = (asked["tokens"], asked["temperature"], asked["schema"])
    start, cpu_start = time.perf_counter(), cpu_s()
    handles = [
        add_request(pipeline, first + row, prompt, *options)
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
    pipeline = open_pipeline(folder, int(threads), prefix_caching=False)
    first = 0
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run(pipeline, asked, first)), flush=True)
        first += len(asked["prompts"])


if __name__ == "__main__":
    main()
