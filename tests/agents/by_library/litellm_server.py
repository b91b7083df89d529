"""LiteLLM's proxy as a process of its own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

LIMIT_S = 120


@contextmanager
def running_proxy(models: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Run the proxy, and return its address. Args: `models` have LiteLLM's parameters by name."""
    settings = {
        "model_list": [
            {"model_name": name, "litellm_params": params} for name, params in models.items()
        ],
        "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
    }
    Path("proxy.yaml").write_text(json.dumps(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = str(Path(sys.executable).parent / "litellm")
    command = [program, "--config", "proxy.yaml", "--host", "127.0.0.1", "--port", port]
    proxy = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command)
    try:
        _wait_until_ready(proxy, process)
        yield proxy
    finally:
        process.kill()


def _wait_until_ready(proxy: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(LIMIT_S):
        assert process.poll() is None
        try:
            if httpx.get(f"{proxy}/health/liveliness").status_code == 200:
                return
        except httpx.ConnectError:
            pass
        time.sleep(1)
    raise AssertionError("the proxy never became ready")
