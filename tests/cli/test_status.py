"""status and health: of a bus, and of a server such as `serve`."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from redis import Redis
from rich.console import Console

from nano_inference.cli.bus_status import BusStatus
from nano_inference.cli.clients import of_one_model
from nano_inference.cli.running import Running, registered
from nano_inference.cli.status import rendered
from nano_inference.config import STAGES, Config, RequestError, redact
from nano_inference.pipeline.health import lanes_of
from nano_inference.pipeline.progress import progress_of
from nano_inference.store.batches import BatchProgress
from nano_inference.store.board import StageReport
from nano_inference.store.redis.keys import Keys

from .conftest import Run, assert_refused, listening, until_ready


def rows(text: str) -> list[list[str]]:
    """The first two words of each line."""
    return [line.split()[:2] for line in text.splitlines()]


# --- status -------------------------------------------------------------------------------------


def test_status_without_a_pipeline(run: Run, on_nobody: str) -> None:
    ran = run("status")
    assert ran.status == 1
    assert "not ready: no stage is running; start a pipeline" in ran.stdout
    found = json.loads(run("status", "--json").stdout)
    assert (found["waiting"], found["in_flight"], found["last_taken_s"]) == (0, 0, None)
    assert (found["prefix"], found["lanes"], found["ready"]) == (on_nobody, [], False)


def test_shards_are_changed_and_shown(run: Run, on_nobody: str) -> None:
    assert run("shards").stdout == "1; requests on each: 0\n"
    found = json.loads(run("shards", "2", "--json").stdout)
    assert found == {"shards": 2, "before": 1, "moving": True, "requests": [0, 0]}
    assert "2, changing from 1; requests on each" in run("shards").stdout
    assert_refused(run("shards", "3"), "from 1 to 2")
    run("submit", "x", "--no-wait")
    status = json.loads(run("status", "--json").stdout)
    assert (status["waiting"], sum(status["shards"]), len(status["shards"])) == (1, 1, 2)
    assert "2, with " in run("status", "--verbose").stdout


def test_status_counts_waiting_requests_and_requests_in_flight(
    run: Run, on_nobody: str, redis_url: str
) -> None:
    for _ in range(3):
        run("submit", "x", "--no-wait")
    keys = Keys(on_nobody)
    with Redis.from_url(redis_url, client_name="some-process") as redis:
        redis.xgroup_create(keys.requests, "admission", "0")
        redis.xreadgroup("admission", "admission-0", {keys.requests: ">"}, count=1)
        redis.xadd(keys.link("plans"), {"w": b"", "m": b""})
        found = json.loads(run("status", "--json").stdout)
        assert "other connection" in run("status", "--verbose").stdout
    assert (found["waiting"], found["in_flight"]) == (2, 1)
    assert found["links"]["plans"] == 1
    assert found["last_taken_s"] >= 0
    assert found["connections"]["some-process"] == 1
    text = run("status").stdout
    assert "1 in flight, 0 tokens/s, 2 waiting" in text
    assert "plans ≤ 1" not in text
    assert "plans ≤ 1" in run("status", "--verbose").stdout


def test_status_of_a_running_pipeline(run: Run, on_served: Config) -> None:
    run("submit", "98 + 25 =")
    until_ready(run)
    text = run("status").stdout
    assert all([stage, "ready"] in rows(text) for stage in STAGES)
    assert rows(text)[:2] == [["pipeline", "ready"], ["requests", "0"]]
    assert "free, " in text
    # Not "credits", which may be among the causes of requests' time too.
    assert "preemptions" not in text
    assert "preemptions" in run("status", "-v").stdout
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(run("status", "--json").stdout)
    assert (found["waiting"], found["in_flight"], found["dead_letters"]) == (0, 0, 0)
    assert found["results"] >= 1
    assert (found["ready"], found["reason"]) == (True, "")
    (lane,) = found["lanes"]
    assert lane["epoch"] >= 1
    assert all(
        each["cpu"] >= 0 and each["memory_bytes"] > 10**7 for each in lane["stages"].values()
    )
    assert "tenants" in lane["stages"]["fairness"]["load"]
    assert set(lane["stages"]) == set(STAGES)
    assert found["server"].startswith("Valkey ")
    assert sum(found["connections"].values()) >= 1


def test_status_top_and_health_of_a_server(run: Run, on_served: Config, url: str) -> None:
    until_ready(run)
    for given in (url, f"{url}/v1"):
        ran = run("status", "--url", given)
        assert ran.status == 0
        assert ["at", url] in rows(ran.stdout)
    assert all([stage, "ready"] in rows(ran.stdout) for stage in STAGES)
    found = json.loads(run("status", "--url", url, "--json").stdout)
    assert (found["ready"], found["url"]) == (True, url)
    load = found["lanes"][0]["stages"]["fairness"]["load"]
    assert ("settings" in load, "tenants" in load) == (False, True), "this server has no keys"
    assert run("status", "--url", url, "--model", "tiny").status == 0
    assert_refused(run("status", "--url", url, "--model", "tine"), "did you mean 'tiny'?")
    shown = run("top", "--url", url).stdout  # once on a pipe
    assert "0 in flight, 0 waiting, 0 not started, 0 dead letters" in shown
    assert "model tiny, lane 0" in shown
    assert "KV blocks" in shown
    assert run("health", "--url", url)[:2] == (0, "ready\n")
    assert run("health", "--live", "--url", url)[:2] == (0, "live\n")


def test_status_of_one_of_several_models_of_a_server() -> None:
    found = replace(look(), lanes=[], models={"first": "ready", "second": "unloaded"})
    only = of_one_model(found, "second")
    assert (only.ready, only.reason) == (False, "model second: it is unloaded")
    assert only.models == {"second": "unloaded"}
    with pytest.raises(RequestError, match="did you mean 'first'"):
        of_one_model(found, "firts")


def test_open_batches_are_shown_the_oldest_first() -> None:
    now_s = int(time.time())
    batches = [
        BatchProgress(
            id=f"batch_{number}", tenant="acme", endpoint="/v1/completions", status="in_progress",
            created_s=now_s - 7200, total=1000, completed=300, failed=number, lines_per_s=10.5,
            seen_s=now_s - 130 * number,
        )
        for number in range(4)
    ]  # fmt: skip
    shown = io.StringIO()
    found = replace(look(), open_batches=5, batches=batches)
    Console(file=shown, width=120, color_system=None).print(rendered(found))
    lines = shown.getvalue().splitlines()
    (first,) = (place for place, each in enumerate(lines) if each.startswith("batches"))
    assert [each[9:].strip() for each in lines[first : first + 5]] == [
        "5 open, 42.0 lines/s, the oldest made 2 h ago",
        "batch_0 in_progress, 300 of 1,000 lines, tenant acme",
        "batch_1 in_progress, 301 of 1,000 lines, 1 failed, tenant acme, not seen for 2 min",
        "batch_2 in_progress, 302 of 1,000 lines, 2 failed, tenant acme, not seen for 4 min",
        "and 2 more",
    ]


LOADS: dict[str, dict[str, int | float | str]] = {
    "fairness": {"queued": 7, "credits": 20},
    "batching": {"running": 40, "waiting": 4, "kv_free": 250, "kv_total": 1000, "kv_cached": 300},
    "streaming": {"open": 40, "tokens_per_s": 1234, "ttft_ms_p50": 35.5, "ttft_ms_p95": 80.0},
}


def report(stage: str, load: dict[str, Any] | None = None, **fields: Any) -> StageReport:
    fields = {"lane": "0", "host": "h", "pid": 1, "epoch": 5, "state": "ready", **fields}
    load = LOADS.get(stage, {}) if load is None else load
    return StageReport(stage=stage, incarnation=stage, load=load, **fields)


def look(*further: StageReport, without: str = "", rate: int = 1234) -> BusStatus:
    """A status, in which `further` replaces or adds stages."""
    streaming = report("streaming", LOADS["streaming"] | {"tokens_per_s": rate})
    reports = {stage: report(stage) for stage in STAGES if stage != without}
    reports |= {each.stage: each for each in (streaming, *further)}
    lanes = lanes_of(reports.values())
    counts = {"waiting": 12, "queue_length": 13, "in_flight": 47, "dead_letters": 1, "results": 0}
    where = {"url": "redis://here:1", "server": "Valkey", "prefix": "nano", "last_taken_s": 0.1}
    state = {"ready": lanes[0].ready, "reason": lanes[0].reason, "lanes": lanes}
    state |= {"stall_timeout_s": 60.0, "progress": progress_of(lanes, 60.0)}
    return BusStatus(links={}, connections={}, **counts, **where, **state)


# --- health -------------------------------------------------------------------------------------


def test_health_without_a_pipeline(run: Run, on_nobody: str) -> None:
    for probe in ("--live", "--ready"):
        ran = run("health", probe)
        assert ran.status == 1
        assert "no stage of lane 0 on" in ran.stdout


def test_health_of_a_running_pipeline(run: Run, on_served: Config) -> None:
    until_ready(run)
    assert run("health")[:2] == (0, "ready\n")
    assert run("health", "--live")[:2] == (0, "live\n")
    assert run("health", "--stage", "executor", "--stage", "batching").status == 0
    ran = run("health", "--host", "elsewhere", "--stage", "executor")
    assert ran.status == 1
    assert "the executor stage of lane 0 on elsewhere: not heard of for" in ran.stdout


STARTING = {"state": "starting", "reason": "it is loading", "epoch": 0}
BEHIND = {"streaming": {"epoch": 4, "host": "elsewhere"}, "executor": {"epoch": 3}}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"executor": STARTING}, "executor is starting: it is loading"),
        (BEHIND, "executor has not come into the current epoch"),
    ],
)
def test_a_live_stage_may_not_be_ready(
    run: Run, on_nobody: str, redis_url: str, changed: dict[str, Any], problem: str
) -> None:
    here = {"host": socket.gethostname()}
    reports = [replace(report(stage), **here | changed.get(stage, {})) for stage in STAGES]
    with Redis.from_url(redis_url) as redis:
        redis.xadd(Keys(on_nobody).stages, {"json": msgspec.json.encode(reports)})
    assert run("health", "--live").status == 0
    assert run("health")[:2] == (1, f"{problem}\n")
    assert run("health", "--stage", "batching").status == 0


def test_health_of_a_role(run: Run, on_nobody: str, redis_url: str) -> None:
    """The lane's role includes a replica on another host."""
    reports = [report(stage) for stage in STAGES]
    reports[1] = replace(reports[1], load={"roles": "prefill,decode"})
    with Redis.from_url(redis_url) as redis:
        redis.xadd(Keys(on_nobody).stages, {"json": msgspec.json.encode(reports)})
    assert run("health", "--role", "prefill")[:2] == (0, "ready\n")
    assert_refused(run("health", "--role", "encode"), "roles are prefill and decode")
    assert_refused(run("health", "--role", "decode", "--live"), "--role is for readiness")
    ran = run("health", "--role", "decode")
    assert ran[:2] == (1, "decode pool not ready: lane 0: no replica has the role decode\n")


def test_a_starting_up_is_shown(run: Run, on_nobody: str, redis_url: str) -> None:
    with registered(Running(command="up", bus=redact(redis_url), prefix=on_nobody)):
        assert f"not ready: `up` (process {os.getpid()}) has been starting" in run("status").stdout


def test_a_paused_idle_pipeline_is_shown(run: Run, on_nobody: str, redis_url: str) -> None:
    loads = {"batching": {"held": "generation is paused"}}
    reports = [report(stage, loads.get(stage, {})) for stage in STAGES]
    with Redis.from_url(redis_url) as redis:
        redis.xadd(Keys(on_nobody).stages, {"json": msgspec.json.encode(reports)})
    shown = "ready, generation paused (resume with `nano-inference resume`)"
    assert shown in run("status").stdout
    assert shown in run("top", "--once").stdout
    assert json.loads(run("status", "--json").stdout)["held"] == "generation is paused"


def test_health_of_a_lane_s_progress(run: Run, on_nobody: str, redis_url: str) -> None:
    loads = {
        "admission": {"in_flight": 2, "busy_s": 90},
        "batching": {"step_age_s": 80},
        "streaming": {"token_age_s": 75},
    }
    reports = [report(stage, loads.get(stage, {})) for stage in STAGES]
    with Redis.from_url(redis_url) as redis:
        redis.xadd(Keys(on_nobody).stages, {"json": msgspec.json.encode(reports)})
    why = "stalled, last token 75 s ago: lane 0: no step of batching has ended for 80 s\n"
    assert run("health", "--progress", "--host", "h")[:2] == (1, why)
    ran = run("health", "--progress")
    assert (ran.status, "not heard of" in ran.stdout) == (1, True)
    ran = run("health", "--progress", "--host", "h", "--set", "pipeline.stall_timeout_s=600")
    assert ran[:2] == (0, "ok, last token 75 s ago\n")
    assert "stalled, last token" in run("status").stdout
    assert_refused(run("health", "--progress", "--live"), "--progress is for all stages")


def test_health_without_redis(run: Run, closed_port: int) -> None:
    url = f"redis://127.0.0.1:{closed_port}"
    live, ready = run("health", "--live", "--bus", url), run("health", "--bus", url)
    assert (live.status, ready.status) == (0, 1)
    assert live.stdout.startswith("unknown: can't reach Redis")
    assert ready.stdout.startswith("not ready: can't reach Redis")


class Probed(BaseHTTPRequestHandler):
    """A server that is live and not ready."""

    def do_GET(self) -> None:
        status, body = {
            "/livez": (200, b'{"status": "alive"}'),
            "/progressz": (503, b'{"status": "stalled", "reason": "no step ends"}'),
            "/readyz?role=decode": (503, b'{"status": "not_ready", "reason": "no replica"}'),
            "/readyz": (503, b'{"status": "not_ready", "reason": "executor is starting"}'),
            "/v2/models/one/ready": (400, b'{"error": "executor is stopped"}'),
        }.get(self.path, (404, b"{}"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_health_of_a_server_that_is_live_and_not_ready(run: Run) -> None:
    with listening(ThreadingHTTPServer(("127.0.0.1", 0), Probed)) as url:
        assert run("health", "--live", "--url", url)[:2] == (0, "live\n")
        assert run("health", "--url", url)[:2] == (1, "not ready: executor is starting\n")
        ran = run("health", "--url", url, "--role", "decode")
        assert ran[:2] == (1, "not ready: no replica\n")
        ran = run("health", "--url", url, "--progress")
        assert ran[:2] == (1, "not making progress: no step ends\n")
        ran = run("health", "--url", url, "--model", "one")
        assert ran[:2] == (1, "not ready: executor is stopped\n")
        assert_refused(run("health", "--url", url, "--model", "a/b"), "/v2/models/a%2Fb/ready")


def test_without_a_server(run: Run, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    for probe, answer in (("--live", "not live"), ("--ready", "not ready")):
        ran = run("health", probe, "--url", url)
        assert (ran.status, ran.stdout.partition(":")[0]) == (1, answer)
    assert_refused(run("health", "--url", url, "--stage", "executor"), "--stage and --host")
    assert_refused(run("status", "--url", url), f"can't reach {url}:")
    assert_refused(run("top", "--url", url), f"can't reach {url}")
