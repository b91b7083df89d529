"""Pictures of the results of fairness_sim.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from fairness_model import SECOND, Outcome
from harness import percentile
from matplotlib import pyplot

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def draw(outcomes: Mapping[str, Sequence[Outcome]], found: dict[str, Any], folder: Path) -> None:
    """Write PNG files: service by tenant and TTFT over time for each load, and the gaps."""
    folder.mkdir(parents=True, exist_ok=True)
    for load, runs in outcomes.items():
        if load != "noisy":  # its quiet tenant gets everything it requests
            _service(runs, folder / f"fairness-{load}.png")
        if load != "shares":  # all its requests wait long
            _ttft(runs, folder / f"fairness-{load}-ttft.png")
    if "gap" in found:
        _gaps(found["gap"], folder / "fairness-gap.png")


def _service(runs: Sequence[Outcome], path: Path) -> None:
    figure, axes = pyplot.subplots(1, len(runs), figsize=(3.2 * len(runs), 3), sharey=True)
    for axis, run in zip(axes, runs, strict=True):
        tenants = sorted({name for _, service in run.service for name in service})
        for tenant, colour in zip(tenants[:6], COLOURS, strict=False):
            times = [at / SECOND for at, _ in run.service]
            served = [service.get(tenant, 0.0) / 1e6 for _, service in run.service]
            axis.plot(times, served, label=tenant, color=colour)
        axis.set_title(run.name)
        axis.set_xlabel("simulated s")
    axes[0].set_ylabel("service, million weighted tokens")
    axes[0].legend(frameon=False)
    _save(figure, path)


def _ttft(runs: Sequence[Outcome], path: Path) -> None:
    """Draw the p99 of each second's arrivals, of the tenant with the fewest requests."""
    sent: dict[str, int] = {}
    for record in runs[0].records:
        sent[record.arrival.tenant] = sent.get(record.arrival.tenant, 0) + 1
    tenant = min(sent, key=lambda name: sent[name])
    figure, axis = pyplot.subplots(figsize=(6.4, 3))
    for run, colour in zip(runs, COLOURS, strict=False):
        seconds: dict[int, list[float]] = {}
        for record in run.records:
            if record.arrival.tenant == tenant:
                at = record.arrival.at_ns // SECOND
                seconds.setdefault(at, []).append(record.ttft_ns / 1e6)
        times = sorted(seconds)
        late = [percentile(seconds[at], 0.99) for at in times]
        # Dashes keep overlapping lines visible.
        style = "--" if run.name in ("alone", "priority", "ours") else "-"
        axis.plot(times, late, style, label=run.name, color=colour)
    axis.set_yscale("log")
    axis.set_xlabel("arrival, simulated s")
    axis.set_ylabel(f"p99 TTFT of {tenant}, ms")
    axis.legend(frameon=False, ncols=3)
    _save(figure, path)


def _gaps(gaps: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw the largest gaps, with the number of steps; the peers run a tenth of the steps."""
    figure, axis = pyplot.subplots(figsize=(6.4, 3))
    names = [f"{name}\n{each['steps']:,} steps" for name, each in gaps.items()]
    axis.bar(names, [each["gap"] for each in gaps.values()], color=COLOURS[0], width=0.5)
    bound = gaps["VTC"]["bound"]
    axis.axhline(bound, color=COLOURS[1], label="bound of VTC")
    axis.axhline(gaps["ours"]["bound"], color=COLOURS[2], linestyle="--", label="bound of ours")
    axis.set_yscale("log")
    axis.set_ylabel("largest gap, weighted tokens")
    axis.legend(frameon=False)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"drawn: {path}")
