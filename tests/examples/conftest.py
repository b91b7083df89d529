"""The examples import one another as scripts do, from their own folder.

And those that take packages of others: their environments, and a server that they ask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..cli.test_serve import served
from ..cli.test_up import free_port
from .environments import environment

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))


@pytest.fixture(scope="session")
def online(soak: bool) -> None:
    """Packages are fetched for a soak alone; nothing of every day takes a network."""
    if not soak:
        pytest.skip("installs packages; run it with --soak")


@pytest.fixture(scope="session")
def programs(online: None, pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Gives the folder of the programs that an example calls; see `environment`."""
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    folder = cache.mkdir("clients")
    return lambda name: environment(name, folder)


@pytest.fixture(scope="module")
def serving(online: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `serve`, which tells its metrics, and in whose log nothing has failed."""
    folder = tmp_path_factory.mktemp("serve")
    metrics = ["--set", f"telemetry.metrics_port={free_port()}"]
    with served([sys.executable, "-m", "nano_inference"], folder, *metrics) as (_, url):
        yield url
    log = (folder / "log").read_text()
    assert "Traceback" not in log, log
    assert '"level": "error"' not in log, log
