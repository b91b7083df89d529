"""Handed-over sequences have the same bits over each transport, and wait for no other transfer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import msgspec
import pytest

from nano_inference import Config, Pipeline
from nano_inference.pipeline import pipeline as pipeline_module
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.executor.runner.tiers.transports import peers, tcp
from nano_inference.stages.executor.runner.tiers.transports.slots import SlotAddress
from nano_inference.telemetry import Metrics, instruments

from ..measured import Measured
from ..soaking import in_soak
from .builders import until
from .conftest import MakeConfig
from .test_replicas import batching_of, check_at_rest
from .test_roles import answers, bits, bodies, counts, expected_of, with_roles

SHORT_MODEL = True

TRANSPORTS = ("process", "memory", "tcp", "nixl")
OVER_TCP = {"engine__kv_listen": "127.0.0.1:0", "engine__kv_secret": "a secret"}


def way_of(
    transport: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Config:
    """Settings for two replicas that are as far apart as this transport is for."""
    if transport != "process":
        monkeypatch.setattr(peers, "slots_here", lambda incarnation: None)
    if transport == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed")
        settings = {"engine__kv_nixl": True} | settings
    if transport in ("tcp", "nixl"):
        hosts = count()  # no two look at the same one
        monkeypatch.setattr(peers, "this_host", lambda: f"host {next(hosts)}")
        settings = OVER_TCP | settings
    return with_roles(make_config, **settings)


def measure(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Keep the metrics of the next pipeline."""
    measured = Measured()
    monkeypatch.setattr(Metrics, "labelled", lambda self, labels: self)
    monkeypatch.setattr(pipeline_module, "setup_metrics", lambda *args, **kw: measured.metrics)
    return measured


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_all_bits_are_the_same_over_each_transport(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    asked = bodies(8)
    expected = await expected_of(make_config, asked)
    measured = measure(monkeypatch)
    async with Pipeline(way_of(transport, make_config, monkeypatch)) as pipeline:
        assert await answers(pipeline, asked) == expected
        await check_at_rest(pipeline)
        found = measured.sums(instruments.KV_TRANSFER_DURATION)
        assert found.keys() == {(transport,)}
        assert found[transport,] > 0
        assert measured.values(instruments.KV_TRANSFER_FAILURES) == {(transport,): 0}
        assert measured.values(instruments.KV_TRANSFER_BYTES)[transport,] > 0
        moves = instruments.KV_TIER_MOVES  # measured once a second
        await until(lambda: measured.values(moves).get(("received",), 0) > 0)


# --- slow and hanging executors ---------------------------------------------------------------


class Proxy:
    """A TCP proxy in front of an executor's slots.

    Attributes:
        address: host:port.
        hung: Set once a connection hangs.
        go: Until it is set, connections hang behind `most_bytes` of the other executor's bytes.
    """

    def __init__(self, target: str, most_bytes: int) -> None:
        self._target, self._most_bytes = target, most_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self.hung, self.go = threading.Event(), threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def close(self) -> None:
        self._ended.set()
        self.go.set()
        self._threads.pop(0).join()  # no connection is added any more
        for connection in self._connections:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
        while self._threads:
            self._threads.pop().join()
        for connection in (self._listener, *self._connections):
            connection.close()

    def _start(self, target: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                reader, _ = self._listener.accept()
            except TimeoutError:
                continue
            server = socket.create_connection(tcp.split_address(self._target))
            reader.setblocking(True)
            self._connections += [reader, server]
            self._start(self._pump, reader, server, None)
            self._start(self._pump, server, reader, self._most_bytes)

    def _pump(self, source: socket.socket, target: socket.socket, most_bytes: int | None) -> None:
        left = most_bytes
        with suppress(OSError):
            while data := source.recv(4096):
                if left is not None and (left := left - len(data)) < 0:
                    self.hung.set()
                    self.go.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> Iterator[list[Proxy]]:
    """Replicas find each other behind a proxy.

    Yields:
        The proxies so far.
    """
    proxies: list[Proxy] = []
    decode = SlotAddress.decode

    def through_a_proxy(text: str) -> SlotAddress:
        address = decode(text)
        if not proxies:
            proxies.append(Proxy(address.tcp, most_bytes))
        return msgspec.structs.replace(address, tcp=proxies[0].address)

    monkeypatch.setattr(SlotAddress, "decode", through_a_proxy)
    try:
        yield proxies
    finally:
        for proxy in proxies:
            proxy.close()


HANDSHAKE_BYTES = 64


@pytest.mark.parametrize("most_bytes", [0, in_soak(HANDSHAKE_BYTES), HANDSHAKE_BYTES + 1000])
async def test_sequences_go_on_while_the_blocks_of_another_hang(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """The one that waits has its blocks when they come at last."""
    monkeypatch.setattr(tcp, "TIMEOUT_S", 90.0)
    long, *others = bodies(8)
    long["prompt_token_ids"] = list(range(40, 120))
    expected = await expected_of(make_config, [long, *others])
    config = way_of("tcp", make_config, monkeypatch)
    async with Pipeline(config) as pipeline:
        with proxied(monkeypatch, most_bytes) as proxies:
            waiting = asyncio.create_task(pipeline.complete(long))
            await until(lambda: bool(proxies) and proxies[0].hung.is_set())
            # Nothing is read for the others: they can't wait for what hangs, and compute.
            with monkeypatch.context() as patch:
                patch.setattr(Tiers, "expect", lambda self, allocation, remote: None)
                assert await answers(pipeline, others) == expected[1:]
            assert not waiting.done()
            proxies[0].go.set()
            assert bits(await waiting) == expected[0]
            assert counts(pipeline, 1).received > 0
        await check_at_rest(pipeline)


@pytest.mark.parametrize(
    "most_bytes", [in_soak(0), HANDSHAKE_BYTES, in_soak(HANDSHAKE_BYTES + 1000)]
)
async def test_sequences_whose_blocks_hang_are_computed_in_time(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(tcp, "TIMEOUT_S", 0.3)
    asked = bodies(6)
    expected = await expected_of(make_config, asked)
    measured = measure(monkeypatch)
    config = way_of("tcp", make_config, monkeypatch)
    async with Pipeline(config) as pipeline:
        with proxied(monkeypatch, most_bytes) as proxies:
            assert await answers(pipeline, asked) == expected
            assert proxies[0].hung.is_set()
            assert not proxies[0].go.is_set()
        assert not batching_of(pipeline, 1).part("tiers").fetches
        await check_at_rest(pipeline)
        assert measured.values(instruments.KV_TRANSFER_FAILURES)["tcp",] > 0
