"""Round trips of tensors to a model and back over KServe V2, inline and in shared memory.

A model that returns its input runs behind a gateway in a separate process, and Triton's clients
call it; each way is a round trip. The peer is two copies of the same bytes by one thread, since the
gateway must make as many: one out of shared memory, so that no client changes a model's input, and
one into it. Repetitions are interleaved.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from harness import against, median_ratio, options, print_table, progress, record, spawned

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

Arrays = list[np.ndarray[Any, Any]]
Trip = Callable[[], Any]


class Identity:
    """A model that returns its input."""

    def __init__(self, n_tensors: int) -> None:
        specs = tuple(TensorSpec(f"x{number}", "FP32", (-1,)) for number in range(n_tensors))
        self.spec = ModelSpec(name=MODEL, inputs=specs, outputs=specs)

    async def infer(self, call: ModelCall, answer: Answer) -> None:
        await answer([NamedTensor(each.name, each.data) for each in call.request.inputs])

    async def trouble(self) -> str:
        return ""


async def serve(connection: Connection, n_tensors: int) -> None:
    """Send the ports of HTTP and gRPC, and serve until something is received."""
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
    """Run a gateway in its own process; yield its addresses of HTTP and gRPC."""
    with spawned(serve_apart, n_tensors) as connection:
        http, grpc = connection.recv()
        yield f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"


class Tensors:
    """Inputs, and places for outputs, in slots of a pool."""

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
        """Yield each tensor's name, and the offsets of its input and its output."""
        for name, given, taken in zip(self.names, self.given, self.taken, strict=True):
            yield name, self._there.offset_of(given), self._back.offset_of(taken)

    def check(self, found: Arrays) -> None:
        """Raise AssertionError unless the outputs equal the inputs."""
        for given, taken in zip(self.given, found, strict=True):
            if not np.array_equal(given, taken):
                raise AssertionError("the outputs are not the inputs")

    def clear(self) -> None:
        for array in self.taken:
            array[:] = 0


def inline(client: Any, kind: Any, tensors: Tensors) -> Trip:
    """Return a trip within the messages, by `tritonclient.http` or `tritonclient.grpc`."""

    def trip() -> Arrays:
        inputs = []
        for name, array in zip(tensors.names, tensors.given, strict=True):
            inputs.append(kind.InferInput(name, array.shape, "FP32"))
            inputs[-1].set_data_from_numpy(array)
        outputs = [kind.InferRequestedOutput(name) for name in tensors.names]
        answer = client.infer(MODEL, inputs, outputs=outputs)
        return [answer.as_numpy(name) for name in tensors.names]

    return trip


def shared(client: Any, kind: Any, tensors: Tensors) -> Trip:
    """Return a trip through the pool's memory in both directions."""
    client.register_system_shared_memory(tensors.region, tensors.key, tensors.n_bytes)

    def trip() -> Arrays:
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
    """Return the gateway's part in this process: a read from shared memory and a write."""
    registry = SharedMemoryRegistry()
    registry.register(tensors.region, tensors.key, 0, tensors.n_bytes)

    def trip() -> Arrays:
        places = list(tensors.offsets())
        read = [
            registry.read(SharedMemory(tensors.region, tensors.size, there))
            for _, there, _ in places
        ]
        for (_, _, back), data in zip(places, read, strict=True):
            registry.write(SharedMemory(tensors.region, tensors.size, back), data)
        return list(tensors.taken)

    return trip


def two_copies(source: Arrays, target: Arrays) -> Trip:
    """Return a copy of all inputs, then of all outputs, through memory of this process.

    Not tensor by tensor, which the processor's cache would speed up: a model gets all its inputs
    before it returns outputs.
    """
    middle = [np.array(each) for each in source]

    def trip() -> Arrays:
        for between, given in zip(middle, source, strict=True):
            np.copyto(between, given)
        for taken, between in zip(target, middle, strict=True):
            np.copyto(taken, between)
        return list(target)

    return trip


def measure(trips: dict[str, Trip], tensors: Tensors, repeat: int) -> dict[str, list[float]]:
    """Return the seconds of each trip in each repetition after the first two.

    Each trip follows an untimed one, as in a series of calls: an idle core copies at two thirds of
    its speed, and the gateway is idle while other ways are measured.
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
        progress(repetition, repeat + 1)
    return found


def show(found: dict[str, list[float]], n_bytes: int) -> None:
    print(f"\n{n_bytes / 2**20:.0f} MiB in each direction\n")
    rows = {
        name: {
            **against([1e3 * each for each in seconds], found["memcpy"]),
            "speed": 2 * n_bytes / statistics.median(seconds) / 1e9,
            "share": median_ratio(found["memcpy"], seconds),
        }
        for name, seconds in found.items()
    }
    columns = {"ms": "{median:.1f}", "from": "{least:.1f}", "to": "{most:.1f}"}
    print_table(columns | {"GB/s": "{speed:.2f}", "of memcpy": "{share:.1%}"}, rows)


def main() -> None:
    arguments = options(
        __doc__,
        megabytes=(64, "MiB of tensors in each direction"),
        tensors=(4, "number of tensors"),
        repeat=15,
    ).parse_args()
    n_bytes = arguments.megabytes << 20
    with (
        BufferPool(2 * n_bytes, 2) as pool,
        served(arguments.tensors) as (http, grpc),
        tritonclient.http.InferenceServerClient(http) as http_client,
        tritonclient.grpc.InferenceServerClient(grpc) as grpc_client,
    ):
        tensors = Tensors(pool, n_bytes, arguments.tensors)
        ours = [[np.array(each) for each in tensors.given] for _ in range(2)]
        trips = {
            "memcpy": two_copies(*ours),
            "memcpy, shared memory": two_copies(tensors.given, tensors.taken),
            "registry alone": registry_alone(tensors),
            "shared memory, gRPC": shared(grpc_client, tritonclient.grpc, tensors),
            "shared memory, HTTP": shared(http_client, tritonclient.http, tensors),
            "inline, gRPC": inline(grpc_client, tritonclient.grpc, tensors),
            "inline, HTTP": inline(http_client, tritonclient.http, tensors),
        }
        found = measure(trips, tensors, arguments.repeat)
    show(found, n_bytes)
    record(arguments, n_bytes=n_bytes, seconds=found)


if __name__ == "__main__":
    main()
