"""verl: a rollout of a registered plug-in, through verl's own server manager and client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

url, run, folder = sys.argv[1:]
os.environ |= {
    "VERL_USE_EXTERNAL_MODULES": "verl_plugin",
    "NANO_INFERENCE_URL": url,
    "PYTHONPATH": str(Path(__file__).parent),
    "RAY_USAGE_STATS_ENABLED": "0",
}

import ray
from hydra import compose, initialize_config_module
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager

PROMPT = [28, 27, 267, 224, 21, 24, 268]


async def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    overrides = ["name=nano-inference", "mode=async", "nnodes=1", "n_gpus_per_node=1"]
    overrides += ["tensor_model_parallel_size=1"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                *(f"actor_rollout_ref.rollout.{each}" for each in overrides),
                f"actor_rollout_ref.model.path={folder}",
            ],
        )
    manager = await LLMServerManager.create(config)
    client: LLMServerClient = manager.get_client()
    outputs = await asyncio.gather(
        *(
            client.generate(
                f"request-{number}",
                prompt_ids=PROMPT,
                sampling_params={"temperature": 1.0, "max_tokens": 6, "logprobs": True},
            )
            for number in range(4)
        )
    )
    for output in outputs:
        assert len(output.token_ids) == len(output.log_probs) > 0
        assert output.stop_reason == "completed"
    (replica,) = manager.rollout_replicas
    await replica.abort_all_requests()
    await replica.resume_generation()
    await replica.clear_kv_cache()
    print(json.dumps({"tokens": [each.token_ids for each in outputs]}))
    ray.shutdown()


asyncio.run(main())
