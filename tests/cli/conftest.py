"""A running pipeline behind a real server, and the commands in this process."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import structlog
from anyio.from_thread import start_blocking_portal

from nano_inference.cli.app import main
from nano_inference.config import Config, load_config
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.telemetry import setup_logging


class Ran(NamedTuple):
    """What a command did."""

    status: int
    stdout: str
    stderr: str


Run = Callable[..., Ran]


@contextlib.contextmanager
def _logging_as_before() -> Iterator[None]:
    """Takes back what is done to the logs inside: their end is a capture that ends too."""
    root = logging.getLogger()
    configured, handlers, level = structlog.get_config(), root.handlers[:], root.level
    yield
    structlog.configure(**configured)
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    """Runs a command line in this process, as on a pipe without colour."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        status = main(arguments)
        return Ran(status, *capsys.readouterr())

    with _logging_as_before():
        yield call


@contextlib.contextmanager
def serving(redis_url: str) -> Iterator[Config]:
    """The settings of a pipeline that runs in another thread, on keys of its own."""
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
        with _logging_as_before():  # the stages keep what is set while they start
            setup_logging(config.telemetry)
            stack.enter_context(portal.wrap_async_context_manager(Pipeline(config)))
        yield config


@pytest.fixture(scope="session")
def served(redis_url: str) -> Iterator[Config]:
    """A pipeline that all tests share, so they leave it as it was."""
    with serving(redis_url) as config:
        yield config


@pytest.fixture
def on_served(served: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Commands without --bus talk to `served`."""
    use_bus(monkeypatch, served.bus.url, served.bus.prefix)
    return served


@pytest.fixture
def on_nobody(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Commands without --bus talk to a server that no pipeline has; gives the keys' prefix."""
    prefix = f"nobody-{uuid.uuid4().hex[:8]}"
    use_bus(monkeypatch, redis_url, prefix)
    return prefix


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
    """Sets the environment that the commands, and programs started from here, read."""
    monkeypatch.setenv("NANO_INFERENCE_BUS__URL", url)
    monkeypatch.setenv("NANO_INFERENCE_BUS__PREFIX", prefix)
