"""Builders of these tests: a pipeline on a real server, a gateway, and commands."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog
import torch  # noqa: F401  (before a command that forbids it, in this process)
from anyio.from_thread import start_blocking_portal

from nano_inference import BusClient, Gateway
from nano_inference.cli.app import main
from nano_inference.config import Config, GatewayConfig, load_config
from nano_inference.pipeline import pipeline as pipeline_module
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging

from ..programs import Ran

LIMIT_S = 60.0


Run = Callable[..., Ran]


def assert_refused(ran: Ran, *hints: str) -> None:
    """Check that a command was refused with one sentence; of a server, in a line of its log."""
    assert (ran.status, ran.stdout) == (2, ""), ran
    (line,) = ran.stderr.splitlines()
    if line.startswith("{"):
        line = f"nano-inference: {json.loads(line)['event']}"
    assert line.startswith("nano-inference: ")
    assert all(hint in line for hint in hints), line


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def until_ready(run: Run) -> None:
    """Stages report about once a second."""
    eventually(lambda: run("status").status == 0)


@contextlib.contextmanager
def _logging_as_before() -> Iterator[None]:
    """Restore logging at the end: it writes to a capture that ends too."""
    root = logging.getLogger()
    configured, handlers, level = structlog.get_config(), root.handlers[:], root.level
    yield
    structlog.configure(**configured)
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Run]:
    """Run a command line in this process, as on a pipe without colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # what others run is not found

    def call(*arguments: str, stdin: str | bytes | None = None) -> Ran:
        if stdin is not None:  # a pipe
            content = stdin.encode() if isinstance(stdin, str) else stdin
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        capsys.readouterr()
        status = main(arguments)
        return Ran(status, *capsys.readouterr())

    with _logging_as_before():
        yield call


@contextlib.contextmanager
def serving(redis_url: str) -> Iterator[Config]:
    """Run a pipeline in another thread, on keys of its own; yield its settings."""
    config = load_config(
        env={},
        overrides={
            "bus.url": redis_url,
            "bus.prefix": f"commands-{uuid.uuid4().hex[:8]}",
            "engine.dtype": "float32",
            "telemetry.log_level": "error",
        },
    )
    with start_blocking_portal() as portal, contextlib.ExitStack() as stack:
        with _logging_as_before():  # the stages keep the logging of their start
            setup_logging(config.telemetry)
            stack.enter_context(portal.wrap_async_context_manager(Pipeline(config)))
        yield config


@pytest.fixture(scope="package")
def served(redis_url: str) -> Iterator[Config]:
    """A pipeline that all tests here share, and leave unchanged."""
    with pytest.MonkeyPatch.context() as patch:
        # Commands wait for the next report.
        patch.setattr(pipeline_module, "BEAT_S", 0.1)
        with serving(redis_url) as config:
            yield config


@contextlib.asynccontextmanager
async def _gateway(config: Config) -> AsyncIterator[Gateway]:
    async with BusClient.connect(config.bus) as client, Gateway(client, config) as gateway:
        yield gateway


@contextlib.contextmanager
def gateway_of(served: Config, **sections: object) -> Iterator[str]:
    """Run a gateway in front of a pipeline, with these sections of its settings; yield its URL."""
    config = msgspec.structs.replace(served, **{"gateway": GatewayConfig(), **sections})
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_gateway(config)) as gateway,
    ):
        yield gateway.url


@pytest.fixture(scope="package")
def url(served: Config) -> Iterator[str]:
    """A gateway in front of the pipeline that all tests share."""
    with gateway_of(served) as url:
        yield url


@pytest.fixture(params=["url", "bus"])
def place(request: pytest.FixtureRequest, on_served: Config, url: str) -> list[str]:
    """Options that name a server or the bus. Without --url, commands use the environment's bus."""
    return ["--url", f"{url}/v1"] if request.param == "url" else []


@pytest.fixture
def on_served(served: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Commands without --bus talk to `served`."""
    use_bus(monkeypatch, served.bus.url, served.bus.prefix)
    return served


@pytest.fixture
def on_nobody(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commands without --bus talk to a bus without a pipeline; its prefix."""
    prefix = f"nobody-{uuid.uuid4().hex[:8]}"
    use_bus(monkeypatch, redis_url, prefix)
    return prefix


@contextlib.contextmanager
def listening(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run a server in another thread; yield its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(LIMIT_S)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections for as long as the test runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def program() -> list[str]:
    """The command line as a program of its own."""
    return [sys.executable, "-m", "nano_inference"]


def use_bus(monkeypatch: pytest.MonkeyPatch, url: str, prefix: str) -> None:
    """Set the bus in the environment of commands and programs."""
    monkeypatch.setenv("NANO_INFERENCE_BUS__URL", url)
    monkeypatch.setenv("NANO_INFERENCE_BUS__PREFIX", prefix)


@contextlib.contextmanager
def paused(url: str) -> Iterator[None]:
    """Pause generation, at first without requests in flight."""

    def call(path: str, body: dict[str, Any]) -> None:
        httpx.post(f"{url}/{path}", json=body, timeout=LIMIT_S).raise_for_status()

    wait_until(url, in_flight=False)
    call("pause_generation", {"mode": "in_place"})
    try:
        yield
    finally:
        call("continue_generation", {})


def wait_until(url: str, *, in_flight: bool) -> None:
    """Wait until a request is in flight, or none is."""

    def requests() -> int:
        return int(httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_total_reqs"])

    eventually(lambda: bool(requests()) == in_flight)
