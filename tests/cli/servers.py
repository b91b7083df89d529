"""The command line as a server: free ports, readiness, streams and its end."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import tritonclient.grpc

from ..commands import Command

LIMIT_S = 60

BODY = {"text": "98 + 25 =", "sampling_params": {"temperature": 0}}

COMMENTS = ["--set", "gateway.comment_s=0.2"]
"""A stream begins although no token comes."""


def free_port() -> int:
    return free_ports(1)


def free_ports(number: int) -> int:
    """Return the first of consecutive free ports."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        with ExitStack() as stack, suppress(OSError, OverflowError):
            for port in range(first, first + number):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first


def wait_until_healthy(process: Command, url: str) -> None:
    """Wait as slime does for a server: refused connections, then 503, then a token."""
    with httpx.Client(timeout=LIMIT_S) as client:
        for _ in range(LIMIT_S * 10):
            assert process.poll() is None
            try:
                if client.get(f"{url}/health_generate").status_code == 200:
                    return
            except httpx.ConnectError:
                pass
            time.sleep(0.1)
    raise AssertionError(f"{url} never became healthy")


def stopped_in_mid_stream(process: Command, url: str, asked: signal.Signals) -> None:
    """Stop a process, started with `COMMENTS`, during a stream: it refuses new calls, finishes the
    stream, and ends."""
    httpx.post(f"{url}/pause_generation", json={"mode": "in_place"}).raise_for_status()
    body = {"prompt": "98 + 25 =", "max_tokens": 40, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": keep-alive"
        process.send_signal(asked)
        while httpx.get(f"{url}/health").status_code == 200:
            pass
        refused = httpx.post(f"{url}/generate", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "shutting_down"
        httpx.post(f"{url}/continue_generation", json={}, timeout=LIMIT_S).raise_for_status()
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert process.wait(LIMIT_S) == 0


def text_over_grpc(port: int) -> bytes:
    """Return the answer that Triton's client gets."""
    text = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"98 + 25 ="], dtype=np.object_))
    alone = tritonclient.grpc.InferInput("exclude_input_in_output", [1], "BOOL")
    alone.set_data_from_numpy(np.array([True]))
    sampling = {"temperature": 0.0}
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_ready(client_timeout=LIMIT_S)
        answer = client.infer("tiny", [text, alone], parameters=sampling, client_timeout=LIMIT_S)
    (found,) = answer.as_numpy("text_output")
    return bytes(found)


@contextmanager
def served(folder: Path, *options: str, command: str = "serve") -> Iterator[tuple[Command, str]]:
    """Run `serve`, or `gateway`; yield the ready program and its URL."""
    port = free_port()
    with Command(command, "--port", str(port), *options, log=folder / "log") as process:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, url)
        yield process, url
