"""nano-inference: `InferenceEngine.step` in a loop; for kv_conversations.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from timed_engine import TimedEngine
from turns import Turn, serve

from nano_inference import EngineConfig, SamplingParams


def start(options: dict[str, Any]) -> tuple[str, Callable[[list[int], int], Turn]]:
    torch.set_num_threads(options["threads"])
    config = EngineConfig(
        model_path=options["folder"],
        dtype="float32",
        max_model_len=options["longest"],
        max_batch_size=4,
        kv_cache_bytes=options["device_bytes"],
        **options["tiers"],
    )
    engine = TimedEngine(config)

    def complete(prompt: list[int], tokens: int) -> Turn:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start_ns, began = time.time_ns(), time.perf_counter()
        name = engine.add_request(prompt, params)
        while name not in engine.completions:
            engine.step()
        total_s = time.perf_counter() - began
        done = engine.completions.pop(name)
        first_s = (done.timings.first_token_ns - start_ns) / 1e9
        return Turn(first_s, total_s, list(done.samples[0].token_ids))

    return "nano-inference", complete


if __name__ == "__main__":
    serve(start)
