"""OpenVINO GenAI's continuous batching with its prefix cache; for kv_conversations.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from turns import Turn, serve

BLOCK_SIZE = 32
"""On a CPU."""


def start(options: dict[str, Any]) -> tuple[str, Callable[[list[int], int], Turn]]:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = options["device_tokens"] // BLOCK_SIZE
    scheduler.cache_size = 0
    scheduler.max_num_batched_tokens = 2048
    scheduler.max_num_seqs = 4
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_NUM_THREADS": options["threads"],
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    folder = options["folder"] + "-openvino"
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    numbers = count()

    def complete(prompt: list[int], tokens: int) -> Turn:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = tokens
        settings.ignore_eos = True
        settings.do_sample = False
        began, first_s = time.perf_counter(), 0.0
        inputs = openvino.Tensor(np.array([prompt], np.int64))
        handle = pipeline.add_request(next(numbers), inputs, settings)
        made: list[int] = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            while handle.can_read():
                first_s = first_s or time.perf_counter() - began
                for output in handle.read().values():
                    made += output.generated_ids
        return Turn(first_s, time.perf_counter() - began, made)

    return f"OpenVINO GenAI {genai.__version__.split('-')[0]}", complete


if __name__ == "__main__":
    serve(start)
