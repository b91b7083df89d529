"""Speed of weight updates, and their cost during generation.

First the transports: bytes per second from the message until the tensors are in the executor's own
memory, beside copies of as many bytes by one thread. Then generation: the same requests without
updates and with consecutive updates. Repetitions are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cores import random_requests
from harness import against, options, print_table, record, spawned, timed
from random_models import write_model
from safetensors.torch import save_file
from torch import Tensor
from workloads import SHAPES

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
    """Return shapes of matrices like those of shape S, of about this size in bfloat16."""
    shape = SHAPES["S"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    layer: dict[str, tuple[int, ...]] = {"q": (width, width), "o": (width, width)}
    layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    layer["norm"] = (width,)
    each = 2 * sum(math.prod(size) for size in layer.values())
    count = max(round(megabytes * 1e6 / each), 1)
    return {f"{name}_{i}": size for i in range(count) for name, size in layer.items()}


def make_weights(megabytes: int) -> tuple[np.ndarray[Any, Any], dict[str, Tensor]]:
    """Return all bytes, and the tensors that are views of them."""
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
    """Be the trainer's process: broadcast once for each bucket size received."""
    torch.set_num_threads(1)
    _, weights = make_weights(megabytes)
    with WeightsGroup("127.0.0.1:0", 2, timeout_s=LIMIT_S) as group:
        commands.send(group.address)
        while (bucket_bytes := commands.recv()) is not None:
            sending = group.broadcast(weights, bucket_bytes)
            commands.send(sending.source)
            sending.result()


def measure_transports(megabytes: int, repeat: int) -> tuple[int, dict[str, list[float]]]:
    """Return the size in bytes, and the seconds of each step in each repetition."""
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
        spawned(send_on_demand, megabytes) as peer,
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
                gc.collect()
                seconds = timed(step)
                if repetition:  # the first repetition warms up
                    found[name].append(seconds)
        groups.close()
    return size, found


async def generate(pipeline: Pipeline, arguments: argparse.Namespace, seed: int) -> float:
    """Run all requests at once, from an empty prefix cache; return their seconds."""
    await pipeline.client.flush_cache()
    size = (arguments.requests, arguments.tokens)
    requests = random_requests(*size, (32, 32), seed, stream=True)
    start = time.perf_counter()
    done = await asyncio.gather(*(pipeline.complete(request) for request in requests))
    assert all(completion.status == "done" for completion in done)
    return time.perf_counter() - start


async def keep_updating(pipeline: Pipeline, source: WeightsSource, pause_s: float) -> list[float]:
    """Update until cancelled; return the seconds of each update."""
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
    """Return the seconds of passes without and with updates, of updates, and of pauses."""
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
                if repetition:  # the first repetition warms up
                    found["without"].append(plain)
                    found["with"].append(busy)
                    found["update"] += took
                else:
                    found["pause"].clear()
                # The cancelled update may still be in flight.
                await asyncio.sleep(arguments.settle)
    WeightSyncManager.maybe_finish_sync = write  # type: ignore[method-assign]
    return found


def show_transports(size: int, found: dict[str, list[float]]) -> None:
    rows = {}
    for name, seconds in found.items():
        rows[name] = against(seconds, found["memcpy"])
        rows[name]["speed"] = size / rows[name]["median"] / 1e9
    columns = {"GB/s": "{speed:.2f}", "x memcpy": "{ratio:.2f}"}
    columns["[range]"] = "[{ratios[0]:.2f}-{ratios[1]:.2f}]"
    print()
    print_table(columns, rows, f"{size / 1e6:.0f} MB of weights")


def show_generation(found: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    tokens = arguments.requests * arguments.tokens
    relative = against(found["with"], found["without"])
    least, most = relative["ratios"]
    print(f"\n{arguments.requests} requests of {arguments.tokens} tokens, {arguments.model}")
    for name in ("without", "with"):
        print(f"tokens/s {name} updates: {tokens / statistics.median(found[name]):.0f}")
    print(
        f"ratio: {relative['ratio']:.3f} [{least:.3f}-{most:.3f}], "
        f"{len(found['update']) / arguments.repeat:.0f} updates per pass"
    )
    for name in ("update", "pause"):
        if found[name]:
            print(f"{name}: {1e3 * statistics.median(found[name]):.1f} ms")


def main() -> None:
    parser = options(
        __doc__,
        requests=(64, "requests, all sent at once"),
        tokens=(128, "tokens for each of them"),
        every=(0.0, "seconds between two updates"),
        settle=(0.5, "seconds between two passes"),
        repeat=(5, "repetitions, after a warm-up"),
        model=(BUNDLED_MODEL, [BUNDLED_MODEL, *SHAPES]),
    )
    sizes = {"type": int, "nargs": "*", "default": [100, 1000]}
    parser.add_argument("--megabytes", help="of weights, for the transports", **sizes)
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
    record(arguments, transports=transports, generation=generation)


if __name__ == "__main__":
    main()
