"""Five processes over Redis, used by our clients and by a client that has no code of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import redis
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from transformers import AutoModelForCausalLM

from nano_inference import BusClient, Completion
from nano_inference.bus.public import Output
from nano_inference.config import STAGES, BusConfig, TelemetryConfig
from nano_inference.pipeline.health import lanes_of
from nano_inference.store.board import StageReport
from nano_inference.telemetry import setup_tracing
from nano_inference.telemetry.trace_file import Span, read_spans

from ..commands import Command, run_command
from ..soaking import in_soak
from ..stages.executor.runner.adapters.making import make_adapter
from . import reference, short_model
from .builders import GOOD, MORE_TOKENS, asking, check_stream, end_of, stream_request
from .conftest import LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# While a stage is terminated.
STREAMS = 10
# Tokens that take far longer than a kill does.
LONG = 100


class Spans:
    """An OTLP receiver: what arrives, decoded from the real bytes."""

    def __init__(self) -> None:
        self.by_trace: dict[str, list[tuple[str, str, str, str]]] = defaultdict(list)
        spans = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                spans.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            instance = attributes["service.instance.id"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    row = (span.name, span.span_id.hex(), span.parent_span_id.hex(), instance)
                    self.by_trace[span.trace_id.hex()].append(row)


REPLACED = "batching"
"""The stage that has a standby."""

KILLED_EVERY_DAY = (REPLACED, "executor")
"""The executor has to load adapters again."""


class Deployment:
    """`nano-inference up` with the short model, and its output."""

    trace_file: Path
    metrics_port: int

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        endpoint: str,
        log: Path,
        settings: dict[str, object] | None = None,
        cold: bool = False,
    ) -> None:
        """Args: `cold` is whether it starts as a user's does, and imports all that it needs."""
        self.bus = BusConfig(url=url, prefix=prefix)
        self.log = log
        command = ["up", "--bus", url]
        command += ["--set", f"bus.prefix={prefix}", "--set", "engine.dtype=float32"]
        command += ["--set", f"engine.model_path={short_model.folder()}"]
        command += ["--set", "pipeline.restart_backoff_s=0.05"]
        for name, value in (settings or {}).items():
            command += ["--set", f"{name}={value}"]
        variables = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
        self.process: Command | subprocess.Popen[bytes]
        if not cold:
            self.process = Command(*command, log=log, environment=variables)
            return
        program = [sys.executable, "-m", "nano_inference", *command]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                program, stderr=file, stdout=file, env=variables, start_new_session=True
            )

    def has_torch(self, stage: str) -> bool:
        return "libtorch" in Path(f"/proc/{self.child(stage)}/maps").read_text()

    def child(self, stage: str) -> int:
        """The process id of a stage."""
        return self.children(stage)[0]

    def children(self, stage: str) -> list[int]:
        """The process ids of a stage and of its standby, which is the later one."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid), "-f", "--", f"--stages {stage}"],
            capture_output=True,
            text=True,
            check=True,
        )
        # A later process may have a smaller id, once the system has given out all.
        return sorted(map(int, found.stdout.split()), key=start_ticks)

    def told_by(self, *command: str) -> str:
        """Run a command on this bus; return its output."""
        where = ("--bus", self.bus.url, "--set", f"bus.prefix={self.bus.prefix}")
        ran = run_command(*command, *where)
        assert ran.status == 0, ran.stderr
        return ran.stdout

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start_ticks(pid: int) -> int:
    """When a process started, in the system's ticks."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.fixture(scope="module")
def spans() -> Iterator[Spans]:
    receiver = Spans()
    yield receiver
    receiver.server.shutdown()


@pytest.fixture(scope="module")
def deployment(
    redis_url: str, spans: Spans, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    log = tmp_path_factory.mktemp("up") / "log"
    settings = {
        "telemetry.trace_file": log.parent / "traces.jsonl",
        "telemetry.metrics_port": five_free_ports(),
        "engine.kv_events": True,
        "pipeline.standby": f"[{REPLACED}]",
    }
    prefix = f"up-{uuid.uuid4().hex[:8]}"
    running = Deployment(
        redis_url, prefix, endpoint=spans.url, log=log, settings=settings, cold=True
    )
    running.trace_file = log.parent / "traces.jsonl"
    running.metrics_port = int(str(settings["telemetry.metrics_port"]))
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


def five_free_ports() -> int:
    """Return the first of five free ports in a row, which no other test worker tries."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for first in range(20_000 + 1000 * (worker % 10), 60_000, 5):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + 5):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


def generated(prompt: str, max_tokens: int, **how: Any) -> list[int]:
    """Return the tokens that Transformers generates for a prompt."""
    prompt_ids = reference.tokenizer().encode(prompt)
    return reference.generate(prompt_ids, max_tokens, folder=short_model.folder(), **how)


async def complete(deployment: Deployment, request: dict[str, object]) -> Completion:
    async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus) as client:
        return await client.complete(request)


async def test_five_processes_answer(deployment: Deployment) -> None:
    completion = await complete(deployment, GOOD)
    assert completion.status == "done"
    wanted = generated(GOOD["prompt"], 16)
    assert list(completion.samples[0].token_ids) == wanted
    assert [held.stage for held in completion.timings.stages] == list(STAGES)
    assert len({deployment.child(stage) for stage in STAGES}) == 5


async def test_only_the_executor_has_torch(deployment: Deployment) -> None:
    await complete(deployment, {"messages": [{"role": "user", "content": "12 + 30"}]})
    assert [stage for stage in STAGES if deployment.has_torch(stage)] == ["executor"]


async def test_a_client_with_no_code_of_ours(deployment: Deployment) -> None:
    """The steps of docs/redis.md work with nothing but a Redis client."""
    prefix = deployment.bus.prefix
    with redis.from_url(deployment.bus.url, decode_responses=True) as foreign:
        request = {
            "request_id": "foreign-1",
            "prompt": "12 + 30 =",
            "sampling": {"temperature": 0, "max_tokens": 16},
        }
        entry_id = foreign.xadd(f"{prefix}:requests", {"json": json.dumps(request)})
        position, outputs = "0", []
        end = time.monotonic() + LIMIT_S
        while not outputs or outputs[-1]["type"] != "completion":
            assert time.monotonic() < end, "there is no completion"
            reply = foreign.xread({f"{prefix}:out:foreign-1": position}, count=10, block=2000)
            for entry, fields in reply[0][1] if reply else []:
                position = entry
                outputs.append(json.loads(fields["json"]))
        *chunks, completion = outputs
        assert completion["status"] == "done"
        assert completion["entry_id"] == entry_id
        assert "".join(chunk["text"] for chunk in chunks) == completion["samples"][0]["text"]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == completion["samples"][
            0
        ]["token_ids"]
        # It is put into the shared stream right after that.
        position, shared = "0", []
        for _ in range(LIMIT_S):
            reply = foreign.xread({f"{prefix}:results": position}, block=1000)
            for entry, fields in reply[0][1] if reply else []:
                position = entry
                shared.append(json.loads(fields["json"]))
            if completion in shared:
                break
        assert completion in shared
        assert foreign.xinfo_stream(f"{prefix}:out:foreign-1")["first-entry"][0].endswith("-1")
        assert foreign.ttl(f"{prefix}:out:foreign-1") > 0


async def metrics_of(deployment: Deployment, stage: str) -> str:
    url = f"http://127.0.0.1:{deployment.metrics_port + STAGES.index(stage)}/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, url) as reply:
        return str(reply.read().decode())


async def test_each_process_shows_the_metrics_of_its_stage(deployment: Deployment) -> None:
    await complete(deployment, GOOD)
    for stage in STAGES:
        wanted = f'nano_stage_ready{{nano_stage="{stage}"}} 1.0'
        async with asyncio.timeout(LIMIT_S):
            while wanted not in (shown := await metrics_of(deployment, stage)):
                pass
        assert shown.count("nano_stage_ready{") == 1


async def test_the_attention_backend_is_a_metric(deployment: Deployment) -> None:
    await complete(deployment, GOOD)
    line = r'nano_attention_layers_total{.*="(gather|paged)",.*="full"} (\S+)'
    found = None
    async with asyncio.timeout(LIMIT_S):
        while found is None or not float(found[2]):
            found = re.search(line, shown := await metrics_of(deployment, "executor"))
    assert f'nano_attention_backend{{nano_attention_backend="{found[1]}"}} 1.0' in shown


async def ready_stages(client: BusClient) -> dict[str, StageReport]:
    """The stages, once the board says that all of them take part."""
    while True:
        (*_, lane) = lanes_of(await client.bus.store.board.read()) or [None]
        if lane is not None and lane.ready:
            return lane.stages
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "stage", [stage if stage == "admission" else in_soak(stage) for stage in STAGES]
)
async def test_a_terminated_stage_is_replaced_and_streams_go_on(
    deployment: Deployment, stage: str
) -> None:
    said_before = len(deployment.log.read_text())
    async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus) as client:
        before = await ready_stages(client)
        begun = asyncio.Event()

        async def stream(index: int) -> None:
            outputs: list[Output] = []
            async for output in client.submit(stream_request(index, MORE_TOKENS)):
                outputs.append(output)
                begun.set()
            check_stream(index, outputs, MORE_TOKENS, short_model.folder())

        async with asyncio.TaskGroup() as streams:
            for index in range(STREAMS):
                streams.create_task(stream(index))
            await begun.wait()
            os.kill(before[stage].pid, signal.SIGTERM)
        after = await ready_stages(client)
        while after[stage].pid == before[stage].pid:
            after = await ready_stages(client)
        unchanged = {name for name in STAGES if after[name].pid == before[name].pid}
        assert unchanged == set(STAGES) - {stage}
    log = deployment.log.read_text()[said_before:]
    assert f"{stage} was terminated; starting its successor" in log
    assert "ended with status" not in log, "leaving in good order is no failure"


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("adapter")
    make_adapter(AutoModelForCausalLM.from_pretrained(short_model.folder()), 1, folder)
    return str(folder)


@pytest.mark.parametrize(
    # All are killed in tests/pipeline/test_chaos.py.
    "stage",
    [stage if stage in KILLED_EVERY_DAY else in_soak(stage) for stage in STAGES],
)
async def test_a_killed_process_is_replaced_and_the_stream_goes_on(
    deployment: Deployment, adapter_folder: str, stage: str
) -> None:
    """So does one with an adapter, which was loaded meanwhile."""
    long = asking(tokens=LONG)
    said_before = len(deployment.log.read_text())
    async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus) as client:
        if not await client.adapters():
            await client.load_adapter("later", adapter_folder)
        adapted = long | {"model": "later"}
        undisturbed = await client.complete(adapted)
        while stage == REPLACED and len(deployment.children(stage)) == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        child, *standbys = deployment.children(stage)
        hit, hit_too = client.submit(long), client.submit(adapted)
        outputs = [await anext(hit)]
        await anext(hit_too)
        os.kill(child, signal.SIGKILL)
        outputs += [output async for output in hit]
        *_, end = [output async for output in hit_too]
        assert isinstance(end, Completion)
        assert end.error is None, end.error
        assert end.samples[0].token_ids == undisturbed.samples[0].token_ids
        *chunks, completion = outputs
        assert completion.status == "done", completion.error
        token_ids = [token for chunk in chunks for token in chunk.token_ids]  # type: ignore[union-attr]
        assert token_ids == list(completion.samples[0].token_ids)
        assert token_ids == generated("12 + 30 =", LONG, ignore_eos=True, claimed=token_ids)
        assert tuple(token_ids) != end.samples[0].token_ids
        assert (await client.complete(GOOD)).status == "done"
    if standbys:
        assert deployment.child(stage) == standbys[0]
        assert "; its standby takes over" in deployment.log.read_text()[said_before:]


async def test_every_stage_has_its_span_in_one_trace_and_sigterm_drains(
    deployment: Deployment, spans: Spans
) -> None:
    config = TelemetryConfig(otlp_endpoint=spans.url, trace_file=str(deployment.trace_file))
    tracing = setup_tracing(config, f"client-{socket.gethostname()}")
    async with asyncio.timeout(LIMIT_S), BusClient.connect(deployment.bus, tracing) as client:
        completion = await client.complete({**GOOD, "n": 3})
        running = client.submit(asking("1 + 1 =", 150))
        await anext(running)
        stopping = asyncio.create_task(asyncio.to_thread(deployment.stop))
        last = await end_of(running)
        assert last.status == "done", "requests in flight at SIGTERM finish"
        assert await stopping == 0
    await asyncio.to_thread(tracing.shutdown)
    rows = spans.by_trace[completion.trace_id]
    assert sorted(name for name, *_ in rows) == sorted(
        ["text_completion tiny", *STAGES, "prefill", "decode"]
    )
    ids = {name: span_id for name, span_id, _, _ in rows}
    parents = {name: parent for name, _, parent, _ in rows}
    assert {parents[stage] for stage in STAGES} == {ids["text_completion tiny"]}
    assert parents["prefill"] == parents["decode"] == ids["executor"]
    assert len({instance for *_, instance in rows}) == 6, "each process exports its own"


async def test_every_request_above_has_a_complete_trace_without_orphans(
    deployment: Deployment,
) -> None:
    """Also after a killed process: its exported spans stay."""
    with redis.from_url(deployment.bus.url, decode_responses=True) as foreign:
        entries = foreign.xrange(f"{deployment.bus.prefix}:results")
    completions = [json.loads(fields["json"]) for _, fields in entries]
    done = [each for each in completions if each["status"] == "done"]
    # Vectors are made within a step, so that a killed executor may take spans of them with it.
    done = [each for each in done if any(sample["token_ids"] for sample in each["samples"])]
    assert len(done) >= 15
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in read_spans(deployment.trace_file):
        traces[span.trace_id].append(span)
    for completion in done:
        spans = traces[completion["trace_id"]]
        found = {span.name for span in spans}
        assert {*STAGES, "prefill", "decode"} <= found, completion["entry_id"]
        ids = {span.span_id for span in spans}
        roots = {span.span_id for span in spans if not span.parent_id}
        assert len(roots) == 1
        assert {span.parent_id for span in spans if span.parent_id} <= ids, "no orphans"
    replayed = [c for c in done if any(s.name == "replay" for s in traces[c["trace_id"]])]
    assert len(replayed) >= len(KILLED_EVERY_DAY), "one was hit by each kill"
    steps = [span for spans in traces.values() for span in spans if span.name == "step"]
    assert steps
    assert {link for step in steps for link in step.links} <= {c["trace_id"] for c in completions}


async def test_over_otlp_no_span_has_a_parent_that_never_came(
    deployment: Deployment, spans: Spans
) -> None:
    """A killed process takes the last spans that it made with it, and the first span of a trace may
    be among them: then others make it again."""
    with redis.from_url(deployment.bus.url, decode_responses=True) as foreign:
        entries = foreign.xrange(f"{deployment.bus.prefix}:results")
    completions = [json.loads(fields["json"]) for _, fields in entries]
    traces = [spans.by_trace[done["trace_id"]] for done in completions if done["status"] == "done"]
    assert len(traces) >= 15
    for rows in traces:
        assert {"executor", "streaming"} & {name for name, *_ in rows}
        ids = {span_id for _, span_id, _, _ in rows}
        assert {parent for _, _, parent, _ in rows if parent} <= ids
    assert any(len({name for name, *_ in rows} & set(STAGES)) == 5 for rows in traces)
