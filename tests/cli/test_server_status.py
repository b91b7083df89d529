"""`status`, `top` and `health` of a server, as of what `serve` runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from nano_inference.cli import server_status
from nano_inference.config import STAGES, Config, GatewayConfig
from nano_inference.pipeline.status import PipelineStatus

from .conftest import Run
from .opened import Opened
from .test_clients import until_ready
from .test_errors import assert_refused


@pytest.fixture(scope="module")
def url(served: Config) -> Iterator[str]:
    """A gateway in front of the pipeline that all tests share."""
    config = msgspec.structs.replace(served, gateway=GatewayConfig())
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Opened(config)) as gateway,
    ):
        yield gateway.url


def test_server_shows_stages_and_requests(run: Run, on_served: Config, url: str) -> None:
    until_ready(run)
    for given in (url, f"{url}/v1"):
        ran = run("status", "--url", given)
        assert ran.status == 0
        rows = [line.split()[:2] for line in ran.stdout.splitlines()]
        assert ["at", url] in rows
    assert all([stage, "ready"] in rows for stage in STAGES)
    found = json.loads(run("status", "--url", url, "--json").stdout)
    assert (found["ready"], found["url"]) == (True, url)
    assert "settings" not in found["lanes"][0]["stages"]["fairness"]["load"]
    assert run("status", "--url", url, "--model", "tiny").status == 0
    assert_refused(run("status", "--url", url, "--model", "tine"), "did you mean 'tiny'?")


def test_top_and_health_of_a_server(run: Run, on_served: Config, url: str) -> None:
    until_ready(run)
    ran = run("top", "--once", "--url", url)
    assert ran.status == 0
    assert "KV blocks" in ran.stdout
    assert run("health", "--url", url)[:2] == (0, "ready\n")
    assert run("health", "--live", "--url", url)[:2] == (0, "live\n")


def test_server_and_bus_together_are_refused(run: Run) -> None:
    for command in ("status", "top", "health"):
        ran = run(command, "--url", "http://h", "--bus", "redis://h")
        assert_refused(ran, "give --url or --bus, and not both")


def test_one_of_several_models_of_a_server() -> None:
    found = PipelineStatus(
        ready=True,
        reason="",
        waiting=0,
        in_flight=0,
        queue_length=0,
        dead_letters=0,
        lanes=[],
        models={"first": "ready", "second": "unloaded"},
    )
    only = server_status.of_one_model(found, "second")
    assert (only.ready, only.reason) == (False, "model second: it is unloaded")
    assert only.models == {"second": "unloaded"}
    with pytest.raises(Exception, match="did you mean 'first'"):
        server_status.of_one_model(found, "firts")
