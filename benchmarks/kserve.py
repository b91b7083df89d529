"""What it takes to bring tensors to a model over KServe V2 and back: inline and in shared memory.

A model that answers with what it is given stands behind a real gateway in a process of its own, and
Triton's clients call it. Each way is a round trip: as many bytes there as back. Beside them stand
two copies of these bytes by one thread, since the gateway has to make as many: one out of shared
memory, so that nobody changes what a model reads, and one into it. Repetitions are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

from nano_inference.cli.process import freeze_memory
from nano_inference.config import load_config
from nano_inference.gateway.api.kserve.served import Answer, ModelCall
from nano_inference.gateway.gateway import Gateway
from nano_inference.kserve.pool import BufferPool
from nano_inference.kserve.shared_memory import SharedMemoryRegistry
from nano_inference.kserve.tensors import ModelSpec, NamedTensor, SharedMemory, TensorSpec
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging

MODEL = "identity"

Trip = Callable[[], Any]


class Identity:
    """Answers with what it is given."""

    def __init__(self, n_tensors: int) -> None:
        specs = tuple(TensorSpec(f"x{number}", "FP32", (-1,)) for number in range(n_tensors))
        self.spec = ModelSpec(name=MODEL, inputs=specs, outputs=specs)

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        await answer([NamedTensor(each.name, each.data) for each in call.request.inputs])

    async def trouble(self) -> str:
        return ""


async def serve(connection: Connection, n_tensors: int) -> None:
    """Serves until it is told to stop; tells the ports of HTTP and gRPC."""
    most = 2 << 30
    settings = {
        "port": 0,
        "grpc_port": 0,
        "shared_memory": True,
        "max_body_bytes": most,
        "max_bodies_bytes": 2 * most,
        "max_tensor_bytes": most,
    }
    config = load_config(overrides={f"gateway.{name}": each for name, each in settings.items()})
    setup_logging(config.telemetry)
    async with Pipeline(config) as pipeline, Gateway(pipeline.client, config) as gateway:
        gateway.kserve.service.add(Identity(n_tensors))
        freeze_memory()
        connection.send((gateway.port, gateway.grpc_port))
        await asyncio.to_thread(connection.recv)


def serve_apart(connection: Connection, n_tensors: int) -> None:
    asyncio.run(serve(connection, n_tensors))


@contextmanager
def served(n_tensors: int) -> Iterator[tuple[str, str]]:
    """A gateway in a process of its own; gives the addresses of HTTP and gRPC."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve_apart, args=(theirs, n_tensors)
    )
    process.start()
    theirs.close()
    try:
        http, grpc = ours.recv()
        yield f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        ours.send(None)
        process.join(60)
    finally:
        process.kill()


class Tensors:
    """What is sent, and where what comes back is to be, in slots of a pool."""

    def __init__(self, pool: BufferPool, n_bytes: int, n_tensors: int) -> None:
        self.size = n_bytes // n_tensors
        self.names = [f"x{number}" for number in range(n_tensors)]
        self._there, self._back = pool.acquire_slot_blocking(), pool.acquire_slot_blocking()
        shapes = [(self.size // 4, np.float32)] * n_tensors
        self.given = self._there.scratch(list(shapes))
        self.taken = self._back.scratch(list(shapes))
        for number, array in enumerate(self.given):
            array[:] = np.arange(number, number + len(array), dtype=np.float32)
            self.taken[number][:] = 0
        self.region, self.key, self.n_bytes = pool.name, pool.key, pool.n_bytes

    def offsets(self) -> Iterator[tuple[str, int, int]]:
        """Of each tensor: its name, where it is, and where it is to be put."""
        for name, given, taken in zip(self.names, self.given, self.taken, strict=True):
            there, back = self._there.offset_of(given), self._back.offset_of(taken)
            assert there is not None
            assert back is not None
            yield name, there, back

    def check(self, found: list[np.ndarray[Any, Any]]) -> None:
        """What came back must be what was sent."""
        for given, taken in zip(self.given, found, strict=True):
            if not np.array_equal(given, taken):
                raise AssertionError("the tensors came back as others")

    def clear(self) -> None:
        for array in self.taken:
            array[:] = 0


def inline(client: Any, kind: Any, tensors: Tensors) -> Trip:
    """A trip within the messages, by `tritonclient.http` or `tritonclient.grpc`."""

    def trip() -> list[np.ndarray[Any, Any]]:
        inputs = []
        for name, array in zip(tensors.names, tensors.given, strict=True):
            inputs.append(kind.InferInput(name, array.shape, "FP32"))
            inputs[-1].set_data_from_numpy(array)
        outputs = [kind.InferRequestedOutput(name) for name in tensors.names]
        answer = client.infer(MODEL, inputs, outputs=outputs)
        return [answer.as_numpy(name) for name in tensors.names]

    return trip


def shared(client: Any, kind: Any, tensors: Tensors) -> Trip:
    """A trip through the pool's memory, there and back."""
    client.register_system_shared_memory(tensors.region, tensors.key, tensors.n_bytes)

    def trip() -> list[np.ndarray[Any, Any]]:
        inputs, outputs = [], []
        for name, there, back in tensors.offsets():
            inputs.append(kind.InferInput(name, [tensors.size // 4], "FP32"))
            inputs[-1].set_shared_memory(tensors.region, tensors.size, there)
            outputs.append(kind.InferRequestedOutput(name))
            outputs[-1].set_shared_memory(tensors.region, tensors.size, back)
        client.infer(MODEL, inputs, outputs=outputs)
        return list(tensors.taken)

    return trip


def registry_alone(tensors: Tensors) -> Trip:
    """What the gateway does with the memory, in this process: out of it, and into it."""
    registry = SharedMemoryRegistry()
    registry.register(tensors.region, tensors.key, 0, tensors.n_bytes)

    def trip() -> list[np.ndarray[Any, Any]]:
        places = list(tensors.offsets())
        read = [
            registry.read(SharedMemory(tensors.region, tensors.size, there))
            for _, there, _ in places
        ]
        for (_, _, back), data in zip(places, read, strict=True):
            registry.write(SharedMemory(tensors.region, tensors.size, back), data)
        return list(tensors.taken)

    return trip


def two_copies(tensors: Tensors) -> Trip:
    """All of it there by memcpy, and then all of it back, within warm memory of this process.

    Not tensor by tensor, of which the processor's cache would keep the middle one: a model has all
    of its inputs before it gives its outputs.
    """
    source = [np.array(each) for each in tensors.given]
    middle = [np.array(each) for each in tensors.given]
    target = [np.array(each) for each in tensors.given]

    def trip() -> list[np.ndarray[Any, Any]]:
        for between, given in zip(middle, source, strict=True):
            np.copyto(between, given)
        for taken, between in zip(target, middle, strict=True):
            np.copyto(taken, between)
        return target

    return trip


def two_copies_shared(tensors: Tensors) -> Trip:
    """The same out of shared memory and into it, whose pages are small ones."""
    middle = [np.array(each) for each in tensors.given]

    def trip() -> list[np.ndarray[Any, Any]]:
        for between, given in zip(middle, tensors.given, strict=True):
            np.copyto(between, given)
        for taken, between in zip(tensors.taken, middle, strict=True):
            np.copyto(taken, between)
        return list(tensors.taken)

    return trip


def measure(trips: dict[str, Trip], tensors: Tensors, repeat: int) -> dict[str, list[float]]:
    """Seconds of each trip in each repetition, of which the first two do not count.

    Each is made once more right before, as when calls follow one another: a core that has slept
    copies at two thirds of its speed, and the gateway sleeps while others are measured.
    """
    found: dict[str, list[float]] = {name: [] for name in trips}
    for repetition in range(repeat + 2):
        for name, trip in trips.items():
            tensors.clear()
            gc.collect()
            trip()
            start = time.perf_counter()
            result = trip()
            seconds = time.perf_counter() - start
            tensors.check(result)
            del result
            if repetition >= 2:
                found[name].append(seconds)
        print(f"repetition {repetition} of {repeat + 1}", file=sys.stderr)
    return found


def show(found: dict[str, list[float]], n_bytes: int) -> None:
    copies = found["memcpy"]
    print(f"\n{n_bytes / 2**20:.0f} MiB there and as many back\n")
    print(f"{'':24} {'ms':>8} {'from':>7} {'to':>7} {'GB/s':>6} {'of memcpy':>9}")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        # Within a repetition the machine is in one state.
        share = statistics.median(c / s for c, s in zip(copies, seconds, strict=True))
        low, high = min(seconds), max(seconds)
        print(
            f"{name:24} {middle * 1e3:8.1f} {low * 1e3:7.1f} {high * 1e3:7.1f}"
            f" {2 * n_bytes / middle / 1e9:6.2f} {share:9.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64, help="MiB of tensors, each way")
    parser.add_argument("--tensors", type=int, default=4, help="in so many")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    n_bytes = arguments.megabytes << 20
    with (
        BufferPool(2 * n_bytes, 2) as pool,
        served(arguments.tensors) as (http, grpc),
        tritonclient.http.InferenceServerClient(http) as http_client,
        tritonclient.grpc.InferenceServerClient(grpc) as grpc_client,
    ):
        tensors = Tensors(pool, n_bytes, arguments.tensors)
        trips = {
            "memcpy": two_copies(tensors),
            "memcpy, shared memory": two_copies_shared(tensors),
            "registry alone": registry_alone(tensors),
            "shared memory, gRPC": shared(grpc_client, tritonclient.grpc, tensors),
            "shared memory, HTTP": shared(http_client, tritonclient.http, tensors),
            "inline, gRPC": inline(grpc_client, tritonclient.grpc, tensors),
            "inline, HTTP": inline(http_client, tritonclient.http, tensors),
        }
        found = measure(trips, tensors, arguments.repeat)
    show(found, n_bytes)
    if arguments.json:
        told = {"n_bytes": n_bytes, "tensors": arguments.tensors, "seconds": found}
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
