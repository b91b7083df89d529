"""Service of tenants under four policies, simulated with the stages' own cores.

    python benchmarks/fairness_sim.py [--seconds S] [--gap-steps N] [--plots FOLDER] [--json FILE]
    python benchmarks/fairness_sim.py --trace FILE [--set NAME=VALUE ...]

Compares first come first served, a priority flag with ageing, virtual token counters alone, and
this engine's fairness with all features, on loads of thousands of requests per second on a device
that is a formula (fairness_model.py). The cores of fairness and batching are the pipeline's.

A trace is CSV with the columns arrival (seconds), tenant, prompt, output (tokens) and optionally
priority, or the same as JSON lines. --plots needs matplotlib (`pip install .[plots]`).
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fairness_model import POLICIES, SECOND, Arrival, Device, Outcome, Simulation, jain, read_trace
from harness import markdown, options, percentile, record

from nano_inference.cli.fairness import changed
from nano_inference.config import FairnessConfig

EVERYTHING = FairnessConfig(enable_preemption=True, max_timeslice_tokens=128, locality_tokens=4096)


# --- loads ----------------------------------------------------------------------------------------


def stream(
    rng: random.Random,
    tenant: str,
    per_second: float,
    seconds: float,
    prompt: tuple[int, int],
    output: tuple[int, int],
    *,
    priority: int = 0,
    groups: int = 0,
    shared: int = 0,
) -> list[Arrival]:
    """Return Poisson arrivals of a tenant, with lengths between bounds; `groups` share prefixes."""
    found = []
    at = rng.expovariate(per_second)
    while at < seconds:
        lengths = shared + rng.randint(*prompt), rng.randint(*output)
        group = rng.randrange(groups) if groups else 0
        found.append(Arrival(int(at * SECOND), tenant, *lengths, priority, group, shared))
        at += rng.expovariate(per_second)
    return found


def noisy_load(seconds: float) -> tuple[list[Arrival], list[Arrival]]:
    """Return a tenant, and one with fifty times as many requests, together an overload."""
    rng = random.Random(1)
    quiet = stream(rng, "quiet", 60, seconds, (64, 192), (16, 48))
    noisy = stream(rng, "noisy", 3000, seconds, (64, 192), (16, 48))
    return quiet, noisy


def shares_load(seconds: float) -> list[Arrival]:
    """Return four tenants with different requests, each above a quarter of the capacity."""
    rng = random.Random(5)
    return [
        *stream(rng, "summaries", 900, seconds, (400, 800), (8, 24)),
        *stream(rng, "chat", 1800, seconds, (64, 192), (32, 64)),
        *stream(rng, "stories", 450, seconds, (16, 64), (150, 250)),
        *stream(rng, "labels", 6000, seconds, (48, 80), (1, 4)),
    ]


def urgent_load(seconds: float) -> list[Arrival]:
    """Return four tenants with long completions, which fill the batch, and some urgent requests."""
    rng = random.Random(2)
    load = []
    for number in range(4):
        load += stream(rng, f"batch-{number}", 110, seconds, (128, 512), (300, 700))
    return load + stream(rng, "urgent", 20, seconds, (64, 128), (8, 32), priority=8)


def prefix_load(seconds: float) -> list[Arrival]:
    """Return eight tenants with different system prompts, together larger than the cache."""
    rng = random.Random(3)
    load = []
    for number in range(8):
        arrivals = stream(
            *(rng, f"agent-{number}", 120, seconds, (32, 96), (16, 64)), groups=6, shared=1024
        )
        load += [replace(each, group=each.group + 6 * number) for each in arrivals]
    return load


# --- tables ---------------------------------------------------------------------------------------


def figures(outcome: Outcome, peer: Outcome) -> dict[str, Any]:
    """Return the figures for the result file and the tables."""
    ttft_ns: dict[str, list[int]] = defaultdict(list)
    for each in outcome.records:
        ttft_ns[each.arrival.tenant].append(each.ttft_ns)
    unfinished = sum(not each.finished_ns for each in outcome.records)
    assert not unfinished, f"{unfinished} requests were lost under {outcome.name}"
    return {
        "requests": len(outcome.records),
        "steps": outcome.steps,
        "simulated_s": outcome.end_ns / SECOND,
        "device_s": outcome.busy_ns / SECOND,
        "device_time_x_fcfs": outcome.busy_ns / peer.busy_ns,
        "tokens_per_s": (outcome.prompt_tokens + outcome.output_tokens) / outcome.busy_ns * SECOND,
        "computed_tokens": outcome.computed_tokens,
        "recomputed_tokens": outcome.recomputed_tokens,
        "preemptions": outcome.preemptions,
        "yields": outcome.yields,
        "jain": contended_jain(outcome),
        "ttft_ms": {
            tenant: {
                name: percentile(times, share) / 1e6
                for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            }
            for tenant, times in sorted(ttft_ns.items())
        },
    }


def contended_jain(outcome: Outcome) -> float | None:
    """Return Jain's index of service while all tenants had queued requests; None if never."""
    tenants = {each.arrival.tenant for each in outcome.records}
    gained: dict[str, float] = defaultdict(float)
    samples = list(zip(outcome.service, outcome.waiting, strict=True))
    for (before, was), (after, now) in itertools.pairwise(samples):
        if all(was[1].get(tenant) and now[1].get(tenant) for tenant in tenants):
            for tenant in tenants:
                gained[tenant] += after[1][tenant] - before[1].get(tenant, 0.0)
    return jain(gained.values()) if gained else None


def compare(
    title: str, load: list[Arrival], config: FairnessConfig, device: Device, watched: list[str]
) -> tuple[dict[str, Any], list[Outcome]]:
    """Run a load under all policies; print a table, and return its figures and outcomes."""
    outcomes = [Simulation(policy, config, device).run(load) for policy in POLICIES]
    found = {outcome.name: figures(outcome, outcomes[0]) for outcome in outcomes}
    header = ["policy", *(f"{tenant} TTFT p50 / p99, ms" for tenant in watched)]
    header += ["Jain while all wait", "device time x FCFS", "recomputed"]
    header.append("preempted / slices ended")
    rows = []
    for name, each in found.items():
        row = [name]
        for tenant in watched:
            seen = each["ttft_ms"][tenant]
            row.append(f"{seen['p50']:,.1f} / {seen['p99']:,.1f}")
        share = each["recomputed_tokens"] / each["computed_tokens"]
        row.append("-" if each["jain"] is None else f"{each['jain']:.3f}")
        row += [f"{each['device_time_x_fcfs']:.4f}", f"{share:.2%}"]
        row.append(f"{each['preemptions']} / {each['yields']}")
        rows.append(row)
    print(f"\n{title} ({len(load):,} requests)\n\n{markdown(header, rows)}")
    return found, outcomes


# --- the gap --------------------------------------------------------------------------------------

GAP_DEVICE = Device(num_blocks=4096, max_batch_size=32, max_tokens_per_batch=512)

GAP_TENANTS: dict[str, tuple[float, tuple[int, int], tuple[int, int]]] = {
    "chat": (1.0, (20, 200), (10, 60)),
    "summaries": (1.0, (300, 480), (5, 20)),
    "stories": (1.0, (5, 20), (100, 200)),
    "gold": (2.0, (50, 150), (20, 80)),
    "tiny": (0.5, (1, 5), (1, 5)),
}
"""Weight, and bounds of prompts and completions."""


BOUNDED = ("VTC", "ours")
"""The peers have no bound."""


def gap_bound(config: FairnessConfig, prompt: int, output: int, places: int) -> float:
    """Return the bound of docs/fairness.md on one tenant's gain over another."""
    weights = [config.tenant_weights.get(tenant, 1.0) for tenant in GAP_TENANTS]
    unit = config.prefill_weight * prompt + config.decode_weight * places * output
    return 2 * (unit / min(weights) + config.locality_tokens)


def measure_gap(policy: str, steps: int, config: FairnessConfig) -> dict[str, Any]:
    """Return the largest gain of one tenant over another within any interval, of five tenants that
    always have queued requests, beside visitors."""
    rng = random.Random(4)
    simulation = Simulation(policy, config, GAP_DEVICE, keep_records=False, sample_every_ns=SECOND)
    pairs = list(itertools.combinations(GAP_TENANTS, 2))
    least, most = dict.fromkeys(pairs, float("inf")), dict.fromkeys(pairs, float("-inf"))
    places = GAP_DEVICE.max_batch_size
    started = time.perf_counter()
    for step in range(steps):
        for tenant, (_, prompt, output) in GAP_TENANTS.items():
            while simulation.num_waiting[tenant] <= places:
                lengths = rng.randint(*prompt), rng.randint(*output)
                simulation.submit(Arrival(simulation.now_ns, tenant, *lengths))
        if step % 97 == 0:
            visitor = f"visitor-{rng.randrange(50)}"
            lengths = rng.randint(1, 480), rng.randint(1, 200)
            simulation.submit(Arrival(simulation.now_ns, visitor, *lengths))
        service = simulation.service
        for pair in pairs:
            lead = service[pair[0]] - service[pair[1]]
            if lead < least[pair]:
                least[pair] = lead
            if lead > most[pair]:
                most[pair] = lead
        simulation.step()
    gap = max(most[pair] - least[pair] for pair in pairs)
    served = [simulation.service[tenant] for tenant in GAP_TENANTS]
    return {
        "steps": steps,
        "gap": gap,
        "bound": gap_bound(config, 480, 200, places),
        "jain": jain(served),
        "service": sum(served) / len(served),
        "wall_s": time.perf_counter() - started,
    }


def gaps(steps: int) -> dict[str, Any]:
    """Measure the gap under counters and ours, and for a tenth of the steps under the peers."""
    weights = {tenant: weight for tenant, (weight, _, _) in GAP_TENANTS.items()}
    config = FairnessConfig(tenant_weights=weights)
    everything = changed(EVERYTHING, [f"tenant_weights={json.dumps(weights)}"])
    found = {}
    for policy, number, settings in (
        ("FCFS", steps // 10, config),
        ("priority", steps // 10, config),
        ("VTC", steps, config),
        ("ours", steps, everything),
    ):
        found[policy] = measure_gap(policy, number, settings)
        if policy in BOUNDED:
            assert found[policy]["gap"] <= found[policy]["bound"], "the bound does not hold"
    head = ["policy", "steps", "gap", "bound", "gap / bound", "Jain", "mean service"]
    body = []
    for name, each in found.items():
        bound, share = "none", "-"
        if name in BOUNDED:
            bound, share = f"{each['bound']:,.0f}", f"{each['gap'] / each['bound']:.2f}"
        counts = [f"{each['steps']:,}", f"{each['gap']:,.0f}", bound, share]
        body.append([name, *counts, f"{each['jain']:.4f}", f"{each['service']:,.0f}"])
    print("\nTenants that always wait: the largest gain over another, in weighted tokens\n")
    print(markdown(head, body))
    return found


# --- the program ----------------------------------------------------------------------------------


def main() -> None:
    parser = options(
        __doc__,
        seconds=(15.0, "simulated, of each load"),
        gap_steps=1_000_000,
        trace=Path,
        plots=(Path, "a folder for PNG files"),
    )
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="NAME=VALUE")
    arguments = parser.parse_args()
    config = changed(EVERYTHING, arguments.changes)
    device = Device()
    found: dict[str, Any] = {"device": asdict(device)}
    if arguments.trace:
        load = list(read_trace(arguments.trace))
        tenants = sorted({each.tenant for each in load})
        found["trace"], outcomes = compare(str(arguments.trace), load, config, device, tenants[:4])
        plots = {"trace": outcomes}
    else:
        quiet, noisy = noisy_load(arguments.seconds)
        found["noisy"], noisy_outcomes = compare(
            *("A neighbour that sends 50 times as much", quiet + noisy, config, device),
            watched=["quiet", "noisy"],
        )
        alone = Simulation("FCFS", config, device).run(quiet)
        alone.name = "alone"
        found["noisy"]["alone"] = figures(alone, alone)
        seen = found["noisy"]["alone"]["ttft_ms"]["quiet"]
        print(f"\nquiet alone: {seen['p50']:.1f} / {seen['p99']:.1f} ms")
        load = shares_load(arguments.seconds / 3)
        found["shares"], shares_outcomes = compare(
            *("Four tenants that all send too much", load, config, device),
            watched=["chat", "labels"],
        )
        load = urgent_load(arguments.seconds)
        found["urgent"], _ = compare(
            "What is urgent, while the batch is full", load, config, device, ["urgent", "batch-0"]
        )
        load = prefix_load(arguments.seconds)
        small = replace(device, num_blocks=3072)
        found["prefixes"], _ = compare(
            "Prefixes: more than the cache holds", load, config, small, ["agent-0"]
        )
        found["gap"] = gaps(arguments.gap_steps)
        plots = {"noisy": [*noisy_outcomes, alone], "shares": shares_outcomes}
    if arguments.plots:
        from fairness_plots import draw

        draw(plots, found, arguments.plots)
    record(arguments, **found)


if __name__ == "__main__":
    main()
