"""`health`, as probes use it."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from redis import Redis

from nano_inference.config import STAGES, Config
from nano_inference.store.board import StageReport
from nano_inference.store.redis.keys import Keys

from .conftest import Run
from .test_clients import until_ready
from .test_errors import assert_refused


@pytest.fixture
def told(on_nobody: str, redis_url: str) -> Any:
    """Puts reports of processes on this host on the board."""

    def tell(**changed: dict[str, Any]) -> None:
        reports = []
        for stage in STAGES:
            given = {"incarnation": stage, "pid": 1, "epoch": 5, "state": "ready", "lane": "0"}
            given |= {"host": socket.gethostname(), **changed.get(stage, {})}
            reports.append(StageReport(stage=stage, **given))
        with Redis.from_url(redis_url) as redis:
            redis.xadd(Keys(on_nobody).stages, {"json": msgspec.json.encode(reports)})

    return tell


def test_nobody_is_there(run: Run, on_nobody: str) -> None:
    for question in ("--live", "--ready"):
        ran = run("health", question)
        assert ran.status == 1
        assert "no stage of lane 0 on" in ran.stdout


def test_a_running_pipeline(run: Run, on_served: Config) -> None:
    until_ready(run)
    assert run("health")[:2] == (0, "ready\n")
    assert run("health", "--live")[:2] == (0, "live\n")
    assert run("health", "--stage", "executor", "--stage", "batching").status == 0
    ran = run("health", "--host", "elsewhere", "--stage", "executor")
    assert ran.status == 1
    assert "the executor stage of lane 0 on elsewhere was not heard of" in ran.stdout


def test_live_and_not_ready(run: Run, told: Any) -> None:
    told(executor={"state": "starting", "reason": "it is loading", "epoch": 0})
    assert run("health", "--live").status == 0
    assert run("health")[:2] == (1, "executor is starting: it is loading\n")
    assert run("health", "--stage", "streaming").status == 0


def test_in_an_older_epoch_than_the_lane(run: Run, told: Any) -> None:
    told(streaming={"epoch": 4, "host": "elsewhere"}, executor={"epoch": 3})
    ran = run("health")
    assert (ran.status, ran.stdout) == (1, "executor has not come into the current epoch\n")


def test_redis_is_away(run: Run, closed_port: int) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    live, ready = run("health", "--live", "--bus", url), run("health", "--bus", url)
    assert (live.status, ready.status) == (0, 1)
    assert live.stdout.startswith("unknown: can't reach Redis")
    assert ready.stdout.startswith("not ready: can't reach Redis")


def test_unknown_stage(run: Run) -> None:
    assert_refused(run("health", "--stage", "exec"), "did you mean 'executor'?")


# --- of a server --------------------------------------------------------------------------------


class Probed(BaseHTTPRequestHandler):
    """A server that says over HTTP that it lives and is not ready."""

    def do_GET(self) -> None:
        status, body = {
            "/livez": (200, b'{"status": "alive"}'),
            "/readyz": (503, b'{"status": "not_ready", "reason": "executor is starting"}'),
            "/v2/models/one/ready": (400, b'{"error": "executor is stopped"}'),
        }.get(self.path, (404, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_server_that_lives_and_is_not_ready(run: Run) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Probed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert run("health", "--live", "--url", url)[:2] == (0, "live\n")
            assert run("health", "--url", url)[:2] == (1, "not ready: executor is starting\n")
            ran = run("health", "--url", url, "--model", "one")
            assert ran[:2] == (1, "not ready: executor is stopped\n")
            assert_refused(run("health", "--url", url, "--model", "a/b"), "/v2/models/a%2Fb/ready")
        finally:
            server.shutdown()
            thread.join()


def test_server_that_is_not_there(run: Run, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    for question, answer in (("--live", "not live"), ("--ready", "not ready")):
        ran = run("health", question, "--url", url)
        assert (ran.status, ran.stdout.partition(":")[0]) == (1, answer)
    assert_refused(run("health", "--url", url, "--stage", "executor"), "--stage and --host")
    assert_refused(run("status", "--url", url), f"can't reach {url}")
    assert_refused(run("top", "--url", url), f"can't reach {url}")
