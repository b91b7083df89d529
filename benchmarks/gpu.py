"""A CUDA device: its correctness, and its speed beside Transformers and the floor.

    python benchmarks/gpu.py [--shapes S,L] [--workloads W1,W2] [--repeat 3] [--minutes 9]
                             [--check-only] [--json FILE]

First the checks: small random models in float32 and bfloat16 against Transformers, with and without
CUDA graphs. If one fails, nothing is measured. Then bandwidth and matrix products of the device,
which give the floors, and the workloads of `workloads.py` on random weights of each shape. Ours is
batching and executor as in the pipeline, one step ahead, without messages. Work that exceeds the
minutes is left out and named. Without a CUDA device the program says so and ends.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cores import Ours, Outcome
from harness import options, percentile, write
from random_models import random_model
from torch.profiler import ProfilerActivity, profile
from transformers_peer import generate, generate_batch
from workloads import SHAPES, WORKLOADS, Request, Workload, make_requests, qwen2

CHECKED = qwen2(256, 512, 4, (8, 2), 4096)
GPU_WORKLOADS = {
    **WORKLOADS,
    "W2 256": replace(WORKLOADS["W2"], prompts=256),
    "W3 256": replace(WORKLOADS["W3"], prompts=32),
    "W4": replace(WORKLOADS["W4"], rate=16.0),
}
"""W2 and W3 also with 256 sequences, since a device batches more than a CPU."""


# --- correctness ------------------------------------------------------------------------------


def scores(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return Transformers' logprobs at the places of these tokens, `[tokens, vocab]` in float32."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def distance(model: Any, requests: list[Request], outcome: Outcome) -> tuple[float, float]:
    """Return the mean difference of reported logprobs from the model's, and the largest shortfall
    of a chosen token's logprob."""
    differences, short = [], 0.0
    for seq_id, request in enumerate(requests):
        tokens = outcome.tokens[seq_id]
        table = scores(model, request.token_ids, tokens)
        chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])[:, 0]
        reported = torch.tensor(outcome.logprobs[seq_id], device=table.device)
        differences.append(float((chosen - reported).abs().mean()))
        short = max(short, float((table.amax(-1) - chosen).max()))
    return statistics.mean(differences), short


def check(device: str) -> dict[str, Any]:
    """Compare small models with Transformers.

    Raises:
        AssertionError: A check fails.
    """
    work = Workload(12, 5, 200, (20, 60))
    requests = make_requests(work, CHECKED["vocab_size"], seed=1)
    exact = random_model(CHECKED, torch.float32, device)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        reference = random_model(CHECKED, torch.float32, device).to(dtype)
        outcomes = {}
        for graphs in (True, False):
            ours = Ours(random_model(CHECKED, torch.float32, device).to(dtype), graphs=graphs)
            if graphs and device == "cuda":
                assert ours.core.state.steps.graphs, f"no graphs: {ours.core.off.get('graphs', '')}"
            outcomes[graphs] = outcome = ours.run(requests, work)
            own, short = distance(exact, requests, outcome)
            row = {"mean difference of logprobs from float32": own, "falls short by": short}
            if dtype == torch.float32:
                assert own < 1e-4, row
                assert short < 1e-3, row
            else:
                theirs = []
                for seq_id, request in enumerate(requests):
                    pair = request.token_ids, outcome.tokens[seq_id]
                    at = torch.tensor(pair[1], device=device)[:, None]
                    gap = scores(reference, *pair) - scores(exact, *pair)
                    theirs.append(float(gap.gather(1, at).abs().mean()))
                row["Transformers' own"] = statistics.mean(theirs)
                assert own <= 1.5 * row["Transformers' own"] + 1e-3, row
            found[f"{dtype}, graphs {'on' if graphs else 'off'}"] = row
        same = [outcomes[True].tokens[i] == outcomes[False].tokens[i] for i in range(len(requests))]
        found[f"{dtype}, sequences equal with graphs on and off"] = f"{sum(same)} of {len(same)}"
        if dtype == torch.float32:
            mine = [outcomes[True].tokens[i] for i in range(len(requests))]
            theirs_ids = [generate(exact, [each], work)[0].tolist() for each in requests]
            equal = sum(a == b for a, b in zip(mine, theirs_ids, strict=True))
            found["sequences equal to generate's"] = f"{equal} of {len(mine)}"
    for name, row in found.items():
        print(f"  {name}: {row}")
    return found


# --- speed ------------------------------------------------------------------------------------


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def floors() -> dict[str, float]:
    """Return the device's best bandwidth of a copy, and speed of a matrix product."""
    source, target = (torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    side = 8192
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copies = [seconds(lambda: target.copy_(source)) for _ in range(10)]
    products = [seconds(lambda: left @ right) for _ in range(10)]
    return {
        "copy_gb_s": 2 * source.nbytes / min(copies) / 1e9,
        "matmul_tflops": 2 * side**3 / min(products) / 1e12,
    }


def describe(workload: Workload, outcomes: list[Outcome]) -> dict[str, Any]:
    """Return medians over the repetitions."""
    row: dict[str, Any] = {"total_s": statistics.median(each.seconds for each in outcomes)}
    row["step_ms"] = 1e3 * statistics.median(s for each in outcomes for s in each.steps_s)
    row["prefill_s"] = statistics.median(max(each.first_s.values()) for each in outcomes)
    made = statistics.median(sum(map(len, each.tokens.values())) for each in outcomes)
    row["tokens_per_s"] = made / row["total_s"]
    if workload.rate:
        waits, gaps = [], []
        for each in outcomes:
            for seq_id, first in each.first_s.items():
                waits.append(1e3 * (first - each.arrival_s[seq_id]))
                count = len(each.tokens[seq_id]) - 1
                gaps.append(1e3 * (each.last_s[seq_id] - first) / count)
        for name, values in (("ttft_ms", waits), ("tpot_ms", gaps)):
            row[name] = {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}
    return row


def profile_step(ours: Ours, workload: Workload, vocab_size: int) -> list[dict[str, Any]]:
    """Return the kernels of decode steps, with microseconds per step."""
    requests = make_requests(workload, vocab_size, seed=99)
    steps = requests[0].new_tokens - 1
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        ours.run(requests, workload)
    averages = profiler.key_averages()
    print(averages.table(sort_by="self_device_time_total", row_limit=20, max_name_column_width=70))
    kernels = sorted(averages, key=lambda each: -each.self_device_time_total)[:20]
    return [
        {
            "name": each.key,
            "calls": each.count,
            "us_per_step": round(each.self_device_time_total / steps, 2),
        }
        for each in kernels
    ]


def measure(
    shape: str, names: list[str], repeat: int, deadline: float, bandwidth: float
) -> dict[str, Any]:
    """Measure all workloads on one shape, ours and the peers in turn."""
    settings = SHAPES[shape]
    peer = random_model(settings, torch.bfloat16, "cuda")
    ours = Ours(random_model(settings, torch.bfloat16, "cuda"))
    size = sum(each.nbytes for each in peer.parameters())
    if not settings["tie_word_embeddings"]:
        size -= peer.get_input_embeddings().weight.nbytes  # a step reads only some rows
    floor_ms = 1e3 * size / (bandwidth * 1e9)
    print(
        f"\nshape {shape}: {size / 1e9:.2f} GB per step, floor {floor_ms:.3f} ms; "
        f"ours started in {ours.start_s:.1f} s, graphs: {ours.core.off.get('graphs', '') or 'on'}"
    )
    found: dict[str, Any] = {"floor_ms": floor_ms, "start_s": ours.start_s, "left_out": []}
    found["without_graphs"] = ours.core.off.get("graphs", "")
    vocab_size = settings["vocab_size"]
    for name in names:
        workload = GPU_WORKLOADS[name]
        outcomes: list[Outcome] = []
        peers: dict[str, list[float]] = {}
        for repetition in range(repeat + 1):  # the first repetition warms up
            if time.monotonic() > deadline:
                found["left_out"].append(f"{name}, repetition {repetition}")
                break
            requests = make_requests(workload, vocab_size, seed=repetition)
            outcome = ours.run(requests, workload)
            times: dict[str, float] = {}
            if not workload.rate:
                run = {
                    "generate": lambda r=requests, w=workload: generate(peer, r, w),
                    "generate, 1 token": lambda r=requests, w=workload: generate(peer, r, w, 1),
                    "generate_batch": lambda r=requests, w=workload: generate_batch(peer, r, w),
                }
                for label, call in run.items():
                    try:
                        times[label] = seconds(call)
                    except Exception as error:  # noqa: BLE001  (a peer's failure is a finding)
                        found.setdefault("peer_errors", {})[f"{name}, {label}"] = repr(error)
            if repetition:
                outcomes.append(outcome)
                for label, took in times.items():
                    peers.setdefault(label, []).append(took)
        if not outcomes:
            continue
        row = describe(workload, outcomes)
        row["of_bandwidth"] = floor_ms / row["step_ms"]
        row["peers_s"] = {label: statistics.median(took) for label, took in peers.items()}
        row["times_faster"] = {
            label: took / row["total_s"]
            for label, took in row["peers_s"].items()
            if "," not in label
        }
        found[name] = row
        print(f"  {name}: {json.dumps(row, default=str)}")
    for name in ("W1", "W2"):
        if name in names and time.monotonic() < deadline:
            print(f"\nshape {shape}, {name}: prefill and decode steps by kernel")
            found[f"profile {name}"] = profile_step(ours, GPU_WORKLOADS[name], vocab_size)
    return found


def main() -> int:
    arguments = options(
        __doc__,
        shapes=["S", "L"],
        workloads=["W1", "W2", "W3", "W5", "W4", "W2 256", "W3 256"],
        repeat=3,
        minutes=9.0,
        check_only=False,
    ).parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was checked and nothing was measured.")
        return 1
    deadline = time.monotonic() + 60 * arguments.minutes
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}\nchecks:")
    content: dict[str, Any] = {"device": name, "torch": torch.__version__}
    content |= {"cuda": torch.version.cuda, "checks": check("cuda")}
    if arguments.check_only:
        return 0
    slug = name.lower().replace(" ", "-")
    target = arguments.json or Path(__file__).parent / "results" / f"gpu-{slug}.json"
    content["device_can"] = floors()
    print(f"device: {content['device_can']}")
    for shape in arguments.shapes:
        torch.cuda.empty_cache()
        bandwidth = content["device_can"]["copy_gb_s"]
        size = (arguments.workloads, arguments.repeat, deadline, bandwidth)
        content[shape] = measure(shape, *size)
        write(target, content)  # after each shape, in case the next one fails
    print(f"\nwritten to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
