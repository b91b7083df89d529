"""A pipeline whose model is spread over ranks, which are processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from nano_inference import (
    Completion,
    Pipeline,
    WeightsGroup,
)
from nano_inference.stages.executor.runner.ranks.processes import Ranks

from . import reference
from .builders import TOKENS, until
from .conftest import LIMIT_S, MakeConfig
from .test_replicas import core_of, epoch_of
from .test_roles import bits

pytestmark = pytest.mark.slow

SHORT_MODEL = True
SAME_BITS: dict[str, Any] = {"deterministic": True, "rank_invariant": True}


def bodies(kind: str) -> list[dict[str, Any]]:
    """Greedy and sampled requests, some streamed."""
    return [
        {
            "request_id": f"{kind}-{index}",
            "prompt": f"{index} + {7 * index} =",
            "n": 1 + index % 2,
            "stream": index % 4 != 3,
            "sampling": {
                "temperature": float(index % 2),
                "seed": index,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "logprobs": 1,
            },
        }
        for index in range(6)
    ]


def short_bodies(kind: str) -> list[dict[str, Any]]:
    return [{**body, "sampling": {**body["sampling"], "max_tokens": 40}} for body in bodies(kind)]


LAYERS, EXPERTS, CHOSEN = 2, 4, 2


@cache
def mixture() -> Path:
    """A model with experts, random weights, and the bundled model's tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="nano-test-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    others = ("config.json", "generation_config.json", "*.safetensors")
    shutil.copytree(
        reference.FOLDER, folder, ignore=shutil.ignore_patterns(*others), dirs_exist_ok=True
    )
    config = Qwen2MoeConfig(
        vocab_size=json.loads((reference.FOLDER / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    Qwen2MoeForCausalLM(config).save_pretrained(folder)
    return folder


def begin(
    pipeline: Pipeline, body: dict[str, Any], begun: asyncio.Event
) -> asyncio.Task[Completion]:
    """Submit a request; `begun` is set at the first output of any."""

    async def read() -> Completion:
        outputs = []
        async for output in pipeline.submit(body):
            outputs.append(output)
            begun.set()
        assert isinstance(outputs[-1], Completion)
        return outputs[-1]

    return asyncio.create_task(read())


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def ranks_of(pipeline: Pipeline) -> Ranks:
    ranks = core_of(pipeline, "executor").ranks
    assert ranks is not None
    return ranks


Bodies = Callable[[str], list[dict[str, Any]]]


async def survive_signal(
    pipeline: Pipeline, expected: list[list[Any]], number: signal.Signals, make: Bodies
) -> None:
    """Send the only other rank a signal under load, whose answers are the expected ones.

    `make`: as `bodies`."""
    (pid,), epoch = ranks_of(pipeline).pids, epoch_of(pipeline)
    begun = asyncio.Event()
    reads = [begin(pipeline, body, begun) for body in make(number.name)]
    await begun.wait()
    os.kill(pid, number)
    found = await asyncio.gather(*reads)
    assert [bits(each) for each in found] == expected
    assert epoch_of(pipeline) > epoch
    assert not exists(pid), "a rank outlives its executor"


async def survive_failures(pipeline: Pipeline, expected: list[list[Any]], make: Bodies) -> None:
    """Kill and stop the only other rank under load, and kill it between two steps."""
    for number in (signal.SIGKILL, signal.SIGSTOP):
        await survive_signal(pipeline, expected, number, make)
    (pid,), epoch = ranks_of(pipeline).pids, epoch_of(pipeline)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: epoch_of(pipeline) > epoch)
    await pipeline.ready()


async def update_by_group(pipeline: Pipeline, ranks: int) -> None:
    """Broadcast the loaded weights once more. `ranks`: of all executors."""
    tensors = load_file(pipeline.config.engine.model_folder / "model.safetensors")
    with WeightsGroup("127.0.0.1:0", 1 + ranks, timeout_s=LIMIT_S) as trainer:
        await pipeline.client.join_weights_group("weights", trainer.address, 1 + ranks)
        sending = trainer.broadcast(tensors)
        assert await pipeline.client.update_weights(sending.source) == 1
        await asyncio.to_thread(sending.result)


@pytest.mark.soak(only=True)
async def test_each_rank_of_each_executor_is_a_member(make_config: MakeConfig) -> None:
    config = make_config(engine__tensor_parallel=2, pipeline__replicas=2)
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        await update_by_group(pipeline, 4)
        await pipeline.complete(bodies("after")[0])


@pytest.mark.soak
async def test_a_rank_that_dies_or_stops_costs_no_token(
    make_config: MakeConfig, soak: bool
) -> None:
    """The executor is restarted as a whole, and every answer is that of one rank, bit for bit.

    Every day it stops under load once; a pipeline stage dies (test_pipeline_parallel.py)."""
    engine = {f"engine__{name}": value for name, value in SAME_BITS.items()}
    async with Pipeline(make_config(**engine)) as alone:
        done = await asyncio.gather(*map(alone.complete, short_bodies("SIGKILL")))
    expected = [bits(each) for each in done]
    config = make_config(
        **engine,
        engine__tensor_parallel=2,
        engine__rank_timeout_s=1.0,
        pipeline__restart_backoff_s=0.01,
    )
    async with asyncio.timeout(LIMIT_S), Pipeline(config) as pipeline:
        await update_by_group(pipeline, 2)
        if soak:
            await survive_failures(pipeline, expected, short_bodies)
        else:
            await survive_signal(pipeline, expected, signal.SIGSTOP, short_bodies)
        found = await asyncio.gather(*map(pipeline.complete, short_bodies("idle")))
        assert [bits(each) for each in found] == expected
        (pid,) = ranks_of(pipeline).pids
    assert not exists(pid)
