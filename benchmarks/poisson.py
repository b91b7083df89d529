"""Poisson load by aiperf on three servers: ours, llama-server and `transformers serve`.

    python benchmarks/poisson.py --aiperf PATH --llama-server PATH --transformers PYTHON
        [--rates 0.5,1,2] [--seconds 40] [--shape S] [--folder DIR] [--json FILE]

On random weights in the shape of Qwen2.5-0.5B (S), in bfloat16. All servers are up all the time,
each with the model in memory, and take turns, in rotating order: at each rate the same texts,
lengths and arrivals for each. A server whose program is not given is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import machine
from chaos_rig import free_port
from tokenizers import Tokenizer
from workloads import SHAPES, Workload, make_requests

from gateway import made_model

OURS, LLAMA, TRANSFORMERS = "nano-inference", "llama-server", "transformers serve"
TTFT_MS, ITL_MS = 1000, 100
"""A request counts for the goodput when its first token and, on average, each further one have
come within that."""

START_LIMIT_S = 180.0
RUN_LIMIT_S = 600.0

_SLOTS, _CONTEXT = 16, 2048
_LIMIT_S = 300

# Counting tokens is the servers' business; aiperf wants some tokenizer nevertheless.
_ANY_TOKENIZER = Path(__file__).parent.parent / "models" / "tiny"


class Server(NamedTuple):
    """What is measured.

    Attributes:
        model: What it calls the model.
        extras: Fields of the body beyond OpenAI's, without which it would end at some token.
    """

    name: str
    url: str
    model: str
    extras: tuple[str, ...]


def commands(
    arguments: argparse.Namespace, folder: Path, ports: dict[str, int]
) -> dict[str, list[str]]:
    """How each server is started that there is a program for."""
    threads = str(arguments.threads)
    found = {
        OURS: [
            *(sys.executable, "-m", "nano_inference", "serve"),
            *("--model", str(folder), "--port", str(ports[OURS]), "--log-level", "error"),
        ]
    }
    if arguments.llama_server:
        found[LLAMA] = [
            *(arguments.llama_server, "--model", str(folder.with_suffix(".gguf"))),
            *("--host", "127.0.0.1", "--port", str(ports[LLAMA]), "--threads", threads),
            *("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _CONTEXT)),
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
    """The servers, once each has answered some requests."""
    ports = {name: free_port() for name in (OURS, LLAMA, TRANSFORMERS)}
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(arguments.threads),
    }
    with contextlib.ExitStack() as stack:
        servers = []
        for name, command in commands(arguments, folder, ports).items():
            log = stack.enter_context((logs / f"{name.replace(' ', '-')}.log").open("w"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(_stop, process)
            extras = () if name == TRANSFORMERS else ("ignore_eos:true",)
            model = folder.name if name == OURS else str(folder)
            server = Server(name, f"http://127.0.0.1:{ports[name]}", model, extras)
            _wait(server, process, log.name)
            servers.append(server)
        yield servers


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes], log: str) -> None:
    """Until it has answered requests, which warms it up."""
    body = {"model": server.model, "prompt": " a b c" * 20, "max_tokens": 8, "temperature": 0}
    end = time.monotonic() + START_LIMIT_S
    answered = 0
    while answered < 3:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{server.name} did not start; see {log}:\n{_tail(log)}")
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_LIMIT_S) as answer:
                answer.read()
                answered += 1
        except OSError:
            time.sleep(0.5)


def _tail(log: str) -> str:
    return Path(log).read_text(errors="replace")[-1500:]


def write_prompts(target: Path, folder: Path, shape: str, count: int, seed: int) -> int:
    """Requests of workload W4, as aiperf reads them, with texts. Returns their tokens to make."""
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
    """aiperf's report of one run: requests at that rate, until the last is answered."""
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
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RUN_LIMIT_S,
        env=environment,
    )
    report = artifacts / "profile_export_aiperf.json"
    if not report.is_file():
        raise SystemExit(f"aiperf has failed:\n{done.stdout.decode(errors='replace')[-3000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def count_of(arguments: argparse.Namespace, rate: float) -> int:
    """Requests of a run at a rate."""
    return max(4, round(rate * arguments.seconds))


def figures(report: dict[str, Any], sent: int, tokens: int) -> dict[str, float]:
    """Of aiperf's report: times in ms, goodput in requests per second."""

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
    # What aiperf calls inter-token latency is an average over each request.
    names = (
        ("ttft", "time_to_first_token"),
        ("itl", "inter_chunk_latency"),
        ("mean_itl", "inter_token_latency"),
    )
    for label, name in names:
        for statistic in ("p50", "p99"):
            row[f"{label}_ms_{statistic}"] = of(name, statistic)
    return row


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], Any]:
    """A row for each rate and server, and the machine's states before each."""
    rows, states = [], []
    with (
        tempfile.TemporaryDirectory(prefix="nano-") as scratch,
        running(arguments, folder, Path(scratch)) as servers,
    ):
        for place, rate in enumerate(arguments.rates):
            prompts = Path(scratch) / f"{rate}.jsonl"
            sent = count_of(arguments, rate)
            tokens = write_prompts(prompts, folder, arguments.shape, sent, seed=place)
            turn = place % len(servers)
            for server in servers[turn:] + servers[:turn]:
                if state := machine.measure(arguments.threads):
                    states.append(asdict(state))
                report = load(arguments, server, rate, prompts, Path(scratch))
                row = {"rate": rate, "server": server.name} | figures(report, sent, tokens)
                rows.append(row)
                print_row(row)
    return rows, states


def print_head() -> None:
    print(
        f"{'requests/s':>10}  {'':20}{'TTFT ms p50':>12}{'p99':>8}{'ITL ms p50':>12}{'p99':>8}"
        f"{'goodput/s':>11}{'good':>7}{'answered':>10}{'tokens/s':>10}"
    )


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['rate']:10.2g}  {row['server']:20}{row['ttft_ms_p50']:12.0f}"
        f"{row['ttft_ms_p99']:8.0f}{row['itl_ms_p50']:12.1f}{row['itl_ms_p99']:8.0f}"
        f"{row['goodput']:11.2f}{row['good']:7.0%}{row['answered']:6.0f}/{row['sent']}"
        f"{row['tokens_per_s']:10.0f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--aiperf", required=True, metavar="PATH", help="aiperf 0.13's program")
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's program")
    parser.add_argument(
        "--transformers", metavar="PYTHON", help="an interpreter with transformers[serving]"
    )
    parser.add_argument("--rates", default="0.5,1,2", help="requests per second")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals at each rate")
    parser.add_argument("--shape", default="S", choices=sorted(SHAPES))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args()
    arguments.rates = [float(rate) for rate in arguments.rates.split(",")]
    return arguments


def main() -> None:
    arguments = parse()
    folder = made_model(arguments.folder, arguments.shape)
    if arguments.llama_server and not folder.with_suffix(".gguf").is_file():
        raise SystemExit(f"first run: python benchmarks/engines/make_gguf.py {folder}")
    print_head()
    rows, states = measure(arguments, folder)
    if arguments.json:
        content = {
            "device": f"{os.cpu_count()} CPU cores",
            "shape": arguments.shape,
            "threads": arguments.threads,
            "seconds": arguments.seconds,
            "good_ttft_ms": TTFT_MS,
            "good_itl_ms": ITL_MS,
            "rows": rows,
            "states": states,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
