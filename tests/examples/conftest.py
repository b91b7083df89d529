"""The examples import one another as scripts do, from their own folder.

And those that take packages of others: their environments, and a server that they ask.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..cli.servers import free_port, served
from .environments import environment, node_folder

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


@pytest.fixture(scope="session")
def node_folders(online: None, pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Gives the folder with the packages of a program of Node; see `node_folder`."""
    if shutil.which("npm") is None:
        pytest.skip("there is no Node")
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    folder = cache.mkdir("clients")
    return lambda name: node_folder(name, folder)


@pytest.fixture(scope="module")
def addresses(online: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of a `serve` whose log reports no failure, as variables for programs."""
    folder = tmp_path_factory.mktemp("serve")
    metrics_port = free_port()
    with served(folder, "--set", f"telemetry.metrics_port={metrics_port}") as (_, url):
        yield {
            "NANO_INFERENCE_URL": url,
            "NANO_INFERENCE_METRICS_URL": f"http://127.0.0.1:{metrics_port}/metrics",
        }
    log = (folder / "log").read_text()
    assert "Traceback" not in log, log
    assert '"level": "error"' not in log, log


@pytest.fixture(scope="module")
def serving(addresses: dict[str, str]) -> str:
    """Its URL."""
    return addresses["NANO_INFERENCE_URL"]
