"""AReaL's remote engines: generation over a pause, scores, and weights from disk."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import threading
from pathlib import Path

import requests
import torch
from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.engine.vllm_remote import RemotevLLMEngine

url, run, folder = sys.argv[1:]
ADDRESS = url.removeprefix("http://")
PROMPT = [28, 27, 267, 224, 21, 24, 268]


def config(backend: str) -> InferenceEngineConfig:
    return InferenceEngineConfig(
        backend=f"{backend}:d1",
        experiment_name="e",
        trial_name="t",
        tokenizer_path=folder,
        fileroot=run,
        setup_timeout=60,
        request_timeout=60,
        max_concurrent_rollouts=4,
        consumer_batch_size=1,
    )


async def generated(engine, **more):
    request = ModelRequest(
        input_ids=[*PROMPT],
        gconfig=GenerationHyperparameters(max_new_tokens=6, **more),
        # As workflows without images write it.
        image_data=None,
    )
    answer = await engine.agenerate(request)
    assert len(answer.output_tokens) == len(answer.output_logprobs) > 0
    assert len(answer.output_versions) == len(answer.output_tokens)
    return answer.output_tokens


def scored(engine, tokens: list[int]) -> list[float]:
    ids = torch.tensor([PROMPT + tokens])
    mask = torch.tensor([[0] * len(PROMPT) + [1] * len(tokens)])
    (found,) = engine.compute_logp([{"input_ids": ids, "loss_mask": mask}])
    return found[0, len(PROMPT) :].tolist()


def call(request) -> None:
    """Send a request that the engine's backend has built."""
    sent = requests.request(
        request.method, f"{url}{request.endpoint}", json=request.payload, timeout=60
    )
    sent.raise_for_status()


def main() -> None:
    made, scores = {}, {}
    for name, kind in (("sglang", RemoteSGLangEngine), ("vllm", RemotevLLMEngine)):
        engine = kind(config(name))
        engine.initialize(addr=ADDRESS, train_data_parallel_size=1)
        made[name] = asyncio.run(generated(engine, greedy=True))
        asyncio.run(generated(engine, temperature=0.7, top_p=0.9))
        scores[name] = scored(engine, made[name])
        assert all(each <= 0 for each in scores[name])
        engine.destroy()
    assert made["sglang"] == made["vllm"]
    differences = [abs(a - b) for a, b in zip(scores["sglang"], scores["vllm"], strict=True)]
    assert max(differences) < 1e-5, scores
    # The control plane, by the requests that the backend of SGLang builds.
    backend = SGLangBackend()
    call(backend.get_pause_request())
    waiting = threading.Thread(target=call, args=(backend.get_resume_request(),))
    waiting.start()
    waiting.join()
    weights = Path(run) / "weights"
    shutil.copytree(folder, weights)
    meta = type("Meta", (), {"use_lora": False, "path": str(weights), "version": 1})()
    for request in backend.build_disk_weight_update_requests(meta).requests:
        call(request)
    engine = RemoteSGLangEngine(config("sglang"))
    engine.initialize(addr=ADDRESS, train_data_parallel_size=1)
    engine.set_version(1)
    assert asyncio.run(generated(engine, greedy=True)) == made["sglang"]
    engine.destroy()
    print(json.dumps(made))


main()
