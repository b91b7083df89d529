"""serve, and the gateway in a process of its own, beside a pipeline and as part of `up`."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from nano_inference.cli.connection import SERVE_PORT
from nano_inference.cli.serve import listening
from nano_inference.config import Config, load_config
from nano_inference.gateway.gateway import free_port as free_gateway_port

from ..commands import Command
from .conftest import Run, assert_refused
from .servers import (
    BODY,
    COMMENTS,
    LIMIT_S,
    free_port,
    free_ports,
    served,
    stopped_in_mid_stream,
    text_over_grpc,
    wait_until_healthy,
)

ASKED = {"prompt": "98 + 25 =", "temperature": 0}


@pytest.mark.slow
def test_a_stream_and_an_end_in_good_order(tmp_path: Path) -> None:
    grpc_port = free_port()
    with served(tmp_path, "--grpc-port", str(grpc_port), *COMMENTS) as (serving, url):
        assert text_over_grpc(grpc_port) == b" 123"
        asked = ASKED | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=LIMIT_S) as answer:
            events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " 123"
        assert chunks[0]["model"] == "tiny"
        shown = httpx.get(f"{url}/metrics").text
        assert "\nnano_tokens_decoded_total" in shown
        assert 'http_route="/v1/completions"' in shown
        stopped_in_mid_stream(serving, url, signal.SIGTERM)
    # Every line is JSON, where no terminal is.
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (ready,) = (line for line in log if line["event"] == "serving")
    assert (ready["url"], ready["grpc"]) == (url, f"127.0.0.1:{grpc_port}")
    assert "exception" not in log[-1]


@pytest.mark.slow
def test_a_full_disk_costs_lines_of_the_log_alone(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    metrics = ("--set", f"telemetry.metrics_port={free_port()}")
    with served(tmp_path, "--set", "gateway.access_log=true", *metrics) as (serving, url):
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json=ASKED).status_code == 200
        dropped = 'nano_log_dropped_total{nano_log_reason="unwritable"}'
        assert dropped in httpx.get(f"{url}/metrics").text
        serving.terminate()
        assert serving.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    patience = ("--set", "pipeline.drain_timeout_s=600")
    with served(tmp_path, *patience) as (serving, url):
        httpx.post(f"{url}/pause_generation", json={"mode": "retract"}).raise_for_status()
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as waiting:
            body = json.dumps(ASKED).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            waiting.sendall(head.encode() + body)
            while not httpx.get(f"{url}/v1/loads").json()["loads"][0]["num_total_reqs"]:
                pass
            serving.send_signal(signal.SIGINT)
            while httpx.get(f"{url}/health").status_code == 200:
                pass
            serving.send_signal(signal.SIGINT)
            assert serving.wait(LIMIT_S) == -signal.SIGINT


def test_an_address_that_others_reach(run: Run) -> None:
    """Only with keys; asked for it, it goes on to what comes next, which is its certificate."""
    options = ("serve", "--port", str(free_port()), "--host", "0.0.0.0")
    assert_refused(run(*options), "without keys whoever reaches it may replace the weights")
    files = ("--set", "gateway.tls_certificate=none", "--set", "gateway.tls_key=none")
    assert_refused(run(*options, "--insecure", *files), "No such file")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("serve", "--port"),
        ("serve", "--grpc-port"),
        ("up", "--gateway"),
        ("up --gateway PORT", "--grpc-port"),
    ],
)
def test_taken_port_is_found_before_anything_starts(run: Run, command: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        ran = run(*command.replace("PORT", str(free_port())).split(), option, str(port))
    assert_refused(ran, f"port {port} is taken; choose another with {option}")


def test_port_0_is_a_free_one(run: Run) -> None:
    config = load_config(env={})
    assert listening(config, 0, SERVE_PORT).gateway.port == 0
    assert listening(config, None, SERVE_PORT).gateway.port == SERVE_PORT
    assert free_gateway_port(config) > 0
    assert_refused(run("up", "--bus", "memory"), "within one process", "nano-inference serve")


# --- gateway --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_beside_a_pipeline(on_served: Config, tmp_path: Path) -> None:
    with served(tmp_path, *COMMENTS, command="gateway") as (gateway, url):
        answer = httpx.post(f"{url}/generate", json=BODY, timeout=LIMIT_S).json()
        assert answer["text"] == " 123"
        info = httpx.get(f"{url}/server_info").json()
        assert url.endswith(f":{info['port']}")
        assert 'http_route="/generate"' in httpx.get(f"{url}/metrics").text
        stopped_in_mid_stream(gateway, url, signal.SIGHUP)
    log = (tmp_path / "log").read_text()
    assert "gateway_listens" in log
    assert "Traceback" not in log


@pytest.mark.soak(only=True)
def test_as_part_of_up(tmp_path: Path) -> None:
    port, grpc_port, metrics_port = free_port(), free_port(), free_ports(6)
    command = ["up", "--port", str(free_port()), "--gateway", str(port)]
    command += ["--grpc-port", str(grpc_port)]
    command += ["--set", f"telemetry.metrics_port={metrics_port}", *COMMENTS]
    with Command(*command, log=tmp_path / "log") as up:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(up, url)
        answer = httpx.post(f"{url}/generate", json=BODY, timeout=LIMIT_S).json()
        assert answer["text"] == " 123"
        assert text_over_grpc(grpc_port) == b" 123"
        # After those of the five stages.
        shown = httpx.get(f"http://127.0.0.1:{metrics_port + 5}/metrics").text
        counts = re.findall(
            r'^http_server_request_duration_seconds_count.*"/generate".*', shown, re.M
        )
        assert [each.partition(" ")[2] for each in counts] == ["1.0"]
        assert 'http_response_status_code="200"' in counts[0]
        stopped_in_mid_stream(up, url, signal.SIGTERM)
    log = (tmp_path / "log").read_text()
    assert "starting six processes" in log
    assert "Traceback" not in log
