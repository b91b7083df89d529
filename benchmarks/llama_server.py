"""llama.cpp's server, for speculation_peers.py and constraint_peers.py."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from harness import cpu_s, free_port, stop, wait_until_answered

LIMIT_S = 120


class LlamaServer:
    """A server that runs until the stack is closed, and answers all rows at once.

    Args:
        options: More options of the command line.
        log: File for its output.
    """

    def __init__(
        self,
        program: Path,
        gguf: Path,
        rows: int,
        threads: int,
        stack: ExitStack,
        *options: object,
        log: Path,
    ) -> None:
        port = free_port()
        command = [program, "-m", gguf, "--port", port, "-np", rows, "-t", threads]
        command += ["-c", rows * 512, "-cram", "0", *options]
        with log.open("w") as output:
            self._process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output)
        stack.callback(stop, self._process)
        url = f"http://127.0.0.1:{port}"
        wait_until_answered(f"{url}/health", self._process, limit_s=LIMIT_S)
        self._client = stack.enter_context(httpx.Client(base_url=url, timeout=LIMIT_S))
        self._pool = stack.enter_context(ThreadPoolExecutor(rows))

    def complete(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Complete token prompts at once, sampling from the full vocabulary; return the answers."""

        def one(body: dict[str, Any]) -> dict[str, Any]:
            whole = {"samplers": ["temperature"], **body}
            return self._client.post("/completion", json=whole).raise_for_status().json()

        return list(self._pool.map(one, bodies))

    def cpu_s(self) -> float:
        """Return the CPU time used so far."""
        return cpu_s(self._process.pid)
