"""How fast new weights reach the executor, by each way, and what updates in flight cost.

First the transports: bytes per second from the message until the tensors are in memory of the
executor's own, beside copies of as many bytes that one thread makes. Then generation: the same
requests without updates and with one update after the other. Repetitions are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_models import write_model
from safetensors.torch import save_file
from torch import Tensor
from workloads import SHAPES

from nano_inference import GenerateRequest, SamplingParams
from nano_inference.bus.control import JoinWeightsGroup
from nano_inference.bus.weights import FolderWeights, WeightsSource
from nano_inference.config import BUNDLED_MODEL, Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.executor import WeightSyncManager
from nano_inference.stages.executor.runner.weights.transports import (
    SharedWeights,
    WeightGroups,
    WeightsGroup,
    fetch,
)
from nano_inference.telemetry import setup_logging

LIMIT_S = 120.0
BUCKETS = {"group, buckets of 64 MiB": 64 << 20, "group, one by one": 0}


def plan_weights(megabytes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of matrices like those of shape S, of about so many bytes in bfloat16."""
    shape = SHAPES["S"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    layer: dict[str, tuple[int, ...]] = {"q": (width, width), "o": (width, width)}
    layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    layer["norm"] = (width,)
    each = 2 * sum(math.prod(size) for size in layer.values())
    count = max(round(megabytes * 1e6 / each), 1)
    return {f"{name}_{i}": size for i in range(count) for name, size in layer.items()}


def make_weights(megabytes: int) -> tuple[np.ndarray[Any, Any], dict[str, Tensor]]:
    """All bytes, and the tensors that they are."""
    shapes = plan_weights(megabytes)
    data = np.ones(2 * sum(math.prod(size) for size in shapes.values()), np.uint8)
    parts = (
        torch.from_numpy(data)
        .view(torch.bfloat16)
        .split([math.prod(size) for size in shapes.values()])
    )
    return data, {
        name: part.view(size) for (name, size), part in zip(shapes.items(), parts, strict=True)
    }


def send_on_demand(commands: Connection, megabytes: int) -> None:
    """The trainer's process: broadcasts once for each size of buckets that it is told."""
    torch.set_num_threads(1)
    _, weights = make_weights(megabytes)
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        commands.send(group.address)
        while (bucket_bytes := commands.recv()) is not None:
            sending = group.broadcast(weights, bucket_bytes)
            commands.send(sending.source)
            sending.result()


@contextmanager
def trainer(megabytes: int) -> Iterator[Connection]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=send_on_demand, args=(theirs, megabytes), daemon=True)
    process.start()
    try:
        yield ours
        ours.send(None)
        process.join(LIMIT_S)
    finally:
        process.kill()


def timed(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - start
    del result
    return seconds


def measure_transports(megabytes: int, repeat: int) -> tuple[int, dict[str, list[float]]]:
    """Bytes, and seconds by what was done; a round of everything for each repetition."""
    source, weights = make_weights(megabytes)
    target, own = make_weights(megabytes)
    size = source.nbytes
    module = torch.nn.Module()
    for name, tensor in own.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    manager = WeightSyncManager(module)
    groups = WeightGroups()

    def broadcast(bucket_bytes: int) -> object:
        peer.send(bucket_bytes)
        found: WeightsSource = peer.recv()
        return fetch(found, groups, LIMIT_S)

    with (
        tempfile.TemporaryDirectory() as folder,
        SharedWeights(weights) as shared,
        trainer(megabytes) as peer,
    ):
        file = Path(folder, "model.safetensors")
        wish = JoinWeightsGroup("weights", peer.recv(), 1, 2, "gloo", LIMIT_S)
        groups.join(wish, torch.device("cpu")).result()
        steps: dict[str, Callable[[], object]] = {
            "memcpy": lambda: np.copyto(target, source),
            "memcpy to new memory": source.copy,
            "written in place (the pause)": lambda: manager.sync_blocking(weights),
            "shared memory, read": lambda: fetch(shared.source, groups, LIMIT_S),
            "shared memory, filled by the trainer": shared.update,
            **{name: (lambda most=most: broadcast(most)) for name, most in BUCKETS.items()},
            "folder, read": lambda: fetch(FolderWeights(folder), groups, LIMIT_S),
            "folder, written by the trainer": lambda: save_file(weights, file),
        }
        save_file(weights, file)
        found: dict[str, list[float]] = {name: [] for name in steps}
        for repetition in range(repeat + 1):
            for name, step in steps.items():
                seconds = timed(step)
                if repetition:  # the first one warms up
                    found[name].append(seconds)
        groups.close()
    return size, found


async def generate(pipeline: Pipeline, arguments: argparse.Namespace, seed: int) -> float:
    """All requests at once, from an empty prefix cache; gives the seconds that they took."""
    await pipeline.client.flush_cache()
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    requests = [
        GenerateRequest(
            prompt_token_ids=tuple(rng.randrange(3, 250) for _ in range(32)), sampling=sampling
        )
        for _ in range(arguments.requests)
    ]
    start = time.perf_counter()
    done = await asyncio.gather(*(pipeline.complete(request) for request in requests))
    assert all(completion.status == "done" for completion in done)
    return time.perf_counter() - start


async def keep_updating(pipeline: Pipeline, source: WeightsSource, pause_s: float) -> list[float]:
    """Until cancelled; gives the seconds that each update took."""
    took: list[float] = []
    try:
        while True:
            start = time.perf_counter()
            await pipeline.client.update_weights(source)
            took.append(time.perf_counter() - start)
            await asyncio.sleep(pause_s)
    except asyncio.CancelledError:
        return took


async def measure_generation(arguments: argparse.Namespace, folder: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"without": [], "with": [], "update": [], "pause": []}
    write = WeightSyncManager.maybe_finish_sync

    def timed_write(self: WeightSyncManager) -> bool:
        start = time.perf_counter()
        done = write(self)
        if done:
            found["pause"].append(time.perf_counter() - start)
        return done

    WeightSyncManager.maybe_finish_sync = timed_write  # type: ignore[method-assign]
    engine = EngineConfig(model_path=folder, max_batch_size=arguments.requests, dtype="bfloat16")
    async with Pipeline(Config(engine=engine)) as pipeline:
        executor: Any = pipeline._actors["executor"]
        weights = {
            name: tensor.clone()
            for name, tensor in executor._core.model.module.state_dict().items()
        }
        with SharedWeights(weights) as shared:
            for repetition in range(arguments.repeat + 1):
                plain = await generate(pipeline, arguments, repetition)
                updates = asyncio.create_task(
                    keep_updating(pipeline, shared.source, arguments.every)
                )
                busy = await generate(pipeline, arguments, repetition)
                updates.cancel()
                took = await updates
                if repetition:  # the first one warms up
                    found["without"].append(plain)
                    found["with"].append(busy)
                    found["update"] += took
                else:
                    found["pause"].clear()
                # One may be under way still, of which nobody waits for the answer.
                await asyncio.sleep(arguments.settle)
    WeightSyncManager.maybe_finish_sync = write  # type: ignore[method-assign]
    return found


def show_transports(size: int, found: dict[str, list[float]]) -> None:
    print(f"\n{size / 1e6:.0f} MB of weights{'':24}{'GB/s':>8}{'x memcpy':>10}{'[range]':>16}")
    floor = found["memcpy"]
    for name, seconds in found.items():
        ratios = [own / plain for own, plain in zip(seconds, floor, strict=True)]
        spread = f"[{min(ratios):.2f}-{max(ratios):.2f}]"
        speed = size / statistics.median(seconds) / 1e9
        print(f"{name:40}{speed:8.2f}{statistics.median(ratios):10.2f}{spread:>16}")


def show_generation(found: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    tokens = arguments.requests * arguments.tokens
    ratios = [b / a for a, b in zip(found["with"], found["without"], strict=True)]
    print(f"\n{arguments.requests} requests of {arguments.tokens} tokens, {arguments.model}")
    for name in ("without", "with"):
        print(f"tokens/s {name} updates: {tokens / statistics.median(found[name]):.0f}")
    print(
        f"ratio: {statistics.median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}], "
        f"{len(found['update']) / arguments.repeat:.0f} updates per pass"
    )
    for name in ("update", "pause"):
        if found[name]:
            print(f"{name}: {1e3 * statistics.median(found[name]):.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    sizes = {"type": int, "nargs": "*", "default": [100, 1000]}
    parser.add_argument("--megabytes", help="of weights, for the transports", **sizes)
    parser.add_argument("--model", default=BUNDLED_MODEL, choices=[BUNDLED_MODEL, *SHAPES])
    parser.add_argument("--requests", type=int, default=64, help="requests, all sent at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens for each of them")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between two updates")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds between two passes")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions, after a warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    torch.set_num_threads(1)
    transports = {}
    for megabytes in arguments.megabytes:
        size, found = measure_transports(megabytes, arguments.repeat)
        transports[size] = found
        show_transports(size, found)
    with tempfile.TemporaryDirectory() as folder:
        path = BUNDLED_MODEL
        if arguments.model != BUNDLED_MODEL:
            write_model(Path(folder), arguments.model)
            path = folder
        generation = asyncio.run(measure_generation(arguments, path))
    show_generation(generation, arguments)
    if arguments.json:
        content = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "repeat": arguments.repeat,
            "transports": transports,
            "model": arguments.model,
            "requests": arguments.requests,
            "tokens": arguments.tokens,
            "generation": generation,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
